"""Torch without a compiler."""

from __future__ import annotations

from torch import Tensor, nn

from dsnet.runtime.backends.base import Backend, register_backend


@register_backend("eager")
class EagerBackend(Backend):
    """Run modules as they are. `dsnet.runtime.partition.batch_invariance` can make them batch-invariant."""

    def compile(self, module: nn.Module, *examples: Tensor) -> nn.Module:
        """Return the module."""
        return module
