"""Our own kernels for depthwise separable networks: fused, and in mixed batches every image at its widths."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError

if TYPE_CHECKING:
    from dsnet.runtime.executors.ragged.network import Ragged

__all__ = ["BACKEND"]


class _Triton:
    name = "triton"
    batch_invariant = True
    invariant_logits = False
    buckets = (1, 8, 64)

    def any_batch(self, device: torch.device) -> bool:
        """All sizes, before they are recorded."""
        return True

    def recorded(self, device: torch.device) -> bool:
        """Always: it is for GPUs alone."""
        return True

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """A GPU, and Triton, which comes with torch for CUDA."""
        if device.type != "cuda":
            return f"it is for CUDA, not for {device.type}"
        if importlib.util.find_spec("triton") is None:
            return "it needs Triton: pip install triton"
        if precision not in (torch.float32, torch.bfloat16):
            return f"it computes in float32 and bfloat16, not in {precision}"
        return None

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., Ragged]:
        """The module's layers as kernels."""
        from dsnet.runtime.executors.ragged.network import Ragged  # imports Triton

        try:
            made = Ragged([module])
        except DsnetError as error:
            raise DsnetError(f"backend triton: {error}; try inductor or cudagraphs") from None
        return lambda *examples: made

    def join(self, modules: Sequence[nn.Module]) -> Ragged | None:
        """Modules as one, every image through its own; none: they differ in more than their sizes."""
        from dsnet.runtime.executors.ragged.network import Ragged  # imports Triton
        from dsnet.runtime.executors.ragged.support import unsupported

        return Ragged(modules) if unsupported(modules) is None else None


BACKEND = _Triton()
