"""The blocks that supernets are built of.

A block runs with the sizes of a `Slice` and the norm key that its input belongs to. The methods `forward`,
`cost` and `extract` stand side by side, so that they stay consistent.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict, cast

import torch
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.errors import DsnetError, shorten
from dsnet.gate import Gate
from dsnet.routes import Slice
from dsnet.slicing import Mode, SlicedConv2d, SlicedGroupNorm, SlicedLinear, SplitBatchNorm2d
from dsnet.slicing import functional as SF
from dsnet.slicing.static import fuse

__all__ = [
    "ACTIVATIONS",
    "Block",
    "ChannelAttention",
    "ConvNormAct",
    "Factory",
    "Head",
    "MaxPool",
    "NormSpec",
    "PoolHead",
    "Step",
    "count_steps",
    "drop_branch",
    "drop_features",
    "make_activation",
    "run_steps",
]


class Factory(TypedDict, total=False):
    """Keyword arguments of layers: device and precision of their parameters."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class Block(nn.Module, ABC):
    """Base class of blocks. A block holds weights only; sizes are arguments."""

    stride = 1  # factor by which the resolution shrinks
    makes_tokens = False  # whether it turns maps [B, C, H, W] into tokens [B, N, E]

    @abstractmethod
    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Run at this size."""

    @abstractmethod
    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost at this size on an input of this shape, and the shape of the output."""

    @abstractmethod
    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract the stand-alone block of this size, made of torch's own layers, for this input shape."""


class Step(NamedTuple):
    """A block with the arguments that it needs to run on one route."""

    block: Block
    size: Slice
    key: int = 0  # of the block's norms


def run_steps(steps: Iterable[Step], x: Tensor, mode: Mode | None = None) -> Tensor:
    """Run blocks one after the other."""
    for block, size, key in steps:
        x = block(x, size, key, mode)
    return x


def count_steps(steps: Iterable[Step], shape: Shape) -> tuple[Cost, Shape]:
    """Count blocks that run one after the other; return the cost and the shape of the output."""
    total = Cost()
    for block, size, _ in steps:
        cost, shape = block.cost(shape, size)
        total += cost
    return total, shape


# --- regularisation -------------------------------------------------------------------------------------
def drop_branch(branch: Tensor, mode: Mode | None, share: float) -> Tensor:
    """Apply stochastic depth: drop a residual branch [B, …] for some images, and scale it for the others.

    The rate is that of the mode times ``share``, which grows from 0 in the first block to 1 in the last.
    """
    if mode is None or mode.drop_path * share == 0:
        return branch
    return branch * _dropout_mask(
        (len(branch), *(1,) * (branch.ndim - 1)), branch, mode, mode.drop_path * share
    )


def drop_features(x: Tensor, mode: Mode | None) -> Tensor:
    """Apply dropout to the input [B, C] of a classifier."""
    return x if mode is None or mode.dropout == 0 else x * _dropout_mask(x.shape, x, mode, mode.dropout)


def _dropout_mask(shape: tuple[int, ...], like: Tensor, mode: Mode, rate: float) -> Tensor:
    draws = torch.rand(shape, device=like.device, generator=mode.generator)
    return (draws >= rate).to(like.dtype) / (1 - rate)


# --- norms and activations -------------------------------------------------------------------------------
ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU, "hard_swish": nn.Hardswish}


