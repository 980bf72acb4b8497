"""Layers of depthwise separable networks, every image at the widths and sizes of its route.

Features lie in memory of the largest route for every image, [images, positions, channels]; each image uses
the beginning of its own, [positions, channels] of its route, without gaps. ``which`` [images] are routes by
place, a negative one: the image is left out. Biases, activations, scales of channels and sums over positions
are part of the kernel that has the numbers at hand anyway. No sum is made in an order that depends on the
batch: an image's numbers are the same, bit for bit, whatever it is run with.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803, D103
import triton
import triton.language as tl

ACTIVATIONS = {"none": 0, "relu": 1, "silu": 2, "hard_swish": 3, "one_plus_tanh": 4}


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == 1:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if KIND == 2:
        x = x * tl.sigmoid(x)
    if KIND == 3:
        x = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0  # NaN by the first factor
    if KIND == 4:
        x = 2.0 * tl.sigmoid(2.0 * x)
    return x


@triton.jit
def pointwise(
    x,  # [images, most, x_row]
    scale,  # [images, x_row], of channels
    w,  # [routes, w_rows, w_row]: output channels by input channels
    b,  # [routes, w_rows]
    post,  # [routes, 2, w_rows]: scales and shifts behind the activation
    y,  # [images, most, y_row], images ``y_image`` numbers apart
    sums,  # [images, tiles, y_row]: over the positions of a tile
    which,
    ins,  # [routes]
    outs,  # [routes]
    counts,  # [routes]: of positions
    most,  # positions of any route
    tiles,
    columns,
    x_row,
    y_row,
    y_image,
    w_row,
    w_rows,
    SCALED: tl.constexpr,
    POST: tl.constexpr,
    PLACED: tl.constexpr,  # every position has ``y_row`` numbers, of which these are some
    STORE: tl.constexpr,
    SUM: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    column = tl.program_id(0) % columns * BN
    image = tl.program_id(0) // columns // tiles
    tile = tl.program_id(0) // columns % tiles
    route = tl.load(which + image)
    if route < 0:
        return
    k_end = tl.multiple_of(tl.load(ins + route), ALIGN)
    n_end = tl.multiple_of(tl.load(outs + route), ALIGN)
    if column >= n_end:
        return
    positions = tl.load(counts + route)
    m = tile * BM + tl.arange(0, BM)
    n = column + tl.arange(0, BN)
    sums += (image * tiles + tile) * y_row
    if tile * BM >= positions:
        if SUM:
            tl.store(sums + n, tl.zeros((BN,), dtype=tl.float32), mask=n < n_end)
        return
    x += image.to(tl.int64) * most * x_row
    y += image.to(tl.int64) * y_image
    w += route.to(tl.int64) * w_rows * w_row
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k_end, BK):
        k = start + tl.arange(0, BK)
        inside = k < k_end
        at = m[:, None] * k_end + k[None, :]
        a = tl.load(x + at, mask=(m < positions)[:, None] & inside[None, :], other=0.0)
        if SCALED:
            by = tl.load(scale + image * x_row + k, mask=inside, other=0.0)
            a = (a.to(tl.float32) * by[None, :].to(tl.float32)).to(a.dtype)
        at = n[:, None] * w_row + k[None, :]
        c = tl.load(w + at, mask=(n < n_end)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, tl.trans(c), total, input_precision=PRECISION)
    bias = tl.load(b + route * w_rows + n, mask=n < n_end, other=0.0)
    found = activate(total + bias[None, :].to(tl.float32), ACT)
    if POST:
        post += route * 2 * w_rows
        by = tl.load(post + n, mask=n < n_end, other=0.0).to(tl.float32)
        shift = tl.load(post + w_rows + n, mask=n < n_end, other=0.0).to(tl.float32)
        found = found * by[None, :] + shift[None, :]
    valid = (m < positions)[:, None] & (n < n_end)[None, :]
    if STORE:
        row = n_end
        if PLACED:
            row = y_row
        tl.store(y + m[:, None] * row + n[None, :], found.to(y.dtype.element_ty), mask=valid)
    if SUM:
        summed = tl.sum(tl.where(valid, found, 0.0), 0)
        tl.store(sums + n, summed, mask=n < n_end)


@triton.jit
def _taps(total, x, w, top, left, valid, c, end, height, width, row, KERNEL: tl.constexpr):
    for dy in tl.static_range(KERNEL):
        for dx in tl.static_range(KERNEL):
            i, j = top + dy, left + dx
            there = valid & (i >= 0) & (i < height) & (j >= 0) & (j < width)
            at = (i * width + j)[:, None] * end + c[None, :]
            a = tl.load(x + at, mask=there[:, None] & (c < end)[None, :], other=0.0)
            by = tl.load(w + (dy * KERNEL + dx) * row + c, mask=c < end, other=0.0)
            total += a.to(tl.float32) * by[None, :].to(tl.float32)
    return total


@triton.jit
def depthwise(
    x,  # [images, x_most, row]
    w,  # [routes, taps, w_row]
    b,  # [routes, w_row]
    y,  # [images, y_most, row]
    sums,  # [images, tiles, row]: over the positions of a tile
    which,
    widths,  # [routes]
    geometry,  # [routes, 6]: height, width, height and width behind it, kernel, padding
    x_most,
    y_most,
    taps,
    tiles,
    columns,
    row,
    w_row,
    K0: tl.constexpr,  # kernels that routes have; 0: none
    K1: tl.constexpr,
    K2: tl.constexpr,
    STRIDE: tl.constexpr,
    SUM: tl.constexpr,
    ACT: tl.constexpr,
    ALIGN: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    column = tl.program_id(0) % columns * BC
    image = tl.program_id(0) // columns // tiles
    tile = tl.program_id(0) // columns % tiles
    route = tl.load(which + image)
    if route < 0:
        return
    end = tl.multiple_of(tl.load(widths + route), ALIGN)
    if column >= end:
        return
    c = column + tl.arange(0, BC)
    inside = c < end
    p = tile * BP + tl.arange(0, BP)
    geometry += route * 6
    height, width = tl.load(geometry), tl.load(geometry + 1)
    out_width = tl.load(geometry + 3)
    kernel, padding = tl.load(geometry + 4), tl.load(geometry + 5)
    positions = tl.load(geometry + 2) * out_width
    sums += (image * tiles + tile) * row
    if tile * BP >= positions:
        if SUM:
            tl.store(sums + c, tl.zeros((BC,), dtype=tl.float32), mask=inside)
        return
    top = (p // out_width) * STRIDE - padding
    left = (p % out_width) * STRIDE - padding
    x += image.to(tl.int64) * x_most * row
    y += image.to(tl.int64) * y_most * row
    w += route * taps * w_row
    valid = p < positions
    total = tl.zeros((BP, BC), dtype=tl.float32)
    if K1 == 0:
        total = _taps(total, x, w, top, left, valid, c, end, height, width, w_row, K0)
    else:
        if kernel == K0:
            total = _taps(total, x, w, top, left, valid, c, end, height, width, w_row, K0)
        elif kernel == K1:
            total = _taps(total, x, w, top, left, valid, c, end, height, width, w_row, K1)
        else:
            if K2 > 0:
                total = _taps(total, x, w, top, left, valid, c, end, height, width, w_row, K2)
    bias = tl.load(b + route * w_row + c, mask=inside, other=0.0)
    found = activate(total + bias[None, :].to(tl.float32), ACT)
    valid = valid[:, None] & inside[None, :]
    tl.store(y + p[:, None] * end + c[None, :], found.to(y.dtype.element_ty), mask=valid)
    if SUM:
        summed = tl.sum(tl.where(valid, found, 0.0), 0)
        tl.store(sums + c, summed, mask=inside)


@triton.jit
def linear(
    x,  # [images, parts, x_row], to be summed over parts
    w,  # [routes, w_rows, w_row]
    b,  # [routes, w_rows]
    y,  # [images, y_row]
    order,  # [tiles, BI]: images of one route each, a negative one: none; if there is one route: which
    routes,  # [tiles], a negative one: none
    ins,
    outs,
    counts,  # [routes]: what sums are divided by
    images,
    parts,
    x_row,
    y_row,
    w_row,
    w_rows,
    SINGLE: tl.constexpr,  # one route, images as they are
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
    BI: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tile = tl.program_id(1)
    if SINGLE:
        route = 0
        image = tile * BI + tl.arange(0, BI)
        valid = tl.load(order + image, mask=image < images, other=-1) >= 0
    else:
        route = tl.load(routes + tile)
        if route < 0:
            return
        image = tl.load(order + tile * BI + tl.arange(0, BI))
        valid = image >= 0
    k_end = tl.multiple_of(tl.load(ins + route), ALIGN)
    n_end = tl.load(outs + route)
    divisor = tl.load(counts + route).to(tl.float32)
    if tl.program_id(0) * BN >= n_end:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BI, BN), dtype=tl.float32)
    for start in range(0, k_end, BK):
        k = start + tl.arange(0, BK)
        inside = k < k_end
        a = tl.zeros((BI, BK), dtype=tl.float32)
        for part in range(parts):
            at = (image * parts + part)[:, None] * x_row + k[None, :]
            a += tl.load(x + at, mask=valid[:, None] & inside[None, :], other=0.0).to(tl.float32)
        c = tl.load(
            w + (route * w_rows + n)[:, None] * w_row + k[None, :],
            mask=(n < n_end)[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot((a / divisor).to(c.dtype), tl.trans(c), total, input_precision=PRECISION)
    bias = tl.load(b + route * w_rows + n, mask=n < n_end, other=0.0)
    found = activate(total + bias[None, :].to(tl.float32), ACT)
    mask = valid[:, None] & (n < n_end)[None, :]
    tl.store(y + image[:, None] * y_row + n[None, :], found.to(y.dtype.element_ty), mask=mask)


@triton.jit
def add_up(x, y, parts, row, BP: tl.constexpr, BC: tl.constexpr):
    """Sums over parts: [images, parts, row] → [images, row], each in the same order in every batch."""
    image = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), dtype=tl.float32)
    for start in range(0, parts, BP):
        p = start + tl.arange(0, BP)
        at = (image * parts + p)[:, None] * row + c[None, :]
        total += tl.sum(tl.load(x + at, mask=(p < parts)[:, None] & (c < row)[None, :], other=0.0), 0)
    tl.store(y + image * row + c, total, mask=c < row)


@triton.jit
def stem(
    begin,  # [1]: the address of images [images, CHANNELS, height, width], of the type of ``y``
    w,  # [BK, w_row]: taps (channel, row, column) by output channels
    b,  # [w_row]
    y,  # [images, out_height · out_width, y_row]
    which,
    height,
    width,
    out_height,
    out_width,
    padding,
    tiles,
    y_row,
    w_row,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    image = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if tl.load(which + image) < 0:
        return
    positions = out_height * out_width
    p = tile * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    channel = k // (KERNEL * KERNEL)
    i = ((p // out_width) * STRIDE - padding)[:, None] + (k % (KERNEL * KERNEL) // KERNEL)[None, :]
    j = ((p % out_width) * STRIDE - padding)[:, None] + (k % KERNEL)[None, :]
    there = (p < positions)[:, None] & (channel < CHANNELS)[None, :]
    there = there & (i >= 0) & (i < height) & (j >= 0) & (j < width)
    x = tl.load(begin).to(tl.pointer_type(y.dtype.element_ty))
    x += image.to(tl.int64) * CHANNELS * height * width
    y += image.to(tl.int64) * positions * y_row
    at = channel[None, :] * height * width + i * width + j
    a = tl.load(x + at, mask=there, other=0.0)
    c = tl.load(w + k[:, None] * w_row + n[None, :], mask=(n < w_row)[None, :], other=0.0)
    bias = tl.load(b + n, mask=n < w_row, other=0.0)
    total = tl.dot(a, c, input_precision=PRECISION)
    found = activate(total + bias[None, :].to(tl.float32), ACT)
    mask = (p < positions)[:, None] & (n < w_row)[None, :]
    tl.store(y + p[:, None] * y_row + n[None, :], found.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _between(place, size, out_size):
    """The two places that a place of a resized map lies between, and how far it is from the first."""
    at = (place.to(tl.float32) + 0.5) * (size.to(tl.float32) / out_size) - 0.5
    at = tl.maximum(at, 0.0)
    first = tl.minimum(at.to(tl.int32), size - 1)
    return first, tl.minimum(first + 1, size - 1), at - first.to(tl.float32)


@triton.jit
def resize(
    x,  # [images, most, channels]
    y,  # [images, out_height · out_width, y_row], images ``y_image`` numbers apart
    which,
    sizes,  # [routes, 2]: height and width
    most,
    y_image,
    y_row,
    channels,
    out_height,
    out_width,
    tiles,
    columns,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Maps of the sizes of their routes to one size, each number from the four nearest."""
    column = tl.program_id(0) % columns * BC
    image = tl.program_id(0) // columns // tiles
    tile = tl.program_id(0) // columns % tiles
    route = tl.load(which + image)
    if route < 0:
        return
    height, width = tl.load(sizes + route * 2), tl.load(sizes + route * 2 + 1)
    p = tile * BP + tl.arange(0, BP)
    c = column + tl.arange(0, BC)
    mask = (p < out_height * out_width)[:, None] & (c < channels)[None, :]
    top, bottom, down = _between(p // out_width, height, out_height)
    left, right, across = _between(p % out_width, width, out_width)
    x += image.to(tl.int64) * most * channels
    a = tl.load(x + (top * width + left)[:, None] * channels + c[None, :], mask=mask, other=0.0)
    b = tl.load(x + (top * width + right)[:, None] * channels + c[None, :], mask=mask, other=0.0)
    upper = a.to(tl.float32) * (1.0 - across)[:, None] + b.to(tl.float32) * across[:, None]
    a = tl.load(x + (bottom * width + left)[:, None] * channels + c[None, :], mask=mask, other=0.0)
    b = tl.load(x + (bottom * width + right)[:, None] * channels + c[None, :], mask=mask, other=0.0)
    lower = a.to(tl.float32) * (1.0 - across)[:, None] + b.to(tl.float32) * across[:, None]
    found = upper * (1.0 - down)[:, None] + lower * down[:, None]
    y += image.to(tl.int64) * y_image
    tl.store(y + p[:, None] * y_row + c[None, :], found.to(y.dtype.element_ty), mask=mask)
