"""Layers of depthwise separable networks, each image at the sizes of its route. Triton only.

Each image has memory for the features of the largest route, [images, positions, channels]; those of a smaller
route fill the beginning of it, without gaps. ``route_of`` [images] holds the route of each image; images with
a negative route are skipped. Biases, activations, channel scales and sums over positions are fused into the
kernel that computes their inputs. The order of every summation depends on the image alone, so results are
batch-invariant, bit by bit.
"""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, N803
import triton
import triton.language as tl

from dsnet.kernels.activations import activate


@triton.jit
def pointwise(
    x,  # [images, max_positions, x_row]
    scale,  # [images, x_row], by channel
    w,  # [routes, w_rows, w_row]: output by input channels
    b,  # [routes, w_rows]
    affine,  # [routes, 2, w_rows]: scales and shifts after the activation
    y,  # [images, max_positions, y_row], with a stride of ``y_image`` between images
    sums,  # [images, tiles, y_row]: over the positions of a tile
    route_of,  # [images]
    in_channels,  # [routes]
    out_channels,  # [routes]
    route_positions,  # [routes]
    max_positions,  # of all routes
    tiles,
    columns,
    x_row,
    y_row,
    y_image,
    w_row,
    w_rows,
    SCALED: tl.constexpr,
    AFFINE: tl.constexpr,
    STRIDED: tl.constexpr,  # write some of the ``y_row`` channels of each position
    STORE: tl.constexpr,
    SUM: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Convolve a tile of positions of one image with some of its route's 1 × 1 filters, per program."""
    column = tl.program_id(0) % columns * BN
    image = tl.program_id(0) // columns // tiles
    tile = tl.program_id(0) // columns % tiles
    route = tl.load(route_of + image)
    if route < 0:
        return
    k_end = tl.multiple_of(tl.load(in_channels + route), ALIGN)
    n_end = tl.multiple_of(tl.load(out_channels + route), ALIGN)
    if column >= n_end:
        return
    positions = tl.load(route_positions + route)
    m = tile * BM + tl.arange(0, BM)
    n = column + tl.arange(0, BN)
    sums += (image * tiles + tile) * y_row
    if tile * BM >= positions:
        if SUM:
            tl.store(sums + n, tl.zeros((BN,), dtype=tl.float32), mask=n < n_end)
        return
    x += image.to(tl.int64) * max_positions * x_row
    y += image.to(tl.int64) * y_image
    w += route.to(tl.int64) * w_rows * w_row
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k_end, BK):
        k = start + tl.arange(0, BK)
        mask = k < k_end
        offset = m[:, None] * k_end + k[None, :]
        a = tl.load(x + offset, mask=(m < positions)[:, None] & mask[None, :], other=0.0)
        if SCALED:
            factor = tl.load(scale + image * x_row + k, mask=mask, other=0.0)
            a = (a.to(tl.float32) * factor[None, :].to(tl.float32)).to(a.dtype)
        offset = n[:, None] * w_row + k[None, :]
        c = tl.load(w + offset, mask=(n < n_end)[:, None] & mask[None, :], other=0.0)
        total = tl.dot(a, tl.trans(c), total, input_precision=PRECISION)
    bias = tl.load(b + route * w_rows + n, mask=n < n_end, other=0.0)
    value = activate(total + bias[None, :].to(tl.float32), ACT)
    if AFFINE:
        affine += route * 2 * w_rows
        factor = tl.load(affine + n, mask=n < n_end, other=0.0).to(tl.float32)
        shift = tl.load(affine + w_rows + n, mask=n < n_end, other=0.0).to(tl.float32)
        value = value * factor[None, :] + shift[None, :]
    valid = (m < positions)[:, None] & (n < n_end)[None, :]
    if STORE:
        row = n_end
        if STRIDED:
            row = y_row
        tl.store(y + m[:, None] * row + n[None, :], value.to(y.dtype.element_ty), mask=valid)
    if SUM:
        summed = tl.sum(tl.where(valid, value, 0.0), 0)
        tl.store(sums + n, summed, mask=n < n_end)


@triton.jit
def _taps(total, x, w, top, left, valid, c, channels, height, width, row, KERNEL: tl.constexpr):
    """Add the products with all taps of a square kernel to ``total``."""
    for dy in tl.static_range(KERNEL):
        for dx in tl.static_range(KERNEL):
            i, j = top + dy, left + dx
            in_map = valid & (i >= 0) & (i < height) & (j >= 0) & (j < width)
            offset = (i * width + j)[:, None] * channels + c[None, :]
            a = tl.load(x + offset, mask=in_map[:, None] & (c < channels)[None, :], other=0.0)
            weight = tl.load(w + (dy * KERNEL + dx) * row + c, mask=c < channels, other=0.0)
            total += a.to(tl.float32) * weight[None, :].to(tl.float32)
    return total


