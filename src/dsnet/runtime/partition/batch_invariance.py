"""Parts of torch's own layers in which no image's scores depend on the others of its batch.

On a CPU torch takes other kernels for other numbers of images: matrix products sum in an order that depends
on the number of rows, and a 1 × 1 convolution of fewer than 16 images on one thread, or any of a small
single image, is not oneDNN's. Both change the last bits, and with them decisions of gates that hesitate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.runtime.partition.segments import Segment, SegmentKey
from dsnet.slicing import functional as SF

__all__ = ["SMALL", "chosen", "make_invariant"]

SMALL = 96  # pixels a side: below this it costs a single image more than a twentieth of its time


def chosen(asked: bool | None, image_size: tuple[int, int], precision: torch.dtype, memory: str) -> bool:
    """Whether a plan of the backend eager on a CPU is to be batch-invariant.

    A plan that shares the network's weights runs torch's own kernels, which cannot be changed.
    """
    if asked and memory == "shared":
        raise DsnetError(
            "batch_invariant=True is not possible with memory='shared', whose convolutions run by the "
            "kernels that torch takes for a number of images; compile with memory='packed'"
        )
    if precision not in (torch.float32, torch.float64) or memory == "shared":
        return False
    return min(image_size) >= SMALL if asked is None else asked


def make_invariant(parts: Mapping[SegmentKey, Segment], gates: int) -> None:
    """Change the linear and convolutional layers of all parts that end at a gate.

    Parts that end with logits decide nothing.
    """
    for history, part in parts.items():
        if len(history) == gates:
            continue
        for module in list(part.module.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, _RowLinear(child))
                elif isinstance(child, nn.Conv2d) and _has_other_kernels(child):
                    setattr(module, name, _OneKernel(child))


class _RowLinear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = SF.row_linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return rows.reshape(*x.shape[:-1], -1)


def _has_other_kernels(layer: nn.Conv2d) -> bool:
    """Whether torch takes oneDNN's for some numbers of images alone."""
    dense = layer.groups == 1 and max(layer.kernel_size) <= 3
    padded = isinstance(layer.padding, tuple) and layer.padding_mode == "zeros"
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    onednn = there and layer.weight.dtype == torch.float32
    return dense and padded and onednn


class _OneKernel(nn.Module):
    """A convolution by oneDNN, whatever the number of images."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer
        padding = cast(tuple[int, ...], own.padding)
        return torch.mkldnn_convolution(
            x, own.weight, own.bias, padding, own.stride, own.dilation, own.groups
        )
