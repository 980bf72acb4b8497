"""Blocks: what a supernet is a chain of.

A block runs with the sizes of a `Slice` and the norm key that its input belongs to, counts itself and
gives its stand-alone twin. Three methods, side by side, so that the three cannot drift apart unseen.
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
    """Where and in which precision parameters are made."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class Block(nn.Module, ABC):
    """A link of the chain. Holds weights only; sizes are arguments."""

    stride = 1  # what the resolution is divided by
    makes_tokens = False  # whether it turns maps [B, C, H, W] into tokens [B, N, E]

    @abstractmethod
    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Runs at this size."""

    @abstractmethod
    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Cost at this size on an input of this shape, and the shape of the output."""

    @abstractmethod
    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """The stand-alone block of this size for inputs of this shape, of torch's own layers."""


class Step(NamedTuple):
    """A block, with what it needs to run on one route."""

    block: Block
    size: Slice
    key: int = 0  # of the block's norms


def run_steps(steps: Iterable[Step], x: Tensor, mode: Mode | None = None) -> Tensor:
    """Runs the chain."""
    for block, size, key in steps:
        x = block(x, size, key, mode)
    return x


def count_steps(steps: Iterable[Step], shape: Shape) -> tuple[Cost, Shape]:
    """Cost of the chain on an input of this shape, and the shape of its output."""
    total = Cost()
    for block, size, _ in steps:
        cost, shape = block.cost(shape, size)
        total += cost
    return total, shape


# --- what a pass in training may leave out --------------------------------------------------------------
def drop_branch(branch: Tensor, mode: Mode | None, share: float) -> Tensor:
    """Stochastic depth: a residual branch [B, …], left out for some images and scaled up for the others.

    ``share`` of the mode's rate applies: 0 for the first block of a network, 1 for its last.
    """
    if mode is None or mode.drop_path * share == 0:
        return branch
    return branch * _kept((len(branch), *(1,) * (branch.ndim - 1)), branch, mode, mode.drop_path * share)


def drop_features(x: Tensor, mode: Mode | None) -> Tensor:
    """Dropout of what a classifier reads, [B, C]."""
    return x if mode is None or mode.dropout == 0 else x * _kept(x.shape, x, mode, mode.dropout)


def _kept(shape: tuple[int, ...], like: Tensor, mode: Mode, rate: float) -> Tensor:
    draws = torch.rand(shape, device=like.device, generator=mode.generator)
    return (draws >= rate).to(like.dtype) / (1 - rate)


# --- pieces that families choose from ----------------------------------------------------------------
ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU, "hard_swish": nn.Hardswish}


def make_activation(name: str) -> nn.Module:
    """Activation by name; in place, since it gets a norm's or a sum's output that nobody else needs."""
    if name not in ACTIVATIONS:
        raise DsnetError(f"unknown activation {shorten(name)}; possible: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name](inplace=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """Which norm a convolutional family uses."""

    kind: Literal["batch", "group"] = "batch"
    channels_per_group: int = 16  # for "group"

    def __post_init__(self) -> None:
        if self.kind not in ("batch", "group"):
            raise DsnetError(f"unknown norm {shorten(self.kind)}; possible: batch, group")

    def make(
        self, channels: int, keys: int, factory: Factory, *, init_weight: float = 1.0
    ) -> SplitBatchNorm2d | SlicedGroupNorm:
        """The norm for so many channels; ``keys`` matter to batch norm only."""
        if self.kind == "batch":
            return SplitBatchNorm2d(channels, keys=keys, init_weight=init_weight, **factory)
        group = self.channels_per_group
        return SlicedGroupNorm(channels, channels_per_group=group, init_weight=init_weight, **factory)


# --- blocks -----------------------------------------------------------------------------------------
class ConvNormAct(Block):
    """Convolution, norm and (where there is one) activation.

    ``filters`` says which of a slice's sizes is the number of filters: its ``width``, its ``hidden``, or
    the ``input``'s own number of channels, as in a depthwise convolution. A kernel wider than 1 is sliced
    to the slice's; its padding holds where the convolution is strided, elsewhere the resolution is kept.
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
        """Runs at this size."""
        out, kernel, padding = self._conv_sizes(size)
        x = self.norm(self.conv(x, out, kernel=kernel, padding=padding), key, mode)
        return x if self.act is None else cast(Tensor, self.act(x))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Cost and output shape."""
        out, kernel, padding = self._conv_sizes(size)
        cost, after = self.conv.cost(shape, out, kernel=kernel, padding=padding)
        return cost + self.norm.cost(after.channels), after

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Sequential:
        """Stand-alone layers, the norm folded into the convolution where asked for."""
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
        """Scales weights just drawn for full width to what He's rule (fan-out) draws for this size."""
        out = self._conv_sizes(size)[0]
        if out is not None:
            self.conv.weight.mul_((self.conv.out_channels / out) ** 0.5)


class ChannelAttention(Block):
    """A gate that only scales channels."""

    def __init__(self, channels: int, factory: Factory) -> None:
        super().__init__()
        self.gate = Gate(channels, **factory)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Scales the channels that there are."""
        scaled, _ = self.gate(x, batch_invariant=mode is not None and mode.batch_invariant)
        return cast(Tensor, scaled)

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Cost; the shape stays."""
        return self.gate.cost(shape), shape

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Stand-alone attention."""
        return self.gate.extract(shape.channels)


class MaxPool(Block):
    """3 × 3 max-pool of stride 2."""

    stride = 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Halves the resolution."""
        return cast(Tensor, self.pool(x))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Free in both conventions."""
        height, width = (SF.conv_output_size(s, 3, 2, 1) for s in (shape.height, shape.width))
        return Cost(), Shape(shape.channels, height, width)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """The pool itself has no weights."""
        return nn.MaxPool2d(3, 2, 1)


class Head(Block):
    """The last link: features → logits, by way of one vector an image."""

    classifier: SlicedLinear

    @abstractmethod
    def pool(self, x: Tensor) -> Tensor:
        """What a stage says of an image: its features [B, …] → [B, C]."""


class PoolHead(Head):
    """Global average pool and classifier, which reads the channels that there are."""

    def __init__(self, channels: int, num_classes: int, factory: Factory) -> None:
        super().__init__()
        self.classifier = SlicedLinear(channels, num_classes, init_std=0.01, **factory)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Features [B, C, H, W] → logits [B, classes]."""
        return cast(Tensor, self.classifier(drop_features(self.pool(x), mode)))

    def pool(self, x: Tensor) -> Tensor:
        """Mean over all positions."""
        return x.mean((2, 3))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Cost and the shape of the logits."""
        classes = self.classifier.out_features
        linear = self.classifier.cost(shape.channels, classes)
        return linear + Cost(pools=shape.channels * shape.area), Shape(classes, 1, 1)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Stand-alone pool and classifier."""
        classifier = self.classifier.extract(shape.channels, self.classifier.out_features)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier)
