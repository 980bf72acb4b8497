"""Layers of converted networks: torch's layers, run with slices of their weights.

Sizes come as a tuple, the width of each channel group of the stage. A `SlicedAxis` says which channels of a
dimension these widths leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost
from dsnet.slicing import Factory, KeyState, SplitBatchNorm2d
from dsnet.slicing import functional as SF
from dsnet.slicing.parameters import draw_normal, draw_truncated
from dsnet.slicing.static import plain_linear, with_copies

__all__ = [
    "ConvertedBatchNorm",
    "ConvertedConv",
    "ConvertedGroupNorm",
    "ConvertedLayerNorm",
    "ConvertedLinear",
    "Sizes",
    "SlicedAxis",
    "SlicedTensor",
    "axis_width",
]

Sizes = tuple[int, ...]
Terms = tuple[tuple[tuple[int, int], ...], ...]
"""Sum of products of factors (size, position of its group among the sizes; -1: never sliced)."""


def axis_width(sizes: Sizes, terms: Terms) -> int:
    """Return the number of channels that sizes leave of an axis."""
    return sum(math.prod(full if group < 0 else sizes[group] for full, group in term) for term in terms)


@dataclass(frozen=True, slots=True)
class SlicedAxis:
    """A dimension of a tensor, and which of its channels a tuple of sizes leaves.

    Examples:
        >>> heads = SlicedAxis((((3, -1), (4, 0), (16, -1)),))  # Q, K and V of 4 heads with 16 features
        >>> heads.full, heads.width((2,)), heads.take(torch.arange(192), 0, (1,))[16].item()
        (192, 96, 64)
    """

    terms: Terms

    @property
    def full(self) -> int:
        """Number of channels at full size."""
        return sum(math.prod(full for full, _ in term) for term in self.terms)

    @property
    def sliced(self) -> bool:
        """Whether sizes can leave a part of the axis."""
        return any(group >= 0 for term in self.terms for _, group in term)

    @property
    def is_prefix(self) -> bool:
        """Whether every slice is the first channels of the axis."""
        return len(self.terms) == 1 and all(group < 0 for _, group in self.terms[0][1:])

    def width(self, sizes: Sizes) -> int:
        """Return the number of channels that sizes leave."""
        return axis_width(sizes, self.terms)

    def take(self, tensor: Tensor, dim: int, sizes: Sizes) -> Tensor:
        """Return the channels of a tensor that sizes leave: a view if they are the first ones."""
        if not self.sliced:
            return tensor
        if self.is_prefix:
            width = self.width(sizes)
            return tensor if width == tensor.shape[dim] else tensor.narrow(dim, 0, width)
        parts = torch.split(tensor, [math.prod(full for full, _ in term) for term in self.terms], dim)
        slices = [_take_term(part, dim, term, sizes) for part, term in zip(parts, self.terms, strict=True)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim)


def _take_term(tensor: Tensor, dim: int, term: Sequence[tuple[int, int]], sizes: Sizes) -> Tensor:
    if all(group < 0 or sizes[group] == full for full, group in term):
        return tensor
    y = torch.unflatten(tensor, dim, [full for full, _ in term])
    for number, (full, group) in enumerate(term):
        if group >= 0 and sizes[group] < full:
            y = y.narrow(dim + number, 0, sizes[group])
    return y.flatten(dim, dim + len(term) - 1)


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Return a parameter that is trained if the original was."""
    return nn.Parameter(tensor, not isinstance(tensor, nn.Parameter) or tensor.requires_grad)