def make_activation(name: str) -> nn.Module:
    """Make an activation by name, in place: it follows a norm or a sum, whose output has no other use."""
    if name not in ACTIVATIONS:
        raise DsnetError(f"unknown activation {shorten(name)}; possible: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name](inplace=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """The norm of a convolutional family."""

    kind: Literal["batch", "group"] = "batch"
    channels_per_group: int = 16  # for "group"

    def __post_init__(self) -> None:
        if self.kind not in ("batch", "group"):
            raise DsnetError(f"unknown norm {shorten(self.kind)}; possible: batch, group")

    def make(
        self, channels: int, keys: int, factory: Factory, *, init_weight: float = 1.0
    ) -> SplitBatchNorm2d | SlicedGroupNorm:
        """Make a norm of this many channels; only batch norm has ``keys``."""
        if self.kind == "batch":
            return SplitBatchNorm2d(channels, keys=keys, init_weight=init_weight, **factory)
        group = self.channels_per_group
        return SlicedGroupNorm(channels, channels_per_group=group, init_weight=init_weight, **factory)


# --- blocks -----------------------------------------------------------------------------------------
class ConvNormAct(Block):
    """Convolution, norm and an optional activation.

    ``filters`` says what the number of filters is: the ``width`` of a slice, its ``hidden`` size, or the
    number of ``input`` channels, as in a depthwise convolution. A kernel larger than 1 is sliced to that of
    the slice. The padding of the slice applies to a strided convolution; others keep the resolution.
    """

    def __init__(
        self,
        conv: SlicedConv2d,
        norm: SplitBatchNorm2d | SlicedGroupNorm,
        act: nn.Module | None,
        *,
        filters: Literal["width", "hidden", "input"] = "width",
    ) -> None:
        super().__init__()
        self.conv, self.norm, self.act, self.filters = conv, norm, act, filters
        self.spatial, self.strided, self.stride = conv.kernel > 1, conv.stride > 1, conv.stride

    def _conv_sizes(self, size: Slice) -> tuple[int | None, int | None, int | None]:
        out = None if self.filters == "input" else cast(int, getattr(size, self.filters))
        if not self.spatial:
            return out, None, None
        return out, size.kernel, size.padding if self.strided else None

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Run at this size."""
        out, kernel, padding = self._conv_sizes(size)
        x = self.norm(self.conv(x, out, kernel=kernel, padding=padding), key, mode)
        return x if self.act is None else cast(Tensor, self.act(x))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost and the output shape."""
        out, kernel, padding = self._conv_sizes(size)
        cost, after = self.conv.cost(shape, out, kernel=kernel, padding=padding)
        return cost + self.norm.cost(after.channels), after

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Sequential:
        """Extract the layers, with ``fold_bn`` the batch norm folded into the convolution."""
        out, kernel, padding = self._conv_sizes(size)
        conv = self.conv.extract(shape.channels, out, kernel=kernel, padding=padding)
        norm = self.norm.extract(conv.out_channels, key)
        parts: list[nn.Module] = [conv, norm]
        if fold_bn and isinstance(norm, nn.BatchNorm2d):
            parts = [fuse(conv, norm)]
        if self.act is not None:
            parts.append(copy.deepcopy(self.act))
        return nn.Sequential(*parts)

    @torch.no_grad()
    def rescale(self, size: Slice) -> None:
        """Scale weights drawn for the full width to the standard deviation of He's rule for this size."""
        out = self._conv_sizes(size)[0]
        if out is not None:
            self.conv.weight.mul_((self.conv.out_channels / out) ** 0.5)


class ChannelAttention(Block):
    """A gate without a routing head, which scales channels."""

    def __init__(self, channels: int, factory: Factory) -> None:
        super().__init__()
        self.gate = Gate(channels, **factory)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Scale the channels of the input."""
        scaled, _ = self.gate(x, batch_invariant=mode is not None and mode.batch_invariant)
        return cast(Tensor, scaled)

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost; the shape does not change."""
        return self.gate.cost(shape), shape

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract the attention."""
        return self.gate.extract(shape.channels)


class MaxPool(Block):
    """3 × 3 max-pool of stride 2."""

    stride = 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Halve the resolution."""
        return cast(Tensor, self.pool(x))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Return a cost of zero and the output shape."""
        height, width = (SF.conv_output_size(s, 3, 2, 1) for s in (shape.height, shape.width))
        return Cost(), Shape(shape.channels, height, width)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Return the pool."""
        return nn.MaxPool2d(3, 2, 1)


class Head(Block):
    """Base class of heads: features → one vector an image → logits."""

    classifier: SlicedLinear

    @abstractmethod
    def pool(self, x: Tensor) -> Tensor:
        """Pool features [B, …] to [B, C]."""


class PoolHead(Head):
    """Global average pool and a classifier on the channels of its input."""

    def __init__(self, channels: int, num_classes: int, factory: Factory) -> None:
        super().__init__()
        self.classifier = SlicedLinear(channels, num_classes, init_std=0.01, **factory)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Compute logits [B, classes] of features [B, C, H, W]."""
        return cast(Tensor, self.classifier(drop_features(self.pool(x), mode)))

    def pool(self, x: Tensor) -> Tensor:
        """Average over all positions."""
        return x.mean((2, 3))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost and the shape of the logits."""
        classes = self.classifier.out_features
        linear = self.classifier.cost(shape.channels, classes)
        return linear + Cost(pools=shape.channels * shape.area), Shape(classes, 1, 1)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract pool and classifier."""
        classifier = self.classifier.extract(shape.channels, self.classifier.out_features)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier)
