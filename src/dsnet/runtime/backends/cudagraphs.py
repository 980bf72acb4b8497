"""Torch's kernels, with some of ours between them, captured as CUDA graphs."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from dsnet.kernels.elementwise import scale_by_attention
from dsnet.runtime.backends.base import Backend, Executable, register_backend
from dsnet.runtime.passes.fusion import fuse, leaves_scaling, reads_rows


@register_backend("cudagraphs")
class CudaGraphsBackend(Backend):
    """Fuse operations where there is a kernel for it; the rest runs by torch, channels last."""

    buckets = (1, 8, 64)

    def captures(self, device: torch.device) -> bool:
        """Return True on every device."""
        return True

    def unavailable(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Require a GPU."""
        return None if device.type == "cuda" else f"it is for CUDA, not for {device.type}"

    def compile(self, module: nn.Module, *examples: Tensor) -> Executable:
        """Return the module with fewer passes over memory."""
        return _Fused(fuse(module).to(memory_format=torch.channels_last))  # type: ignore[call-overload]


class _Fused(Executable):
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.reads_rows, self.leaves_scaling = reads_rows(module), leaves_scaling(module)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self.leaves_scaling:
            return self.unscaled(*inputs)
        features, scores, attention = self.unscaled(*inputs)
        return scale_by_attention(features, attention), scores

    def unscaled(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.module(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)