class ConvertedConv(nn.Module):
    """Convolution with sliced filters, input channels and number of groups.

    Args:
        weight: Full weight [O, I / groups, Kh, Kw].
        bias: Full bias [O], or None.
        out: Axis of the filters.
        inner: Axis of the input channels of a group.
        groups: Axis of the number of groups, or None for one group.
        stride: Stride.
        padding: Padding, also ``same`` and ``valid``.
        dilation: Dilation.
        mode: What is padded, as in ``nn.Conv2d``.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        out: SlicedAxis,
        inner: SlicedAxis,
        groups: SlicedAxis | None,
        stride: Any = 1,  # noqa: ANN401  (as torch takes it)
        padding: Any = 0,  # noqa: ANN401
        dilation: Any = 1,  # noqa: ANN401
        mode: str = "zeros",
    ) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.out, self.inner, self.groups = out, inner, groups
        self.stride, self.padding, self.dilation = _pair(stride), padding, _pair(dilation)
        if not isinstance(padding, str):
            self.padding = _pair(padding)
        self.mode = mode
        self.is_pointwise = (
            groups is None
            and (*weight.shape[2:], *self.stride) == (1, 1, 1, 1)
            and not any(self.padding if not isinstance(self.padding, str) else ())
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise by He's rule with the fan-out of a group; the bias is zero."""
        fan_out = self.weight[:, 0].numel() / (1 if self.groups is None else self.groups.full)
        draw_normal(self.weight, (2 / fan_out) ** 0.5, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def sliced(self, sizes: Sizes) -> tuple[Tensor, Tensor | None, int]:
        """Return weight, bias and number of groups of a slice."""
        weight = self.inner.take(self.out.take(self.weight, 0, sizes), 1, sizes)
        bias = None if self.bias is None else self.out.take(self.bias, 0, sizes)
        return weight, bias, 1 if self.groups is None else self.groups.width(sizes)

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Convolve ``x`` [B, C, H, W], whose channels are already sliced."""
        weight, bias, groups = self.sliced(sizes)
        if self.is_pointwise and SF.prefers_product(x):
            return SF.pointwise(x, weight, bias)
        if self.mode != "zeros" and not isinstance(self.padding, str):
            height, width = self.padding
            x = F.pad(x, (width, width, height, height), self.mode)
            return F.conv2d(x, weight, bias, self.stride, 0, self.dilation, groups)
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, groups)

    def cost(self, sizes: Sizes, positions: int) -> Cost:
        """Count the layer for ``positions`` positions of the output."""
        weight, bias, _ = self.sliced(sizes)
        weights = weight.numel()
        return Cost(params=weights + (0 if bias is None else bias.numel()), layers=weights * positions)

    def extract(self, sizes: Sizes) -> nn.Conv2d:
        """Build the stand-alone layer of a slice."""
        weight, bias, groups = self.sliced(sizes)
        layer = nn.Conv2d(
            weight.shape[1] * groups,
            weight.shape[0],
            cast(tuple[int, int], tuple(weight.shape[2:])),
            self.stride,
            self.padding,
            self.dilation,
            groups,
            bias is not None,
            cast(Any, self.mode),
            device="meta",
        )
        return with_copies(layer, weight, bias)


def _pair(value: Any) -> tuple[int, int]:  # noqa: ANN401
    return (value, value) if isinstance(value, int) else cast(tuple[int, int], tuple(map(int, value)))


class ConvertedLinear(nn.Module):
    """Linear layer with sliced input and output.

    Args:
        weight: Full weight [O, I].
        bias: Full bias [O], or None.
        out: Axis of the output.
        inner: Axis of the input.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, out: SlicedAxis, inner: SlicedAxis) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.out, self.inner = out, inner
        self.out_features, self.in_features = weight.shape

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise by a truncated normal of 0.02; the bias is zero."""
        draw_truncated(self.weight, 0.02, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def sliced(self, sizes: Sizes) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a slice."""
        weight = self.inner.take(self.out.take(self.weight, 0, sizes), 1, sizes)
        return weight, None if self.bias is None else self.out.take(self.bias, 0, sizes)

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Map ``x`` [..., I], whose features are already sliced."""
        return F.linear(x, *self.sliced(sizes))

    def cost(self, sizes: Sizes, positions: int) -> Cost:
        """Count the layer for ``positions`` positions."""
        weight, bias = self.sliced(sizes)
        madds = weight.numel()
        return Cost(params=madds + (0 if bias is None else bias.numel()), layers=madds * positions)

    def extract(self, sizes: Sizes) -> nn.Linear:
        """Build the stand-alone layer of a slice."""
        return plain_linear(*self.sliced(sizes))


class ConvertedBatchNorm(SplitBatchNorm2d):
    """Batch norm with statistics for each key, started with those of the original network.

    The statistics of the last key, that of the largest route, are the original's and count as calibrated.
    Those of other routes are a start that training or re-calibration replaces; they count as running.

    Args:
        weight: γ [C].
        bias: β [C].
        axis: Axis of the channels; every slice is its first channels.
        mean: Means [C] of the original network.
        var: Variances [C].
        keys: Number of keys.
        eps: Added to variances.
        momentum: Weight of a batch in the moving average; None as in torch's cumulative average becomes 0.1.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        var: Tensor,
        *,
        axis: SlicedAxis,
        keys: int,
        eps: float,
        momentum: float | None,
    ) -> None:
        factory = Factory(device=weight.device, dtype=weight.dtype)
        super().__init__(
            len(weight), keys=keys, eps=eps, momentum=0.1 if momentum is None else momentum, **factory
        )
        self.axis, self.weight, self.bias = axis, _parameter(weight), _parameter(bias)
        with torch.no_grad():
            self.mean.copy_(mean.expand_as(self.mean))
            self.var.copy_(var.expand_as(self.var))
        self.states = [*[KeyState.RUNNING] * (keys - 1), KeyState.CALIBRATED]