@triton.jit
def depthwise(
    x,  # [images, x_positions, row]
    w,  # [routes, taps, w_row]
    b,  # [routes, w_row]
    y,  # [images, y_positions, row]
    sums,  # [images, tiles, row]: over the positions of a tile
    route_of,  # [images]
    route_channels,  # [routes]
    geometry,  # [routes, 6]: height, width, output height and width, kernel size, padding
    x_positions,
    y_positions,
    taps,
    tiles,
    columns,
    row,
    w_row,
    K0: tl.constexpr,  # kernel sizes of the routes; 0: unused
    K1: tl.constexpr,
    K2: tl.constexpr,
    STRIDE: tl.constexpr,
    SUM: tl.constexpr,
    ACT: tl.constexpr,
    ALIGN: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """Convolve some channels of a tile of positions of one image depthwise, per program."""
    column = tl.program_id(0) % columns * BC
    image = tl.program_id(0) // columns // tiles
    tile = tl.program_id(0) // columns % tiles
    route = tl.load(route_of + image)
    if route < 0:
        return
    channels = tl.multiple_of(tl.load(route_channels + route), ALIGN)
    if column >= channels:
        return
    c = column + tl.arange(0, BC)
    mask = c < channels
    p = tile * BP + tl.arange(0, BP)
    geometry += route * 6
    height, width = tl.load(geometry), tl.load(geometry + 1)
    out_width = tl.load(geometry + 3)
    kernel, padding = tl.load(geometry + 4), tl.load(geometry + 5)
    positions = tl.load(geometry + 2) * out_width
    sums += (image * tiles + tile) * row
    if tile * BP >= positions:
        if SUM:
            tl.store(sums + c, tl.zeros((BC,), dtype=tl.float32), mask=mask)
        return
    top = (p // out_width) * STRIDE - padding
    left = (p % out_width) * STRIDE - padding
    x += image.to(tl.int64) * x_positions * row
    y += image.to(tl.int64) * y_positions * row
    w += route * taps * w_row
    valid = p < positions
    total = tl.zeros((BP, BC), dtype=tl.float32)
    if K1 == 0:
        total = _taps(total, x, w, top, left, valid, c, channels, height, width, w_row, K0)
    else:
        if kernel == K0:
            total = _taps(total, x, w, top, left, valid, c, channels, height, width, w_row, K0)
        elif kernel == K1:
            total = _taps(total, x, w, top, left, valid, c, channels, height, width, w_row, K1)
        else:
            if K2 > 0:
                total = _taps(total, x, w, top, left, valid, c, channels, height, width, w_row, K2)
    bias = tl.load(b + route * w_row + c, mask=mask, other=0.0)
    value = activate(total + bias[None, :].to(tl.float32), ACT)
    valid = valid[:, None] & mask[None, :]
    tl.store(y + p[:, None] * channels + c[None, :], value.to(y.dtype.element_ty), mask=valid)
    if SUM:
        summed = tl.sum(tl.where(valid, value, 0.0), 0)
        tl.store(sums + c, summed, mask=mask)


@triton.jit
def linear(
    x,  # [images, parts, x_row], summed over parts first
    w,  # [routes, w_rows, w_row]
    b,  # [routes, w_rows]
    y,  # [images, y_row]
    order,  # [tiles, BI]: images of one route per tile, negative: none; with SINGLE ``route_of``
    routes,  # [tiles], negative: an empty tile
    in_channels,  # [routes]
    out_channels,  # [routes]
    divisors,  # [routes], of the sums
    images,
    parts,
    x_row,
    y_row,
    w_row,
    w_rows,
    SINGLE: tl.constexpr,  # there is one route, images are not sorted
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
    BI: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Apply some outputs of a linear layer to a tile of images of one route, per program."""
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
    k_end = tl.multiple_of(tl.load(in_channels + route), ALIGN)
    n_end = tl.load(out_channels + route)
    divisor = tl.load(divisors + route).to(tl.float32)
    if tl.program_id(0) * BN >= n_end:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BI, BN), dtype=tl.float32)
    for start in range(0, k_end, BK):
        k = start + tl.arange(0, BK)
        mask = k < k_end
        a = tl.zeros((BI, BK), dtype=tl.float32)
        for part in range(parts):
            offset = (image * parts + part)[:, None] * x_row + k[None, :]
            a += tl.load(x + offset, mask=valid[:, None] & mask[None, :], other=0.0).to(tl.float32)
        c = tl.load(
            w + (route * w_rows + n)[:, None] * w_row + k[None, :],
            mask=(n < n_end)[:, None] & mask[None, :],
            other=0.0,
        )
        total = tl.dot((a / divisor).to(c.dtype), tl.trans(c), total, input_precision=PRECISION)
    bias = tl.load(b + route * w_rows + n, mask=n < n_end, other=0.0)
    value = activate(total + bias[None, :].to(tl.float32), ACT)
    mask = valid[:, None] & (n < n_end)[None, :]
    tl.store(y + image[:, None] * y_row + n[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def add_parts(x, y, parts, row, BP: tl.constexpr, BC: tl.constexpr):
    """Sum over parts, [images, parts, row] → [images, row], in an order that is the same in every batch."""
    image = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), dtype=tl.float32)
    for start in range(0, parts, BP):
        p = start + tl.arange(0, BP)
        offset = (image * parts + p)[:, None] * row + c[None, :]
        total += tl.sum(tl.load(x + offset, mask=(p < parts)[:, None] & (c < row)[None, :], other=0.0), 0)
    tl.store(y + image * row + c, total, mask=c < row)


@triton.jit
def stem(
    address,  # [1]: the address of images [images, CHANNELS, height, width] with the dtype of ``y``
    w,  # [BK, w_row]: (channel, row, column) by output channels
    b,  # [w_row]
    y,  # [images, out_height · out_width, y_row]
    route_of,  # [images]
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
    """Convolve the images with a dense kernel: a tile of positions of one image per program."""
    image = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if tl.load(route_of + image) < 0:
        return
    positions = out_height * out_width
    p = tile * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    channel = k // (KERNEL * KERNEL)
    i = ((p // out_width) * STRIDE - padding)[:, None] + (k % (KERNEL * KERNEL) // KERNEL)[None, :]
    j = ((p % out_width) * STRIDE - padding)[:, None] + (k % KERNEL)[None, :]
    valid = (p < positions)[:, None] & (channel < CHANNELS)[None, :]
    valid = valid & (i >= 0) & (i < height) & (j >= 0) & (j < width)
    x = tl.load(address).to(tl.pointer_type(y.dtype.element_ty))
    x += image.to(tl.int64) * CHANNELS * height * width
    y += image.to(tl.int64) * positions * y_row
    offset = channel[None, :] * height * width + i * width + j
    a = tl.load(x + offset, mask=valid, other=0.0)
    c = tl.load(w + k[:, None] * w_row + n[None, :], mask=(n < w_row)[None, :], other=0.0)
    bias = tl.load(b + n, mask=n < w_row, other=0.0)
    total = tl.dot(a, c, input_precision=PRECISION)
    value = activate(total + bias[None, :].to(tl.float32), ACT)
    mask = (p < positions)[:, None] & (n < w_row)[None, :]
    tl.store(y + p[:, None] * y_row + n[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _neighbours(position, size, out_size):
    """Return the two source positions for a position of a resized map, and the weight of the second."""
    offset = (position.to(tl.float32) + 0.5) * (size.to(tl.float32) / out_size) - 0.5
    offset = tl.maximum(offset, 0.0)
    first = tl.minimum(offset.to(tl.int32), size - 1)
    return first, tl.minimum(first + 1, size - 1), offset - first.to(tl.float32)


@triton.jit
def resize(
    x,  # [images, max_positions, channels]
    y,  # [images, out_height · out_width, y_row], with a stride of ``y_image`` between images
    route_of,  # [images]
    sizes,  # [routes, 2]: height and width
    max_positions,
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
    """Resize maps from the sizes of their routes to one size, by bilinear interpolation."""
    column = tl.program_id(0) % columns * BC
    image = tl.program_id(0) // columns // tiles
    tile = tl.program_id(0) // columns % tiles
    route = tl.load(route_of + image)
    if route < 0:
        return
    height, width = tl.load(sizes + route * 2), tl.load(sizes + route * 2 + 1)
    p = tile * BP + tl.arange(0, BP)
    c = column + tl.arange(0, BC)
    mask = (p < out_height * out_width)[:, None] & (c < channels)[None, :]
    top, bottom, below = _neighbours(p // out_width, height, out_height)
    left, right, beside = _neighbours(p % out_width, width, out_width)
    x += image.to(tl.int64) * max_positions * channels
    a = tl.load(x + (top * width + left)[:, None] * channels + c[None, :], mask=mask, other=0.0)
    b = tl.load(x + (top * width + right)[:, None] * channels + c[None, :], mask=mask, other=0.0)
    upper = a.to(tl.float32) * (1.0 - beside)[:, None] + b.to(tl.float32) * beside[:, None]
    a = tl.load(x + (bottom * width + left)[:, None] * channels + c[None, :], mask=mask, other=0.0)
    b = tl.load(x + (bottom * width + right)[:, None] * channels + c[None, :], mask=mask, other=0.0)
    lower = a.to(tl.float32) * (1.0 - beside)[:, None] + b.to(tl.float32) * beside[:, None]
    value = upper * (1.0 - below)[:, None] + lower * below[:, None]
    y += image.to(tl.int64) * y_image
    tl.store(y + p[:, None] * y_row + c[None, :], value.to(y.dtype.element_ty), mask=mask)
