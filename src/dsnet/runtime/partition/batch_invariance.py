"""Batch invariance: segments in which the scores of an image do not depend on the rest of its batch.

On a CPU torch chooses kernels by the number of images. A matrix product sums in an order that depends on the
number of rows. A 1 × 1 convolution of fewer than 16 images on one thread, or of a small single image, does
not run by oneDNN. Both change the last bits of scores, and with them decisions between nearly equal scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.runtime.partition.segments import Segment, SegmentKey
from dsnet.slicing import functional as SF

__all__ = ["MIN_SIDE", "make_invariant", "resolve_invariance"]

MIN_SIDE = 96  # pixels; for smaller images, a single image takes over 5 % longer


def resolve_invariance(requested: bool | None, side: int, precision: torch.dtype, memory: str) -> bool:
    """Return whether a plan of the backend eager on a CPU is to be batch-invariant.

    Args:
        requested: The setting of `dsnet.runtime.compile`.
        side: The shorter side of the images.
        precision: The precision of the plan. Below float32, no plan is batch-invariant.
        memory: Plans that share the network's weights run torch's own kernels, which cannot be changed.
    """
    if requested and memory == "shared":
        raise DsnetError(
            "batch_invariant=True is not possible with memory='shared', whose convolutions run by the "
            "kernels that torch takes for a number of images; compile with memory='packed'"
        )
    if precision not in (torch.float32, torch.float64) or memory == "shared":
        return False
    return side >= MIN_SIDE if requested is None else requested


def make_invariant(segments: Mapping[SegmentKey, Segment], gates: int) -> None:
    """Replace linear and convolutional layers of all segments that end at a gate."""
    for history, segment in segments.items():
        if len(history) == gates:  # ends with logits, which decide nothing
            continue
        for module in list(segment.module.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, _RowLinear(child))
                elif isinstance(child, nn.Conv2d) and _may_run_by_onednn(child):
                    setattr(module, name, _OneDnnConv(child))


class _RowLinear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim > 2:  # the product of one image's tokens has the same number of rows in every batch
            return torch.stack([F.linear(tokens, self.weight, self.bias) for tokens in x])
        return SF.row_linear(x, self.weight, self.bias)


def _may_run_by_onednn(layer: nn.Conv2d) -> bool:
    """Return whether torch runs a layer by oneDNN for some numbers of images only."""
    dense = layer.groups == 1 and max(layer.kernel_size) <= 3
    padded = isinstance(layer.padding, tuple) and layer.padding_mode == "zeros"
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return dense and padded and available and layer.weight.dtype == torch.float32


class _OneDnnConv(nn.Module):
    """A convolution that runs by oneDNN for every number of images."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer, padding = self.layer, cast(tuple[int, ...], self.layer.padding)
        return torch.mkldnn_convolution(
            x, layer.weight, layer.bias, padding, layer.stride, layer.dilation, layer.groups
        )