class ConvertedLayerNorm(nn.Module):
    """Layer norm over the features of its input, or over several whole dimensions.

    Args:
        weight: γ, or None.
        bias: β, or None.
        shape: Dimensions of γ at full size.
        axis: Axis of the features.
        eps: Added to variances.
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        shape: Sequence[int],
        axis: SlicedAxis,
        eps: float,
    ) -> None:
        super().__init__()
        self.weight = None if weight is None else _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.shape, self.axis, self.eps = tuple(shape), axis, eps

    def _sliced(self, sizes: Sizes) -> tuple[tuple[int, ...], Tensor | None, Tensor | None]:
        if not self.axis.sliced:
            return self.shape, self.weight, self.bias
        weight, bias = (None if t is None else self.axis.take(t, 0, sizes) for t in (self.weight, self.bias))
        return (self.axis.width(sizes),), weight, bias

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Normalise the last dimensions of ``x``."""
        return F.layer_norm(x, *self._sliced(sizes), self.eps)

    def cost(self, sizes: Sizes) -> Cost:
        """Count γ and β."""
        _, *tensors = self._sliced(sizes)
        return Cost(params=sum(t.numel() for t in tensors if t is not None))

    def extract(self, sizes: Sizes) -> nn.LayerNorm:
        """Build the stand-alone norm of a slice."""
        shape, weight, bias = self._sliced(sizes)
        norm = nn.LayerNorm(shape, self.eps, weight is not None, bias is not None, device="meta")
        return norm if weight is None else with_copies(norm, weight, bias)


class ConvertedGroupNorm(nn.Module):
    """Group norm with a sliced number of groups; each keeps its channels.

    Args:
        weight: γ, or None.
        bias: β, or None.
        axis: Axis of the channels.
        groups: Axis of the number of groups.
        eps: Added to variances.
    """

    def __init__(
        self, weight: Tensor | None, bias: Tensor | None, *, axis: SlicedAxis, groups: SlicedAxis, eps: float
    ) -> None:
        super().__init__()
        self.weight = None if weight is None else _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.axis, self.groups, self.eps = axis, groups, eps

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Normalise ``x`` [B, C, ...] in groups of channels."""
        weight, bias = (None if t is None else self.axis.take(t, 0, sizes) for t in (self.weight, self.bias))
        return F.group_norm(x, self.groups.width(sizes), weight, bias, self.eps)

    def cost(self, sizes: Sizes) -> Cost:
        """Count γ and β."""
        tensors = [t for t in (self.weight, self.bias) if t is not None]
        return Cost(params=len(tensors) * self.axis.width(sizes))

    def extract(self, sizes: Sizes) -> nn.GroupNorm:
        """Build the stand-alone norm of a slice."""
        affine = self.weight is not None
        norm = nn.GroupNorm(self.groups.width(sizes), self.axis.width(sizes), self.eps, affine, device="meta")
        if self.weight is None or self.bias is None:
            return norm
        return with_copies(norm, self.axis.take(self.weight, 0, sizes), self.axis.take(self.bias, 0, sizes))


class SlicedTensor(nn.Module):
    """A weight or constant that takes part in arithmetic, such as positions or a layer's scale.

    Args:
        value: The tensor; a parameter stays one, anything else becomes a buffer.
        axes: Axis of each dimension.
    """

    value: Tensor

    def __init__(self, value: Tensor, axes: Sequence[SlicedAxis]) -> None:
        super().__init__()
        self.trained = isinstance(value, nn.Parameter)
        if self.trained:
            self.value = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
        else:
            self.register_buffer("value", value)
        self.axes = tuple(axes)

    def forward(self, sizes: Sizes) -> Tensor:
        """Return the slice of these sizes."""
        y = self.value
        for dim, axis in enumerate(self.axes):
            y = axis.take(y, dim, sizes)
        return y

    def cost(self, sizes: Sizes) -> Cost:
        """Count the parameters of a slice."""
        if not self.trained:
            return Cost()
        return Cost(params=math.prod(axis.width(sizes) for axis in self.axes))

    def extract(self, sizes: Sizes) -> Tensor:
        """Return a copy of a slice."""
        value = self.forward(sizes).detach().clone(memory_format=torch.contiguous_format)
        return nn.Parameter(value, self.value.requires_grad) if self.trained else value
