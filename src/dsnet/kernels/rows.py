"""Rows of features: linear layers, scattering into a table, and layer norms of sums.

Every function falls back to torch operations where kernels cannot run.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.kernels.activations import ACTIVATIONS, CODES
from dsnet.kernels.launch import AVAILABLE, BLOCK, STAGES, has_kernels, on_device_of, power_of_two

if AVAILABLE:
    import triton
    import triton.language as tl

    from dsnet.kernels.activations import activate

__all__ = ["add_layer_norm", "linear", "scatter_rows"]

MAX_CHANNELS = 8192  # of a row that one program normalizes


def linear(x: Tensor, layer: nn.Linear, act: str = "none") -> Tensor:
    """Return ``act(layer(x))`` of ``x`` [B, C] in full float32; rows do not depend on each other."""
    weight, bias = layer.weight, layer.bias
    if not (has_kernels(x) and x.dtype == weight.dtype == torch.float32 and x.numel() and bias is not None):
        return ACTIVATIONS[act](F.linear(x, weight, bias))
    rows, channels = x.shape
    outs = len(weight)
    x, weight, y = x.contiguous(), weight.contiguous(), x.new_empty(rows, outs)
    bk = min(128, power_of_two(channels, 16))
    with on_device_of(x):
        _linear[(-(-rows // 16), -(-outs // 16))](
            x, weight, bias, y, rows, channels, outs, CODES[act], 16, 16, bk, num_warps=4, num_stages=STAGES
        )
    return y


def scatter_rows(
    table: Tensor, index: Tensor, x: Tensor, attention: Tensor | None = None, widths: Tensor | None = None
) -> None:
    """Write features into rows of a table; of features with the same index an arbitrary one is kept.

    Args:
        table: Rows [rows, positions, C], C at least as many channels as ``x`` has. The channels beyond those
            of ``x`` become zero, unless ``widths`` is given.
        index: The row [n] for each of the features.
        x: Features [n, positions, c].
        attention: Multiply channels by 1 + tanh of this [n, c].
        widths: Record c in the written rows of this table [rows].
    """
    width, channels = x.shape[2], table.shape[2]
    if not (has_kernels(x) and x.is_contiguous() and table.is_contiguous() and x.numel()):
        x = x if attention is None else x * (1 + torch.tanh(attention)).to(x.dtype)[:, None]
        table[:, :, :width].index_copy_(0, index, x)
        if widths is None:
            table[:, :, width:].index_fill_(0, index, 0)
        else:
            widths.index_fill_(0, index, width)
        return
    positions, in_channels = x.shape[1], width
    attention = None if attention is None else attention.expand(len(x), -1).contiguous()
    if width == channels and attention is None:  # one long row
        in_channels, channels, positions = positions * width, positions * width, 1
    written = channels if widths is None else in_channels
    bc = min(BLOCK if attention is None else 256, power_of_two(written, 16))
    bp = max(1, min(BLOCK // bc, power_of_two(positions)))
    tiles, columns = -(-positions // bp), -(-written // bc)
    with on_device_of(x):
        _scatter_rows[(len(x) * tiles * columns,)](
            table, index, x, x if attention is None else attention, index if widths is None else widths,
            positions, in_channels, channels, written, width, tiles, columns, attention is not None,
            widths is not None, bp, bc, num_warps=4,
        )  # fmt: skip


def add_layer_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``x + added`` and its layer norm over the last dimension."""
    channels = x.shape[-1]
    supported = has_kernels(x) and x.is_contiguous() and x.numel() and len(weight) == channels <= MAX_CHANNELS
    if added is not None:
        supported = supported and added.is_contiguous()
        supported = supported and (added.shape, added.dtype) == (x.shape, x.dtype)
    if not supported:
        total = x if added is None else x + added
        return total, F.layer_norm(total, (channels,), weight, bias, eps)
    rows = x.numel() // channels
    total = x if added is None else torch.empty_like(x)
    y = torch.empty_like(x)
    bc = power_of_two(channels, 16)
    br = max(1, min(BLOCK // 2 // bc, power_of_two(rows)))
    with on_device_of(x):
        _add_layer_norm[(-(-rows // br),)](
            x, x if added is None else added, weight, bias, total, y, rows, channels, float(eps),
            added is not None, br, bc, num_warps=max(4, min(16, bc // 512)),
        )  # fmt: skip
    return total, y


if AVAILABLE:

    @triton.jit
    def _linear(
        x,  # [rows, channels]
        w,  # [outs, channels]
        b,  # [outs]
        y,  # [rows, outs]
        rows,
        channels,
        outs,
        ACT: tl.constexpr,
        BM: tl.constexpr,
        BN: tl.constexpr,
        BK: tl.constexpr,
    ):
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, channels, BK):
            k = start + tl.arange(0, BK)
            mask = (m < rows)[:, None] & (k < channels)[None, :]
            a = tl.load(x + m[:, None] * channels + k[None, :], mask=mask, other=0.0)
            mask = (n < outs)[:, None] & (k < channels)[None, :]
            c = tl.load(w + n[:, None] * channels + k[None, :], mask=mask, other=0.0)
            total = tl.dot(a, tl.trans(c), total, input_precision="ieee")
        total += tl.load(b + n, mask=n < outs, other=0.0)[None, :]
        mask = (m < rows)[:, None] & (n < outs)[None, :]
        tl.store(y + m[:, None] * outs + n[None, :], activate(total, ACT), mask=mask)

    @triton.jit
    def _scatter_rows(
        table,  # [rows, positions, channels]
        index,  # [n]
        x,  # [n, positions, in_channels]
        attention,  # [n, in_channels]
        widths,  # [rows]
        positions,
        in_channels,
        channels,
        written,
        width,
        tiles,
        columns,
        SCALE: tl.constexpr,
        RECORD_WIDTH: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        column = tl.program_id(0) % columns
        tile = tl.program_id(0) // columns % tiles
        number = tl.program_id(0) // columns // tiles
        c = column * BC + tl.arange(0, BC)
        p = tile * BP + tl.arange(0, BP)
        mask = (p < positions)[:, None]
        x += number.to(tl.int64) * positions * in_channels
        value = tl.load(
            x + p[:, None] * in_channels + c[None, :], mask=mask & (c < in_channels)[None, :], other=0.0
        )
        if SCALE:
            scale = tl.load(attention + number * in_channels + c, mask=c < in_channels, other=0.0)
            scale = activate(scale.to(tl.float32), 4)
            value = (value.to(tl.float32) * scale[None, :]).to(x.dtype.element_ty)
        row = tl.load(index + number)
        if RECORD_WIDTH:
            tl.store(widths + row, width, mask=(tile == 0) & (column == 0))
        table += row.to(tl.int64) * positions * channels
        tl.store(table + p[:, None] * channels + c[None, :], value, mask=mask & (c < written)[None, :])

    @triton.jit
    def _add_layer_norm(
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
        offset = r.to(tl.int64)[:, None] * channels + c[None, :]
        mask = (r < rows)[:, None] & (c < channels)[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0)
        if ADD:
            value = (value.to(tl.float32) + tl.load(added + offset, mask=mask, other=0.0).to(tl.float32)).to(
                x.dtype.element_ty
            )
            tl.store(total + offset, value, mask=mask)
        value = value.to(tl.float32)
        centred = tl.where(mask, value - (tl.sum(value, 1) / channels)[:, None], 0.0)
        inverse_std = tl.rsqrt(tl.sum(centred * centred, 1) / channels + eps)
        w = tl.load(weight + c, mask=c < channels, other=0.0).to(tl.float32)
        b = tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)
        normalized = centred * inverse_std[:, None] * w[None, :] + b[None, :]
        tl.store(y + offset, normalized.to(y.dtype.element_ty), mask=mask)
