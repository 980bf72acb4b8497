"""Channels times scales, sums over positions, rows moved and normed: kernels of our own for a GPU.

Torch does these in several passes over memory, or slowly where channels are last in memory. Every function
has a plain form, which runs elsewhere and where memory is laid out otherwise.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl

    from dsnet.runtime.ragged.kernels import ACTIVATIONS, activate
except ImportError:  # there is no Triton for macOS and Windows
    triton = None

__all__ = [
    "ACTS",
    "AVAILABLE",
    "added_norm",
    "has_kernels",
    "means",
    "put_rows",
    "scaled",
    "scaled_means",
    "weighted",
]

AVAILABLE = triton is not None
ACTS = {"none": lambda x: x, "relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish}
NUMBERS = 4096  # that a program takes
WIDEST = 8192  # channels of a row that a program can norm
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
    bc = min(32, _power(channels, 8))
    bp = min(256, _power(height * width, 16))
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
    bc = min(32, _power(channels, 8))
    bp = min(512, _power(height * width, 16))
    with torch.cuda.device_of(x):
        _means[(images, -(-channels // bc))](x, y, height * width, channels, bp, bc, num_warps=8)
    return y


def linear(x: Tensor, layer: nn.Linear, act: str = "none") -> Tensor:
    """act(layer(x)) of x [B, C] in full float32; a row's numbers do not depend on the others."""
    weight, bias = layer.weight, layer.bias
    if not (has_kernels(x) and x.dtype == weight.dtype == torch.float32 and x.numel() and bias is not None):
        return ACTS[act](F.linear(x, weight, bias))
    rows, channels = x.shape
    outs = len(weight)
    x, weight, y = x.contiguous(), weight.contiguous(), x.new_empty(rows, outs)
    bk = min(128, _power(channels, 16))
    with torch.cuda.device_of(x):
        _linear[(-(-rows // 16), -(-outs // 16))](
            x, weight, bias, y, rows, channels, outs, ACTIVATIONS[act], 16, 16, bk, num_warps=4, num_stages=3
        )
    return y


def put_rows(
    table: Tensor, at: Tensor, x: Tensor, by: Tensor | None = None, widths: Tensor | None = None
) -> None:
    """Into rows ``at`` [n] of a table [rows, positions, C] features [n, positions, c].

    Channels behind them are filled with zeros; or how many there are is written to ``widths`` [rows]. With
    ``by`` [n, c] channels are multiplied with 1 + tanh of it. Of features for the same row any are put there.
    """
    own, channels = x.shape[2], table.shape[2]
    if not (has_kernels(x) and x.is_contiguous() and table.is_contiguous() and x.numel()):
        x = x if by is None else x * (1 + torch.tanh(by)).to(x.dtype)[:, None]
        table[:, :, :own].index_copy_(0, at, x)
        if widths is None:
            table[:, :, own:].index_fill_(0, at, 0)
        else:
            widths.index_fill_(0, at, own)
        return
    positions, width = x.shape[1], own
    by = None if by is None else by.expand(len(x), -1).contiguous()
    if own == channels and by is None:
        own, channels, positions = positions * own, positions * own, 1
    written = channels if widths is None else own
    bc = min(NUMBERS if by is None else 256, _power(written, 16))
    bp = max(1, min(NUMBERS // bc, _power(positions)))
    tiles, columns = -(-positions // bp), -(-written // bc)
    with torch.cuda.device_of(x):
        _put_rows[(len(x) * tiles * columns,)](
            table, at, x, x if by is None else by, at if widths is None else widths, positions, own, channels,
            written, width, tiles, columns, by is not None, widths is not None, bp, bc, num_warps=4,
        )  # fmt: skip


def added_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + added, and its layer norm over the last dimension."""
    channels = x.shape[-1]
    fits = added is None or (added.shape == x.shape and added.dtype == x.dtype and added.is_contiguous())
    if not (
        has_kernels(x) and fits and x.is_contiguous() and x.numel() and len(weight) == channels <= WIDEST
    ):
        total = x if added is None else x + added
        return total, F.layer_norm(total, (channels,), weight, bias, eps)
    rows = x.numel() // channels
    total = x if added is None else torch.empty_like(x)
    y = torch.empty_like(x)
    bc = _power(channels, 16)
    br = max(1, min(NUMBERS // 2 // bc, _power(rows)))
    with torch.cuda.device_of(x):
        _added_norm[(-(-rows // br),)](
            x, x if added is None else added, weight, bias, total, y, rows, channels, float(eps),
            added is not None, br, bc, num_warps=max(4, min(16, bc // 512)),
        )  # fmt: skip
    return total, y


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
    bc = min(256, _power(channels, 16))
    return max(1, min(NUMBERS // bc, _power(positions))), bc


def _power(number: int, least: int = 1) -> int:
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

    @triton.jit
    def _linear(
        x,  # [rows, channels]
        w,  # [outs, channels]
        b,  # [outs]
        y,  # [rows, outs]
        rows,
        channels,
        outs,
        KIND: tl.constexpr,
        BM: tl.constexpr,
        BN: tl.constexpr,
        BK: tl.constexpr,
    ):
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, channels, BK):
            k = start + tl.arange(0, BK)
            inside = (m < rows)[:, None] & (k < channels)[None, :]
            a = tl.load(x + m[:, None] * channels + k[None, :], mask=inside, other=0.0)
            inside = (n < outs)[:, None] & (k < channels)[None, :]
            c = tl.load(w + n[:, None] * channels + k[None, :], mask=inside, other=0.0)
            total = tl.dot(a, tl.trans(c), total, input_precision="ieee")
        total += tl.load(b + n, mask=n < outs, other=0.0)[None, :]
        mask = (m < rows)[:, None] & (n < outs)[None, :]
        tl.store(y + m[:, None] * outs + n[None, :], activate(total, KIND), mask=mask)

    @triton.jit
    def _put_rows(
        table,  # [rows, positions, channels]
        at,  # [n]
        x,  # [n, positions, own]
        by,  # [n, own]
        widths,  # [rows]
        positions,
        own,
        channels,
        written,
        width,
        tiles,
        columns,
        WEIGHTED: tl.constexpr,
        TOLD: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        column = tl.program_id(0) % columns
        tile = tl.program_id(0) // columns % tiles
        number = tl.program_id(0) // columns // tiles
        c = column * BC + tl.arange(0, BC)
        p = tile * BP + tl.arange(0, BP)
        there = (p < positions)[:, None]
        x += number.to(tl.int64) * positions * own
        found = tl.load(x + p[:, None] * own + c[None, :], mask=there & (c < own)[None, :], other=0.0)
        if WEIGHTED:
            scale = activate(tl.load(by + number * own + c, mask=c < own, other=0.0).to(tl.float32), 4)
            found = (found.to(tl.float32) * scale[None, :]).to(x.dtype.element_ty)
        row = tl.load(at + number)
        if TOLD:
            tl.store(widths + row, width, mask=(tile == 0) & (column == 0))
        table += row.to(tl.int64) * positions * channels
        tl.store(table + p[:, None] * channels + c[None, :], found, mask=there & (c < written)[None, :])

    @triton.jit
    def _added_norm(
        x,  # [rows, channels]
        added,
        weight,  # [channels]
        bias,
        total,
        y,
        rows,
        channels,
        eps,
        ADD: tl.constexpr,
        BR: tl.constexpr,
        BC: tl.constexpr,
    ):
        r = tl.program_id(0) * BR + tl.arange(0, BR)
        c = tl.arange(0, BC)
        at = r.to(tl.int64)[:, None] * channels + c[None, :]
        inside = (r < rows)[:, None] & (c < channels)[None, :]
        found = tl.load(x + at, mask=inside, other=0.0)
        if ADD:
            found = (found.to(tl.float32) + tl.load(added + at, mask=inside, other=0.0).to(tl.float32)).to(
                x.dtype.element_ty
            )
            tl.store(total + at, found, mask=inside)
        found = found.to(tl.float32)
        centred = tl.where(inside, found - (tl.sum(found, 1) / channels)[:, None], 0.0)
        spread = tl.rsqrt(tl.sum(centred * centred, 1) / channels + eps)
        w = tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
        b = tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)
        normed = centred * spread[:, None] * w[None, :] + b[None, :]
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=inside)
