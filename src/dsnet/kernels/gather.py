"""Features that lie in rows of a table, read where they are: by 1 × 1 convolutions, and as patches."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.counts import Shape
from dsnet.kernels import elementwise as scaling

try:
    import triton
    import triton.language as tl
except ImportError:  # there is no Triton for macOS and Windows
    triton = None

__all__ = ["Rows", "patched", "projected"]

STAGES = 3  # of a pipeline of loads
SHARED = 96 * 1024  # bytes of a program's fast memory that every GPU of the last years has


class Rows(NamedTuple):
    """Features of some images, [C, H, W] each, channels last in memory.

    Some may have fewer channels; what is behind them is not read.
    """

    table: Tensor  # [rows, H · W · C]
    at: Tensor  # [n], which of them
    shape: Shape
    widths: Tensor | None = None  # [rows], int32: channels that there are; none: all
    align: int = 1  # that all of these are multiples of: memory is read in pieces of that many numbers

    @property
    def dense(self) -> Tensor:
        """[n, C, H, W], with zeros for the channels that an image does not have."""
        channels, height, width = self.shape
        found = self.table.index_select(0, self.at).view(len(self.at), height, width, channels)
        if self.widths is not None:
            own = self.widths[self.at][:, None, None, None]
            found = torch.where(torch.arange(channels, device=found.device) < own, found, 0)
        return found.permute(0, 3, 1, 2)


def projected(rows: Rows, weight: Tensor, stride: int) -> Tensor:
    """A 1 × 1 convolution [outputs, C, 1, 1] without bias; channels last in memory."""
    weight = weight.contiguous()
    table, (channels, height, width), outs = rows.table, rows.shape, len(weight)
    if not scaling.has_kernels(table):
        return F.conv2d(rows.dense, weight, stride=stride)
    high, wide = -(-height // stride), -(-width // stride)
    images = len(rows.at)
    y = torch.empty(images, high, wide, outs, dtype=table.dtype, device=table.device)
    total = images * high * wide
    bn = min(128, max(16, 1 << (outs - 1).bit_length()))
    bm, bk = (128, 64) if channels >= 64 else (128, 32)
    while bk > 16 and STAGES * (bm + bn) * bk * table.element_size() > SHARED:
        bk //= 2
    columns = -(-outs // bn)
    ragged = rows.widths is not None
    precision = "tf32" if table.dtype != torch.float32 or torch.backends.cudnn.allow_tf32 else "ieee"
    with torch.cuda.device_of(table):
        _projected[(-(-total // bm) * columns,)](
            table, rows.at, rows.widths if ragged else rows.at, weight, y, table.stride(0), channels, outs,
            high * wide, wide, width, total, columns, ragged, stride, precision,
            rows.align, bm, bn, bk, num_warps=8 if bn == 128 else 4, num_stages=STAGES,
        )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def patched(x: Tensor | Rows, size: tuple[int, int]) -> Tensor:
    """Patches [B, rows, columns, height · width · C] that lie side by side; pixels in none are left out."""
    if isinstance(x, Rows) and (x.widths is not None or not scaling.has_kernels(x.table)):
        x = x.dense
    gathers = isinstance(x, Rows)
    images, (channels, height, width) = (len(x.at), x.shape) if gathers else (len(x), x.shape[1:])
    (high, wide), down, across = size, height // size[0], width // size[1]
    if not gathers and not (scaling.channels_last(x) and down * across):
        pixels = x.permute(0, 2, 3, 1)[:, : down * high, : across * wide]
        return pixels.reshape(images, down, high, across, wide, channels).transpose(2, 3).flatten(3)
    source, row = (x.table, x.table.stride(0)) if gathers else (x, channels * height * width)
    y = torch.empty(images, down, across, high * wide * channels, dtype=source.dtype, device=source.device)
    block = 1 << (across * wide * channels - 1).bit_length()
    with torch.cuda.device_of(source):
        _patched[(images * down * high,)](
            source, x.at if gathers else source, y, row, width * channels, down, across, gathers, high,
            wide * channels, block, num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return y


if triton is not None:

    @triton.jit
    def _patched(
        x,  # [rows, height, width · channels], rows ``row`` numbers apart
        at,  # [images]
        y,  # [images, down, across, HIGH, WIDE]
        row,
        line,
        down,
        across,
        GATHERS: tl.constexpr,
        HIGH: tl.constexpr,
        WIDE: tl.constexpr,  # numbers of a line of a patch
        BLOCK: tl.constexpr,
    ):
        """A line of an image a program."""
        dy = tl.program_id(0) % HIGH
        patch = tl.program_id(0) // HIGH % down
        number = tl.program_id(0) // HIGH // down
        image = number
        if GATHERS:
            image = tl.load(at + number)
        k = tl.arange(0, BLOCK)
        inside = k < across * WIDE
        found = tl.load(x + image.to(tl.int64) * row + (patch * HIGH + dy) * line + k, mask=inside)
        y += (number.to(tl.int64) * down + patch) * across * HIGH * WIDE + dy * WIDE
        tl.store(y + (k // WIDE) * HIGH * WIDE + k % WIDE, found, mask=inside)

    @triton.jit
    def _projected(
        table,  # [rows, height · width, channels], rows ``row`` numbers apart
        at,  # [images]
        widths,  # [rows]
        w,  # [outs, channels]
        y,  # [images, positions, outs]
        row,
        channels,
        outs,
        positions,
        out_width,
        width,
        total,  # positions of all images
        columns,
        RAGGED: tl.constexpr,
        STRIDE: tl.constexpr,
        PRECISION: tl.constexpr,
        ALIGN: tl.constexpr,
        BM: tl.constexpr,
        BN: tl.constexpr,
        BK: tl.constexpr,
    ):
        """Some positions, of one image or several, by some outputs a program."""
        column = tl.program_id(0) % columns * BN
        m = tl.program_id(0) // columns * BM + tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        there = m < total
        image = tl.load(at + m // positions, mask=there, other=0)
        p = m % positions
        source = (p // out_width) * STRIDE * width + (p % out_width) * STRIDE
        begin = image.to(tl.int64) * row + source * channels
        own = tl.zeros((BM,), tl.int32) + channels
        if RAGGED:
            own = tl.multiple_of(tl.load(widths + image, mask=there, other=0), ALIGN)
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, tl.max(own, 0), BK):
            k = start + tl.arange(0, BK)
            inside = there[:, None] & (k[None, :] < own[:, None])
            a = tl.load(table + begin[:, None] + k[None, :], mask=inside, other=0.0)
            inside = (n < outs)[:, None] & (k < channels)[None, :]
            b = tl.load(w + n[:, None] * channels + k[None, :], mask=inside, other=0.0)
            sums = tl.dot(a, tl.trans(b), sums, input_precision=PRECISION)
        to = m.to(tl.int64)[:, None] * outs + n[None, :]
        tl.store(y + to, sums.to(y.dtype.element_ty), mask=there[:, None] & (n < outs)[None, :])
