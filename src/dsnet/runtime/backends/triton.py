"""Triton kernels for depthwise separable networks; in mixed batches every image runs at its own widths."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.runtime.backends.base import Backend, register_backend

if TYPE_CHECKING:
    from dsnet.runtime.executors.ragged.network import Ragged


@register_backend("triton")
class TritonBackend(Backend):
    """Run the layers of a segment by the kernels of the ragged executor."""

    batch_invariant = True
    buckets = (1, 8, 64)
    ragged = True

    def captures(self, device: torch.device) -> bool:
        """Return True: the kernels are for GPUs alone."""
        return True

    def unavailable(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Require a GPU and Triton, which comes with torch for CUDA."""
        if device.type != "cuda":
            return f"it is for CUDA, not for {device.type}"
        if importlib.util.find_spec("triton") is None:
            return "it needs Triton: pip install triton"
        if precision not in (torch.float32, torch.bfloat16):
            return f"it computes in float32 and bfloat16, not in {precision}"
        return None

    def compile(self, module: nn.Module, *examples: Tensor) -> Ragged:
        """Return the module's layers as kernels."""
        from dsnet.runtime.executors.ragged.network import Ragged  # imports Triton

        try:
            return Ragged([module])
        except DsnetError as error:
            raise DsnetError(f"backend triton: {error}; try inductor or cudagraphs") from None
