"""Every image's channels by scales and shifts of its own, with what follows them, in one kernel on a GPU."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    from dsnet.runtime.ragged.kernels import ACTIVATIONS, activate
except ImportError:  # there is no Triton for macOS and Windows
    triton = None

__all__ = ["AVAILABLE", "scaled"]

AVAILABLE = triton is not None
NUMBERS = 4096  # that a program takes


def scaled(x: Tensor, table: Tensor, which: Tensor, added: Tensor | None, act: str) -> Tensor:
    """act(x · scale + shift + added): x [B, C, H, W] with channels last in memory, table [rows, 2 · C].

    A row has scales, then shifts; every image takes the row ``which`` [B].
    """
    images, channels, height, width = x.shape
    positions = height * width
    y = torch.empty_like(x)
    if not y.numel():
        return y
    wide = 1 << (channels - 1).bit_length()
    bc = max(16, min(256, wide))
    bp = max(1, min(NUMBERS // bc, 1 << (positions - 1).bit_length()))
    tiles, columns = -(-positions // bp), -(-channels // bc)
    with torch.cuda.device_of(x):  # kernels are launched on the current device
        _scaled[(images * tiles * columns,)](
            x, x if added is None else added, table, which, y, positions, channels, tiles, columns,
            added is not None, ACTIVATIONS[act], bp, bc, num_warps=4,
        )  # fmt: skip
    return y


if AVAILABLE:

    @triton.jit
    def _scaled(
        x,  # [images, positions, channels]
        added,
        table,  # [rows, 2, channels]
        which,  # [images]
        y,
        positions,
        channels,
        tiles,
        columns,
        ADD: tl.constexpr,
        KIND: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        column = tl.program_id(0) % columns
        tile = tl.program_id(0) // columns % tiles
        image = tl.program_id(0) // columns // tiles
        c = column * BC + tl.arange(0, BC)
        p = tile * BP + tl.arange(0, BP)
        row = table + tl.load(which + image) * 2 * channels
        scale = tl.load(row + c, mask=c < channels, other=0.0).to(tl.float32)
        shift = tl.load(row + channels + c, mask=c < channels, other=0.0).to(tl.float32)
        begin = image.to(tl.int64) * positions * channels
        at = begin + p[:, None] * channels + c[None, :]
        inside = (p < positions)[:, None] & (c < channels)[None, :]
        found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if ADD:
            found += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        found = activate(found, KIND)
        tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)
