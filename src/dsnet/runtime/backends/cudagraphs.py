"""Torch's own kernels, with some of ours between them, recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, fx, nn

from dsnet.kernels.elementwise import scale_by_attention
from dsnet.runtime.backends.base import Executable
from dsnet.runtime.backends.eager import Call
from dsnet.runtime.passes.fusion import ends_at_gate, fused, reads_rows

__all__ = ["BACKEND"]


class _CudaGraphs:
    name = "cudagraphs"
    batch_invariant = False
    invariant_logits = False
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

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., Executable]:
        """The module with fewer passes over memory, channels last."""
        made = fused(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        call = _ToGate(made) if ends_at_gate(made) else _Quick(made)
        return lambda *examples: call


class _Quick(Call):
    """A part in fewer kernels."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.reads_rows = reads_rows(module)


class _ToGate(_Quick):
    """One that ends at a gate."""

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Features that the gate has scaled, and scores."""
        features, scores, by = self.apart(*inputs)
        return scale_by_attention(features, by), scores

    def apart(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features yet to be scaled."""
        return cast(tuple[Tensor, Tensor, Tensor], self.module(*inputs))


BACKEND = _CudaGraphs()
