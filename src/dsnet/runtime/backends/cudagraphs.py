"""Torch's own kernels, with some of ours between them, recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dsnet.runtime.backends.eager import Call
from dsnet.runtime.fusing import fused

__all__ = ["BACKEND"]


class _CudaGraphs:
    name = "cudagraphs"
    buckets = (1, 8, 64)

    def any_batch(self, device: torch.device) -> bool:
        """All sizes, before they are recorded."""
        return True

    def recorded(self, device: torch.device) -> bool:
        """That is what it is for."""
        return True

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """A GPU."""
        return None if device.type == "cuda" else f"it is for CUDA, not for {device.type}"

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., Call]:
        """The module with fewer passes over memory, channels last."""
        call = Call(fused(module).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
        return lambda *examples: call


BACKEND = _CudaGraphs()
