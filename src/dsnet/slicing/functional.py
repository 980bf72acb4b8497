"""Pure functions that run a layer with a slice of its weights.

Each slice starts at index 0 and is contiguous (Eq. 8 of the paper), so that a smaller layer is nested in
each larger one. The slice of the input side follows from the input. The slice of the output side, the kernel
and the padding are arguments. Sizes are not clipped: a size that the weights do not have is an error.

Letters: B batch, C channels, H and W height and width, N tokens, E embedding, O and I a weight's output
and input side, K its kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.counts import Shape
from dsnet.errors import DsnetError

__all__ = [
    "at_least_float32",
    "attention",
    "check_group_width",
    "check_size",
    "conv2d",
    "conv_output_shape",
    "filter_sizes",
    "group_norm",
    "layer_norm",
    "linear",
    "pointwise",
    "prefers_product",
    "slice_filters",
    "slice_head_features",
    "slice_window",
    "window_taps",
]


def check_size(what: str, size: int, full: int) -> None:
    """Raise unless a layer of size ``full`` has a slice of ``size``."""
    if not 1 <= size <= full:
        raise DsnetError(f"{what} {size} is not in this layer; possible: 1 to {full}")


# --- linear ----------------------------------------------------------------------------------------
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Compute ``W[:out, :in] x + b[:out]``, where ``in`` is the last dimension of ``x``.

    Args:
        x: Input [..., in].
        weight: Full weight [O, I].
        bias: Full bias [O], or None.
        out: Number of output features.

    Returns:
        Output [..., out].

    Raises:
        DsnetError: ``weight`` has no such slice.

    Examples:
        >>> linear(torch.ones(1, 2), torch.ones(4, 3), None, out=2)
        tensor([[2., 2.]])
    """
    features = x.shape[-1]
    full_out, full_in = weight.shape
    check_size("input width", features, full_in)
    check_size("output width", out, full_out)
    if out < full_out:
        weight, bias = weight[:out], None if bias is None else bias[:out]
    return F.linear(x, weight[:, :features] if features < full_in else weight, bias)


MAX_PRODUCTS = 2**18  # at a time, so that they fit in a cache


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``W x + b`` for ``x`` [B, in] batch-invariantly: each row has the same bits in any batch.

    A matrix product sums in an order that depends on the number of rows. Here each output is the sum of its
    own products over the last dimension, in an order that depends on ``in`` only.
    """
    rows = max(1, MAX_PRODUCTS // weight.numel())
    if len(x) > rows:
        return torch.cat([row_linear(part, weight, bias) for part in torch.split(x, rows)])
    y = (x[:, None] * weight).sum(-1)
    return y if bias is None else y.add(bias)


# --- convolution -----------------------------------------------------------------------------------
def filter_sizes(
    filters: int, group_in: int, channels: int, out: int | None, *, groups: int = 1, per_group: bool = False
) -> tuple[int, int, int]:
    """Return the sizes that `slice_filters` takes from a weight ``[filters, group_in, K, K]``, checked.

    Returns:
        Number of filters, input channels per group, and number of groups.
    """
    group_out = filters // groups
    check_size("number of input channels", channels, groups * group_in)
    if groups > 1 and not per_group:
        if channels % group_in:
            raise DsnetError(f"{channels} input channels are not a multiple of the {group_in} in a group")
        used = channels // group_in
        if out is not None and out != used * group_out:
            raise DsnetError(
                f"{channels} input channels fill {used} groups, which give {used * group_out} channels, "
                f"not {out}; the output of a convolution sliced by group number follows from its input"
            )
        return used * group_out, group_in, used
    out = filters if out is None else out
    check_size("number of filters", out, filters)
    for what, size in (("input channels", channels), ("filters", out)):
        if size % groups:
            raise DsnetError(f"{size} {what} cannot be shared evenly by {groups} groups")
    return out, channels // groups, groups


def slice_filters(
    weight: Tensor,
    bias: Tensor | None,
    channels: int,
    out: int | None,
    *,
    groups: int = 1,
    per_group: bool = False,
) -> tuple[Tensor, Tensor | None, int]:
    """Slice the filters that map ``channels`` input channels to ``out`` (Eq. 9 and 10).

    With one group the slice is ``W[:out, :channels]``. Several groups, viewed as ``[N, G_out, G_in, K, K]``,
    are sliced to the first n groups, where n follows from the input, or with ``per_group`` to the first
    filters of each group. A depthwise convolution is the former, with groups of one channel.

    Returns:
        Weight, bias and number of groups of the slice.
    """
    filters, group_in = weight.shape[:2]
    out, channels_in, used = filter_sizes(
        filters, group_in, channels, out, groups=groups, per_group=per_group
    )
    if groups == 1 or not per_group:
        # A view costs a few microseconds: make none of a full side.
        if out < filters:
            weight, bias = weight[:out], None if bias is None else bias[:out]
        return weight[:, :channels_in] if channels_in < group_in else weight, bias, used
    by_group, group_out = (groups, filters // groups), out // groups
    sliced = torch.unflatten(weight, 0, by_group)[:, :group_out, :channels_in].flatten(0, 1)
    sliced_bias = None if bias is None else torch.unflatten(bias, 0, by_group)[:, :group_out].flatten()
    return sliced, sliced_bias, used


def window_taps(full: int, kernel: int | None = None, dilation: int = 1) -> slice:
    """Return the taps of a centred window in a kernel of size ``full``, every ``dilation``-th of them."""
    kernel = full if kernel is None else kernel
    check_size("kernel", kernel, full)
    if (full - kernel) % 2:
        parity = "odd" if full % 2 else "even"
        raise DsnetError(
            f"kernel {kernel} has no centred window in a kernel of {full}; possible: {parity} ones"
        )
    if dilation < 1 or (kernel - 1) % dilation:
        fit = [d for d in range(1, max(kernel, 2)) if (kernel - 1) % d == 0]
        raise DsnetError(
            f"dilation {dilation} does not divide kernel {kernel} − 1; possible: {', '.join(map(str, fit))}"
        )
    start = (full - kernel) // 2
    return slice(start, start + kernel, dilation)


def slice_window(weight: Tensor, kernel: int | None = None, dilation: int = 1) -> Tensor:
    """Slice the centred window of ``kernel`` taps, every ``dilation``-th of them (Eq. 11 and 12)."""
    if dilation == 1 and (kernel is None or kernel == weight.shape[-1]):
        return weight
    taps = window_taps(weight.shape[-1], kernel, dilation)
    return weight[..., taps, taps]


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: int | None = None,
    kernel: int | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    per_group: bool = False,
) -> Tensor:
    """Convolve ``x`` [B, C, H, W] with a slice of ``weight`` [O, I / groups, K, K], where C ≤ I.

    Args:
        x: Input; its channels are the slice of the input side.
        weight: Full weight.
        bias: Full bias [O].
        out: Number of filters (default: all, or with groups as many as follow from the input).
        kernel: Size of the centred window (default: the full kernel).
        stride: Stride.
        padding: Padding of the route. Padding by the largest and slicing the padded input (Eq. 13 of the
            paper) gives the same result and reads more.
        dilation: Keep every ``dilation``-th tap in its place; the window still spans ``kernel`` positions.
        groups: Number of groups of ``weight``.
        per_group: Slice the filters of each group rather than the number of groups.

    Returns:
        Output [B, out, H', W'].

    Raises:
        DsnetError: ``weight`` has no such slice.

    Examples:
        >>> conv2d(torch.ones(1, 2, 5, 5), torch.ones(8, 4, 5, 5), out=3, kernel=3, padding=1).shape
        torch.Size([1, 3, 5, 5])
    """
    filters, bias, used = slice_filters(weight, bias, x.shape[1], out, groups=groups, per_group=per_group)
    window = slice_window(filters, kernel, dilation)
    if window.shape[-1] == 1 and stride == 1 and padding == 0 and groups == 1 and prefers_product(x):
        return pointwise(x, window, bias)
    return F.conv2d(x, window, bias, stride, padding, dilation, used)


def prefers_product(x: Tensor) -> bool:
    """Tell whether a 1 × 1 convolution of ``x`` is faster as a matrix product.

    Convolution kernels copy a weight that is not contiguous in each call, matrix products do not. By
    measurement this pays on a CPU for one image, and on a GPU in half precision with channels-last inputs.
    """
    if x.device.type == "cpu":
        return x.shape[0] == 1
    return x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous(memory_format=torch.channels_last)


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run a 1 × 1 convolution with ``weight`` [O, C, 1, 1] as a matrix product; keep the memory layout."""
    matrix = weight[:, :, 0, 0]
    if x.is_contiguous(memory_format=torch.channels_last):
        return F.linear(x.permute(0, 2, 3, 1), matrix, bias).permute(0, 3, 1, 2)
    y = torch.matmul(matrix, x.flatten(2)).view(x.shape[0], -1, *x.shape[2:])
    return y if bias is None else y + bias[:, None, None]


