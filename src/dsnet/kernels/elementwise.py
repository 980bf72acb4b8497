"""Scales and shifts of channels, and means over positions.

Torch needs several passes over memory for these, or is slow where channels are last in memory. Tensors of
other memory formats, and those that are not on a GPU, take the torch operations.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
from torch import Tensor

from dsnet.kernels.activations import ACTIVATIONS, CODES
from dsnet.kernels.launch import AVAILABLE, BLOCK, has_kernels, on_device_of, power_of_two

if AVAILABLE:
    import triton
    import triton.language as tl

    from dsnet.kernels.activations import activate

__all__ = ["affine", "affine_means", "channels_last", "scale_by_attention", "spatial_means"]


def affine(
    x: Tensor,
    table: Tensor,
    rows: Tensor | None = None,
    added: Tensor | None = None,
    act: str = "none",
) -> Tensor:
    """Return ``act(x * scale + shift + added)`` in the dtype of ``x``.

    Args:
        x: Features [B, C, H, W].
        table: Rows [n, 2 · C] of C scales, then C shifts.
        rows: The row [B] of each image (default: the first row for all).
        added: A residual branch, shaped like ``x``.
        act: The name of an activation.
    """
    if not _supported(x, added):
        row = table[:1] if rows is None else table.index_select(0, rows)
        scale, shift = row[:, :, None, None].chunk(2, 1)
        y = torch.addcmul(shift, x.to(table.dtype), scale)
        return ACTIVATIONS[act](y if added is None else y + added).to(x.dtype)
    images, channels, height, width = x.shape
    positions = height * width
    rows = None if rows is None else rows.contiguous()
    if rows is None:
        images, positions = 1, images * positions
    y = torch.empty_like(x)
    bp, bc = _block(positions, channels)
    tiles, columns = -(-positions // bp), -(-channels // bc)
    with on_device_of(x):
        _affine[(images * tiles * columns,)](
            x, x if added is None else added, table, table if rows is None else rows, y, positions,
            channels, tiles, columns, rows is not None, added is not None, CODES[act], bp, bc,
            num_warps=4,
        )  # fmt: skip
    return y


def affine_means(
    x: Tensor,
    table: Tensor,
    rows: Tensor | None = None,
    added: Tensor | None = None,
    act: str = "none",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `affine` and its means over positions [B, C], in ``dtype``."""
    if not _supported(x, added):
        y = affine(x, table, rows, added, act)
        return y, y.mean((2, 3), dtype=dtype)
    images, channels, height, width = x.shape
    y, rows = torch.empty_like(x), None if rows is None else rows.contiguous()
    mean = torch.empty(images, channels, dtype=dtype or x.dtype, device=x.device)
    bc = min(32, power_of_two(channels, 8))
    bp = min(256, power_of_two(height * width, 16))
    with on_device_of(x):
        _affine_means[(images, -(-channels // bc))](
            x, x if added is None else added, table, table if rows is None else rows, y, mean,
            height * width, channels, rows is not None, added is not None, CODES[act], bp, bc,
            num_warps=8,
        )  # fmt: skip
    return y, mean


def scale_by_attention(x: Tensor, attention: Tensor) -> Tensor:
    """Multiply channels of ``x`` [B, C, H, W] by 1 + tanh(``attention``), [B, C] or [1, C]."""
    if not channels_last(x):
        return x * (1 + torch.tanh(attention)).to(x.dtype)[:, :, None, None]
    images, channels, height, width = x.shape
    positions = height * width
    attention, y = attention.expand(images, -1).contiguous(), torch.empty_like(x)
    bp, bc = _block(positions, channels)
    tiles, columns = -(-positions // bp), -(-channels // bc)
    with on_device_of(x):
        _scale_by_attention[(images * tiles * columns,)](
            x, attention, y, positions, channels, tiles, columns, bp, bc, num_warps=4
        )
    return y


def spatial_means(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Average ``x`` [B, C, H, W] over positions → [B, C]."""
    if not channels_last(x):
        return x.mean((2, 3), dtype=dtype)
    images, channels, height, width = x.shape
    y = torch.empty(images, channels, dtype=dtype or x.dtype, device=x.device)
    bc = min(32, power_of_two(channels, 8))
    bp = min(512, power_of_two(height * width, 16))
    with on_device_of(x):
        _spatial_means[(images, -(-channels // bc))](x, y, height * width, channels, bp, bc, num_warps=8)
    return y


def channels_last(*tensors: Tensor) -> bool:
    """Return whether kernels can read these tensors: dense, channels last, all of one shape and dtype."""
    first = tensors[0]
    return (
        has_kernels(first)
        and first.numel() > 0
        and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
        and all(t.shape == first.shape and t.dtype == first.dtype for t in tensors)
    )


def _supported(x: Tensor, added: Tensor | None) -> bool:
    return channels_last(x) if added is None else channels_last(x, added)


def _block(positions: int, channels: int) -> tuple[int, int]:
    """Return the positions and channels of one program."""
    bc = min(256, power_of_two(channels, 16))
    return max(1, min(BLOCK // bc, power_of_two(positions))), bc


if AVAILABLE:

    @triton.jit
    def _affine(
        x,  # [images, positions, channels]
        added,
        table,  # [n, 2, channels]
        rows,  # [images]
        y,
        positions,
        channels,
        tiles,
        columns,
        INDEXED: tl.constexpr,
        ADD: tl.constexpr,
        ACT: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        column = tl.program_id(0) % columns
        tile = tl.program_id(0) // columns % tiles
        image = tl.program_id(0) // columns // tiles
        c = column * BC + tl.arange(0, BC)
        p = tile * BP + tl.arange(0, BP)
        if INDEXED:
            table += tl.load(rows + image) * 2 * channels
        scale = tl.load(table + c, mask=c < channels, other=0.0).to(tl.float32)
        shift = tl.load(table + channels + c, mask=c < channels, other=0.0).to(tl.float32)
        start = image.to(tl.int64) * positions * channels
        offset = start + p.to(tl.int64)[:, None] * channels + c[None, :]
        mask = (p < positions)[:, None] & (c < channels)[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if ADD:
            value += tl.load(added + offset, mask=mask, other=0.0).to(tl.float32)
        value = activate(value, ACT)
        tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def _affine_means(
        x,  # [images, positions, channels]
        added,
        table,  # [n, 2, channels]
        rows,  # [images]
        y,
        mean,  # [images, channels]
        positions,
        channels,
        INDEXED: tl.constexpr,
        ADD: tl.constexpr,
        ACT: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        """Process all positions of some channels of one image per program."""
        image = tl.program_id(0)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        if INDEXED:
            table += tl.load(rows + image) * 2 * channels
        scale = tl.load(table + c, mask=c < channels, other=0.0).to(tl.float32)
        shift = tl.load(table + channels + c, mask=c < channels, other=0.0).to(tl.float32)
        start = image.to(tl.int64) * positions * channels
        total = tl.zeros((BC,), dtype=tl.float32)
        for first in range(0, positions, BP):
            p = first + tl.arange(0, BP)
            offset = start + p[:, None] * channels + c[None, :]
            mask = (p < positions)[:, None] & (c < channels)[None, :]
            value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
            if ADD:
                value += tl.load(added + offset, mask=mask, other=0.0).to(tl.float32)
            rounded = activate(value, ACT).to(y.dtype.element_ty)
            tl.store(y + offset, rounded, mask=mask)
            total += tl.sum(tl.where(mask, rounded.to(tl.float32), 0.0), 0)
        tl.store(
            mean + image * channels + c, (total / positions).to(mean.dtype.element_ty), mask=c < channels
        )

    @triton.jit
    def _scale_by_attention(
        x,  # [images, positions, channels]
        attention,  # [images, channels]
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
        scale = tl.load(attention + image * channels + c, mask=c < channels, other=0.0)
        scale = activate(scale.to(tl.float32), 4)
        offset = image.to(tl.int64) * positions * channels + p[:, None] * channels + c[None, :]
        mask = (p < positions)[:, None] & (c < channels)[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * scale[None, :]
        tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def _spatial_means(x, y, positions, channels, BP: tl.constexpr, BC: tl.constexpr):
        """Average some channels of one image per program."""
        image = tl.program_id(0)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        x += image.to(tl.int64) * positions * channels
        total = tl.zeros((BC,), dtype=tl.float32)
        for first in range(0, positions, BP):
            p = first + tl.arange(0, BP)
            mask = (p < positions)[:, None] & (c < channels)[None, :]
            value = tl.load(x + p[:, None] * channels + c[None, :], mask=mask, other=0.0)
            total += tl.sum(value.to(tl.float32), 0)
        mean = total / positions
        tl.store(y + image * channels + c, mean.to(y.dtype.element_ty), mask=c < channels)
