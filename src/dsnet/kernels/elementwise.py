"""Channels times scales, and means over positions: kernels of our own for a GPU.

Torch does these in several passes over memory, or slowly where channels are last in memory. Every function
has a plain form, which runs elsewhere and where memory is laid out otherwise.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl

    from dsnet.kernels.ragged import ACTIVATIONS, activate
except ImportError:  # there is no Triton for macOS and Windows
    triton = None

__all__ = [
    "ACTS",
    "AVAILABLE",
    "NUMBERS",
    "channels_last",
    "has_kernels",
    "means",
    "power",
    "scaled",
    "scaled_means",
    "weighted",
]

AVAILABLE = triton is not None
ACTS = {"none": lambda x: x, "relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish}
NUMBERS = 4096  # that a program takes
INTERPRETED = False  # whether kernels also run on the host, by Triton's interpreter: for tests


def scaled(
    x: Tensor,
    table: Tensor,
    which: Tensor | None = None,
    added: Tensor | None = None,
    act: str = "none",
) -> Tensor:
    """act(x · scale + shift + added) of x [B, C, H, W]; table [rows, 2 · C].

    A row has scales, then shifts; every image takes the row ``which`` [B], or all take the first.
    """
    if not _ready(x, added):
        row = table[:1] if which is None else table.index_select(0, which)
        scale, shift = row[:, :, None, None].chunk(2, 1)
        y = torch.addcmul(shift, x.to(table.dtype), scale)
        return ACTS[act](y if added is None else y + added).to(x.dtype)
    images, channels, height, width = x.shape
    positions = height * width
    which = None if which is None else which.contiguous()
    if which is None:
        images, positions = 1, images * positions
    y = torch.empty_like(x)
    bp, bc = _tile(positions, channels)
    tiles, columns = -(-positions // bp), -(-channels // bc)
    with torch.cuda.device_of(x):  # kernels are launched on the current device
        _scaled[(images * tiles * columns,)](
            x, x if added is None else added, table, table if which is None else which, y, positions,
            channels, tiles, columns, which is not None, added is not None, ACTIVATIONS[act], bp, bc,
            num_warps=4,
        )  # fmt: skip
    return y


def scaled_means(
    x: Tensor,
    table: Tensor,
    which: Tensor | None = None,
    added: Tensor | None = None,
    act: str = "none",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """What `scaled` gives, and its means over positions [B, C], of this type."""
    if not _ready(x, added):
        y = scaled(x, table, which, added, act)
        return y, y.mean((2, 3), dtype=dtype)
    images, channels, height, width = x.shape
    y, which = torch.empty_like(x), None if which is None else which.contiguous()
    mean = torch.empty(images, channels, dtype=dtype or x.dtype, device=x.device)
    bc = min(32, power(channels, 8))
    bp = min(256, power(height * width, 16))
    with torch.cuda.device_of(x):
        _scaled_means[(images, -(-channels // bc))](
            x, x if added is None else added, table, table if which is None else which, y, mean,
            height * width, channels, which is not None, added is not None, ACTIVATIONS[act], bp, bc,
            num_warps=8,
        )  # fmt: skip
    return y, mean


def weighted(x: Tensor, by: Tensor) -> Tensor:
    """Channels of x [B, C, H, W] times 1 + tanh of each image's own ``by`` [B, C]."""
    if not channels_last(x):
        return x * (1 + torch.tanh(by)).to(x.dtype)[:, :, None, None]
    images, channels, height, width = x.shape
    positions = height * width
    by, y = by.expand(images, -1).contiguous(), torch.empty_like(x)
    bp, bc = _tile(positions, channels)
    tiles, columns = -(-positions // bp), -(-channels // bc)
    with torch.cuda.device_of(x):
        _weighted[(images * tiles * columns,)](
            x, by, y, positions, channels, tiles, columns, bp, bc, num_warps=4
        )
    return y


def means(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Over positions: [B, C, H, W] → [B, C]."""
    if not channels_last(x):
        return x.mean((2, 3), dtype=dtype)
    images, channels, height, width = x.shape
    y = torch.empty(images, channels, dtype=dtype or x.dtype, device=x.device)
    bc = min(32, power(channels, 8))
    bp = min(512, power(height * width, 16))
    with torch.cuda.device_of(x):
        _means[(images, -(-channels // bc))](x, y, height * width, channels, bp, bc, num_warps=8)
    return y


def has_kernels(x: Tensor) -> bool:
    """Whether there are some for it, where it is."""
    if not AVAILABLE or torch.compiler.is_compiling() or x.dtype == torch.float64:
        return False
    return x.is_cuda or INTERPRETED


def channels_last(*tensors: Tensor) -> bool:
    """Whether kernels can read them: numbers one behind the other, channels last, all in the same way."""
    first = tensors[0]
    return (
        has_kernels(first)
        and first.numel() > 0
        and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
        and all(t.shape == first.shape and t.dtype == first.dtype for t in tensors)
    )


def _ready(x: Tensor, added: Tensor | None) -> bool:
    return channels_last(x) if added is None else channels_last(x, added)


def _tile(positions: int, channels: int) -> tuple[int, int]:
    """Positions and channels that a program takes together."""
    bc = min(256, power(channels, 16))
    return max(1, min(NUMBERS // bc, power(positions))), bc


def power(number: int, least: int = 1) -> int:
    """Of two, and no less."""
    return max(least, 1 << (number - 1).bit_length())


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
        KEYED: tl.constexpr,
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
        if KEYED:
            table += tl.load(which + image) * 2 * channels
        scale = tl.load(table + c, mask=c < channels, other=0.0).to(tl.float32)
        shift = tl.load(table + channels + c, mask=c < channels, other=0.0).to(tl.float32)
        begin = image.to(tl.int64) * positions * channels
        at = begin + p.to(tl.int64)[:, None] * channels + c[None, :]
        inside = (p < positions)[:, None] & (c < channels)[None, :]
        found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if ADD:
            found += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        found = activate(found, KIND)
        tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def _scaled_means(
        x,  # [images, positions, channels]
        added,
        table,  # [rows, 2, channels]
        which,  # [images]
        y,
        mean,  # [images, channels]
        positions,
        channels,
        KEYED: tl.constexpr,
        ADD: tl.constexpr,
        KIND: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        """Some channels of an image a program."""
        image = tl.program_id(0)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        if KEYED:
            table += tl.load(which + image) * 2 * channels
        scale = tl.load(table + c, mask=c < channels, other=0.0).to(tl.float32)
        shift = tl.load(table + channels + c, mask=c < channels, other=0.0).to(tl.float32)
        begin = image.to(tl.int64) * positions * channels
        total = tl.zeros((BC,), dtype=tl.float32)
        for start in range(0, positions, BP):
            p = start + tl.arange(0, BP)
            at = begin + p[:, None] * channels + c[None, :]
            inside = (p < positions)[:, None] & (c < channels)[None, :]
            found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
            if ADD:
                found += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
            rounded = activate(found, KIND).to(y.dtype.element_ty)
            tl.store(y + at, rounded, mask=inside)
            total += tl.sum(tl.where(inside, rounded.to(tl.float32), 0.0), 0)
        tl.store(
            mean + image * channels + c, (total / positions).to(mean.dtype.element_ty), mask=c < channels
        )

    @triton.jit
    def _weighted(
        x,  # [images, positions, channels]
        by,  # [images, channels]
        y,
        positions,
        channels,
        tiles,
        columns,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        column = tl.program_id(0) % columns
        tile = tl.program_id(0) // columns % tiles
        image = tl.program_id(0) // columns // tiles
        c = column * BC + tl.arange(0, BC)
        p = tile * BP + tl.arange(0, BP)
        scale = activate(tl.load(by + image * channels + c, mask=c < channels, other=0.0).to(tl.float32), 4)
        at = image.to(tl.int64) * positions * channels + p[:, None] * channels + c[None, :]
        inside = (p < positions)[:, None] & (c < channels)[None, :]
        found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :]
        tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def _means(x, y, positions, channels, BP: tl.constexpr, BC: tl.constexpr):
        """Some channels of an image a program."""
        image = tl.program_id(0)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        x += image.to(tl.int64) * positions * channels
        total = tl.zeros((BC,), dtype=tl.float32)
        for start in range(0, positions, BP):
            p = start + tl.arange(0, BP)
            inside = (p < positions)[:, None] & (c < channels)[None, :]
            some = tl.load(x + p[:, None] * channels + c[None, :], mask=inside, other=0.0)
            total += tl.sum(some.to(tl.float32), 0)
        mean = total / positions
        tl.store(y + image * channels + c, mean.to(y.dtype.element_ty), mask=c < channels)
