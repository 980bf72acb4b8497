"""Suppression of overlapping boxes on a GPU, without a look from the host: it can be part of a CUDA graph."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # there is none for macOS and Windows
    triton = None

__all__ = ["AVAILABLE", "kept_of_sorted"]

AVAILABLE = triton is not None


def kept_of_sorted(boxes: Tensor, there: Tensor, *, threshold: float = 0.45) -> Tensor:
    """`dsnet.detection.boxes.kept_of` for boxes [rows, n, 4], float32, each row of one class.

    Bit for bit: products are rounded before they are added.
    """
    rows, count = there.shape
    kept = torch.empty(rows, count, dtype=torch.bool, device=boxes.device)
    if there.numel():
        block = max(32, 1 << (count - 1).bit_length())
        with torch.cuda.device_of(boxes):  # kernels are launched on the current device
            _greedy[(rows,)](
                boxes.contiguous(), there.contiguous().view(torch.uint8), kept.view(torch.uint8), count,
                float(threshold), block, num_warps=max(1, block // 256), enable_fp_fusion=False,
            )  # fmt: skip
    return kept


if AVAILABLE:

    @triton.jit
    def _side(low, high):
        """Nothing where there is none, NaN where there is one."""
        return tl.maximum(high - low, 0.0, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def _greedy(
        boxes,  # [rows, count, 4]
        there,  # [rows, count]
        kept,  # [rows, count]
        count,
        threshold,
        BLOCK: tl.constexpr,
    ):
        """One row a program: from one box that is kept to the next."""
        row = tl.program_id(0).to(tl.int64)
        n = tl.arange(0, BLOCK)
        inside = n < count
        boxes += row * count * 4
        left = tl.load(boxes + 4 * n, mask=inside, other=0.0)
        top = tl.load(boxes + 4 * n + 1, mask=inside, other=0.0)
        right = tl.load(boxes + 4 * n + 2, mask=inside, other=0.0)
        bottom = tl.load(boxes + 4 * n + 3, mask=inside, other=0.0)
        area = _side(left, right) * _side(top, bottom)
        alive = tl.load(there + row * count + n, mask=inside, other=0) != 0
        at = tl.min(tl.where(alive, n, BLOCK), 0)
        while at < BLOCK:
            x0 = tl.load(boxes + 4 * at)
            y0 = tl.load(boxes + 4 * at + 1)
            x1 = tl.load(boxes + 4 * at + 2)
            y1 = tl.load(boxes + 4 * at + 3)
            width = _side(
                tl.maximum(left, x0, propagate_nan=tl.PropagateNan.ALL),
                tl.minimum(right, x1, propagate_nan=tl.PropagateNan.ALL),
            )
            height = _side(
                tl.maximum(top, y0, propagate_nan=tl.PropagateNan.ALL),
                tl.minimum(bottom, y1, propagate_nan=tl.PropagateNan.ALL),
            )
            common = width * height
            union = _side(x0, x1) * _side(y0, y1) + area - common
            some = union > 0
            shared = tl.where(some, tl.div_rn(common, tl.where(some, union, 1.0)), 0.0)
            alive = alive & ~((shared > threshold) & (n > at))
            at = tl.min(tl.where(alive & (n > at), n, BLOCK), 0)
        tl.store(kept + row * count + n, alive.to(tl.uint8), mask=inside)
