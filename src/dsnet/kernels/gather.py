"""1 × 1 convolutions and patch embeddings that read features from rows of a table, without gathering them."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.counts import Shape
from dsnet.kernels.elementwise import channels_last
from dsnet.kernels.launch import AVAILABLE, STAGES, fit_depth, has_kernels, on_device_of, power_of_two

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["FeatureRows", "extract_patches", "pointwise_conv"]


class FeatureRows(NamedTuple):
    """Features [C, H, W] of some images in rows of a table, channels last in memory.

    A row may have fewer than C channels; the memory of the others is not read.
    """

    table: Tensor  # [rows, H · W · C]
    index: Tensor  # [n], the row of each image
    shape: Shape
    widths: Tensor | None = None  # [rows], int32: channels of each row (default: all)
    align: int = 1  # a divisor of all widths: the number of elements per load

    @property
    def dense(self) -> Tensor:
        """The features [n, C, H, W], with zeros for the channels that a row does not have."""
        channels, height, width = self.shape
        x = self.table.index_select(0, self.index).view(len(self.index), height, width, channels)
        if self.widths is not None:
            widths = self.widths[self.index][:, None, None, None]
            x = torch.where(torch.arange(channels, device=x.device) < widths, x, 0)
        return x.permute(0, 3, 1, 2)


def pointwise_conv(x: FeatureRows, weight: Tensor, stride: int) -> Tensor:
    """Convolve with 1 × 1 kernels [outputs, C, 1, 1], without bias → [n, outputs, H', W'], channels last."""
    weight = weight.contiguous()
    table, (channels, height, width), outs = x.table, x.shape, len(weight)
    if not has_kernels(table):
        return F.conv2d(x.dense, weight, stride=stride)
    out_height, out_width = -(-height // stride), -(-width // stride)
    images = len(x.index)
    y = torch.empty(images, out_height, out_width, outs, dtype=table.dtype, device=table.device)
    total = images * out_height * out_width
    bm, bn = 128, min(128, power_of_two(outs, 16))
    bk = fit_depth(bm, bn, 64 if channels >= 64 else 32, table.element_size())
    columns = -(-outs // bn)
    ragged = x.widths is not None
    precision = "tf32" if table.dtype != torch.float32 or torch.backends.cudnn.allow_tf32 else "ieee"
    with on_device_of(table):
        _pointwise_conv[(-(-total // bm) * columns,)](
            table, x.index, x.widths if ragged else x.index, weight, y, table.stride(0), channels, outs,
            out_height * out_width, out_width, width, total, columns, ragged, stride, precision,
            x.align, bm, bn, bk, num_warps=8 if bn == 128 else 4, num_stages=STAGES,
        )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def extract_patches(x: Tensor | FeatureRows, size: tuple[int, int]) -> Tensor:
    """Cut images [B, C, H, W] into adjacent patches [B, rows, columns, height · width · C].

    Pixels at the right and at the bottom that do not fill a patch are dropped.
    """
    if isinstance(x, FeatureRows) and (x.widths is not None or not has_kernels(x.table)):
        x = x.dense
    indexed = isinstance(x, FeatureRows)
    images, (channels, height, width) = (len(x.index), x.shape) if indexed else (len(x), x.shape[1:])
    (high, wide), down, across = size, height // size[0], width // size[1]
    if not indexed and not (channels_last(x) and down * across):
        pixels = x.permute(0, 2, 3, 1)[:, : down * high, : across * wide]
        return pixels.reshape(images, down, high, across, wide, channels).transpose(2, 3).flatten(3)
    source, row = (x.table, x.table.stride(0)) if indexed else (x, channels * height * width)
    y = torch.empty(images, down, across, high * wide * channels, dtype=source.dtype, device=source.device)
    block = power_of_two(across * wide * channels)
    with on_device_of(source):
        _extract_patches[(images * down * high,)](
            source, x.index if indexed else source, y, row, width * channels, down, across, indexed, high,
            wide * channels, block, num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return y


if AVAILABLE:

    @triton.jit
    def _extract_patches(
        x,  # [rows, height, width · channels], with a stride of ``row`` between rows
        index,  # [images]
        y,  # [images, down, across, HIGH, WIDE]
        row,
        line,
        down,
        across,
        INDEXED: tl.constexpr,
        HIGH: tl.constexpr,
        WIDE: tl.constexpr,  # elements in a line of a patch
        BLOCK: tl.constexpr,
    ):
        """Copy one line of an image per program."""
        dy = tl.program_id(0) % HIGH
        patch = tl.program_id(0) // HIGH % down
        number = tl.program_id(0) // HIGH // down
        image = number
        if INDEXED:
            image = tl.load(index + number)
        k = tl.arange(0, BLOCK)
        mask = k < across * WIDE
        value = tl.load(x + image.to(tl.int64) * row + (patch * HIGH + dy) * line + k, mask=mask)
        y += (number.to(tl.int64) * down + patch) * across * HIGH * WIDE + dy * WIDE
        tl.store(y + (k // WIDE) * HIGH * WIDE + k % WIDE, value, mask=mask)

    @triton.jit
    def _pointwise_conv(
        table,  # [rows, height · width, channels], with a stride of ``row`` between rows
        index,  # [images]
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
        """Compute some outputs of some positions, which may belong to several images, per program."""
        column = tl.program_id(0) % columns * BN
        m = tl.program_id(0) // columns * BM + tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        valid = m < total
        image = tl.load(index + m // positions, mask=valid, other=0)
        p = m % positions
        source = (p // out_width) * STRIDE * width + (p % out_width) * STRIDE
        start = image.to(tl.int64) * row + source * channels
        in_channels = tl.zeros((BM,), tl.int32) + channels
        if RAGGED:
            in_channels = tl.multiple_of(tl.load(widths + image, mask=valid, other=0), ALIGN)
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for first in range(0, tl.max(in_channels, 0), BK):
            k = first + tl.arange(0, BK)
            mask = valid[:, None] & (k[None, :] < in_channels[:, None])
            a = tl.load(table + start[:, None] + k[None, :], mask=mask, other=0.0)
            mask = (n < outs)[:, None] & (k < channels)[None, :]
            b = tl.load(w + n[:, None] * channels + k[None, :], mask=mask, other=0.0)
            sums = tl.dot(a, tl.trans(b), sums, input_precision=PRECISION)
        offset = m.to(tl.int64)[:, None] * outs + n[None, :]
        tl.store(y + offset, sums.to(y.dtype.element_ty), mask=valid[:, None] & (n < outs)[None, :])