def conv_output_shape(shape: Shape, out: int, kernel: int, stride: int, padding: int) -> Shape:
    """Return the output shape of a convolution or pool whose window spans ``kernel`` positions."""
    if padding < 0:
        raise DsnetError(f"padding must be at least 0, not {padding}")
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in shape[1:])
    if height < 1 or width < 1:
        raise DsnetError(
            f"a kernel of {kernel} with padding {padding} does not fit on a map of "
            f"{shape.height} × {shape.width}"
        )
    return Shape(out, height, width)


# --- norms -----------------------------------------------------------------------------------------
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the features of ``x`` (last dimension), with γ and β sliced to them."""
    features = x.shape[-1]
    check_size("width", features, weight.shape[0])
    return F.layer_norm(x, (features,), weight[:features], bias[:features], eps)


def check_group_width(channels: int, full: int, channels_per_group: int) -> None:
    """Raise unless a group norm can run at this width."""
    check_size("width", channels, full)
    if channels % channels_per_group:
        raise DsnetError(f"width {channels} is off the grid: not a multiple of {channels_per_group} channels")


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, channels_per_group: int, eps: float) -> Tensor:
    """Normalise the channels of ``x`` [B, C, H, W] in groups of ``channels_per_group``."""
    channels = x.shape[1]
    check_group_width(channels, weight.shape[0], channels_per_group)
    return F.group_norm(x, channels // channels_per_group, weight[:channels], bias[:channels], eps)


# --- attention -------------------------------------------------------------------------------------
def slice_head_features(weight: Tensor, heads: int, head_dim: int, full_head_dim: int) -> Tensor:
    """Slice the first ``head_dim`` rows (features) of each of the first ``heads`` heads."""
    full_heads = weight.shape[0] // full_head_dim
    check_size("number of heads", heads, full_heads)
    check_size("features per head", head_dim, full_head_dim)
    if head_dim == full_head_dim:  # contiguous rows: a view, no copy
        return weight[: heads * head_dim]
    return torch.unflatten(weight, 0, (full_heads, full_head_dim))[:heads, :head_dim].flatten(0, 1)


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Compute softmax(QKᵀ / √(features per head)) V for inputs ``[B, N, heads × features]``."""
    q, k, v = (torch.unflatten(t, -1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    y: Tensor = F.scaled_dot_product_attention(q, k, v)
    return y.transpose(1, 2).flatten(2)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precisions, and other dtypes unchanged."""
    return torch.promote_types(dtype, torch.float32)
