"""Rows of numbers, multiplied, moved and normed: kernels of our own for a GPU.

Every function has a plain form, which runs elsewhere and where memory is laid out otherwise.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.kernels.elementwise import ACTS, NUMBERS, has_kernels, power

try:
    import triton
    import triton.language as tl

    from dsnet.kernels.ragged import ACTIVATIONS, activate
except ImportError:  # there is no Triton for macOS and Windows
    triton = None

__all__ = ["added_norm", "linear", "put_rows"]

WIDEST = 8192  # channels of a row that a program can norm


def linear(x: Tensor, layer: nn.Linear, act: str = "none") -> Tensor:
    """act(layer(x)) of x [B, C] in full float32; a row's numbers do not depend on the others."""
    weight, bias = layer.weight, layer.bias
    if not (has_kernels(x) and x.dtype == weight.dtype == torch.float32 and x.numel() and bias is not None):
        return ACTS[act](F.linear(x, weight, bias))
    rows, channels = x.shape
    outs = len(weight)
    x, weight, y = x.contiguous(), weight.contiguous(), x.new_empty(rows, outs)
    bk = min(128, power(channels, 16))
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
    bc = min(NUMBERS if by is None else 256, power(written, 16))
    bp = max(1, min(NUMBERS // bc, power(positions)))
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
    bc = power(channels, 16)
    br = max(1, min(NUMBERS // 2 // bc, power(rows)))
    with torch.cuda.device_of(x):
        _added_norm[(-(-rows // br),)](
            x, x if added is None else added, weight, bias, total, y, rows, channels, float(eps),
            added is not None, br, bc, num_warps=max(4, min(16, bc // 512)),
        )  # fmt: skip
    return total, y


if triton is not None:

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
