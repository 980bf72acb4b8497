"""Blocks of convolutional networks."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.gate import Gate
from dsnet.models.blocks import Block, Step, count_steps, drop_branch, extract_steps, run_steps
from dsnet.routes import Slice
from dsnet.slicing import Factory, Mode, SlicedConv2d, SlicedGroupNorm, SplitBatchNorm2d
from dsnet.slicing import functional as SF
from dsnet.slicing.static import fuse, traced

__all__ = [
    "ACTIVATIONS",
    "ChannelAttention",
    "ConvNormAct",
    "ConvSpec",
    "MaxPool",
    "Residual",
    "SeparableBlock",
    "StageRow",
    "separable_blocks",
    "separable_steps",
]

ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU, "hard_swish": nn.Hardswish}


@dataclass(frozen=True, kw_only=True)
class ConvSpec:
    """What all convolutional layers of a network have in common.

    Attributes:
        norm: ``batch`` for split batch norm, ``group`` for group norm.
        channels_per_group: Width of the groups of a group norm.
        activation: ``silu``, ``relu`` or ``hard_swish``.
        factory: Device and precision of the parameters.

    Examples:
        >>> ConvSpec(norm="group", channels_per_group=4, activation="relu").make_activation()
        ReLU(inplace=True)
    """

    norm: Literal["batch", "group"] = "batch"
    channels_per_group: int = 16
    activation: str = "silu"
    factory: Factory = field(default_factory=Factory)

    def make_norm(self, channels: int, keys: int, init_weight: float) -> SplitBatchNorm2d | SlicedGroupNorm:
        """Make a norm; only batch norm has ``keys``."""
        if self.norm == "batch":
            return SplitBatchNorm2d(channels, keys=keys, init_weight=init_weight, **self.factory)
        group = self.channels_per_group
        return SlicedGroupNorm(channels, channels_per_group=group, init_weight=init_weight, **self.factory)

    def make_activation(self) -> nn.Module:
        """Make an activation, in place: it follows a norm or a sum, whose output has no other use."""
        return ACTIVATIONS[self.activation](inplace=True)


class ConvNormAct(Block):
    """Convolution, norm and an optional activation.

    A kernel larger than 1 is sliced to that of the slice. The padding of the slice applies to a strided
    convolution; others keep the resolution.

    Args:
        channels_in: Input channels at full width.
        channels_out: Filters at full width.
        spec: Norm, activation, device and precision.
        kernel: Side of the kernel at full size.
        stride: Stride.
        groups: Number of groups, ``channels_in`` for a depthwise convolution.
        keys: Number of norm keys.
        act: Whether the activation follows.
        filters: What the number of filters is on a route: the ``width`` of the slice, its ``hidden`` size, or
            the number of ``input`` channels, as in a depthwise convolution.
        init_weight: Initial value of γ.

    Examples:
        >>> block = ConvNormAct(16, 32, ConvSpec(), kernel=5, stride=2)
        >>> block(torch.zeros(1, 8, 9, 9), Slice(width=24, kernel=3, padding=1)).shape
        torch.Size([1, 24, 5, 5])
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        spec: ConvSpec,
        *,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        keys: int = 1,
        act: bool = True,
        filters: Literal["width", "hidden", "input"] = "width",
        init_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.conv = SlicedConv2d(
            channels_in, channels_out, kernel=kernel, stride=stride, groups=groups, **spec.factory
        )
        self.norm = spec.make_norm(channels_out, keys, init_weight)
        self.act = spec.make_activation() if act else None
        self.filters, self.stride = filters, stride

    def _conv_sizes(self, size: Slice) -> tuple[int | None, int | None, int | None]:
        out = None if self.filters == "input" else cast(int, getattr(size, self.filters))
        if self.conv.kernel == 1:
            return out, None, None
        return out, size.kernel, size.padding if self.stride > 1 else None

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
        """Extract the layers."""
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
        """Scale weights drawn for the full width to the standard deviation of He's rule for a size."""
        out = self._conv_sizes(size)[0]
        if out is not None:
            self.conv.weight.mul_((self.conv.out_channels / out) ** 0.5)


class ChannelAttention(Block):
    """Channel attention: a gate without a routing head.

    Args:
        channels: Channels of the input at full width.
        factory: Device and precision of the parameters.
    """

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

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Halve the resolution."""
        return nn.functional.max_pool2d(x, 3, 2, 1)

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Return a cost of zero and the output shape."""
        return Cost(), SF.conv_output_shape(shape, shape.channels, 3, 2, 1)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Return the pool."""
        return nn.MaxPool2d(3, 2, 1)


class SeparableBlock(nn.Module):
    """The block of MobileNetV1: depthwise convolution, attention and pointwise convolution, as three blocks.

    Args:
        width_in: Input channels at full width.
        width: Output channels at full width.
        spec: Norm, activation, device and precision.
        kernel: Side of the depthwise kernel at full size.
        stride: Stride of the depthwise convolution.
        keys: Number of norm keys of the depthwise and of the pointwise convolution.
        attention: Whether channel attention follows the depthwise convolution.

    Examples:
        >>> block = SeparableBlock(16, 32, ConvSpec(), attention=True)
        >>> [type(step.block).__name__ for step in block.steps(Slice(width=24, kernel=3))]
        ['ConvNormAct', 'ChannelAttention', 'ConvNormAct']
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        spec: ConvSpec,
        *,
        kernel: int = 3,
        stride: int = 1,
        keys: tuple[int, int] = (1, 1),
        attention: bool = False,
    ) -> None:
        super().__init__()
        self.depthwise = ConvNormAct(
            width_in,
            width_in,
            spec,
            kernel=kernel,
            stride=stride,
            groups=width_in,
            keys=keys[0],
            filters="input",
        )
        self.attention = ChannelAttention(width_in, spec.factory) if attention else None
        self.pointwise = ConvNormAct(width_in, width, spec, keys=keys[1])

    def steps(self, size: Slice, key: int = 0) -> list[Step]:
        """Return the steps of the block: depthwise convolution, attention, pointwise convolution."""
        blocks = (self.depthwise, self.attention, self.pointwise)
        return [Step(block, size, key) for block in blocks if block is not None]


class StageRow(NamedTuple):
    """A stage of separable blocks: ``layers`` blocks of this width, the first of them strided."""

    width: int
    layers: int
    stride: int


def separable_blocks(
    width_in: int,
    rows: Iterable[StageRow],
    spec: ConvSpec,
    *,
    kernel: int = 3,
    keys: int = 1,
    attention: bool = False,
    gate_inside: bool = False,
) -> list[SeparableBlock]:
    """Build the blocks of stages that follow each other.

    Args:
        width_in: Channels before the first stage.
        rows: The stages.
        spec: Norm, activation, device and precision.
        kernel: Side of the depthwise kernels at full size.
        keys: Number of norm keys.
        attention: Whether channel attention follows each depthwise convolution.
        gate_inside: Whether a gate follows the first depthwise convolution. The gate then is the attention of
            that block, and the convolution before it has one norm key.
    """
    blocks: list[SeparableBlock] = []
    for row in rows:
        for layer in range(row.layers):
            gated = gate_inside and not blocks
            block = SeparableBlock(
                width_in,
                row.width,
                spec,
                kernel=kernel,
                stride=row.stride if layer == 0 else 1,
                keys=(1 if gated else keys, keys),
                attention=attention and not gated,
            )
            blocks.append(block)
            width_in = row.width
    return blocks


def separable_steps(blocks: Iterable[nn.Module], sizes: Iterable[Slice], key: int = 0) -> list[Step]:
    """Return the steps of the blocks of stages; a stage has as many blocks as its size is deep."""
    by_block = (size for size in sizes for _ in range(size.depth))
    pairs = zip(blocks, by_block, strict=True)
    return [step for block, size in pairs for step in cast(SeparableBlock, block).steps(size, key)]


class Residual(Block):
    """Base class of blocks with a branch of further blocks and a shortcut around it.

    Attributes:
        shortcut: Block on the shortcut (None: the input itself).
        act: Activation of the sum.
        share: Factor of the stochastic depth rate, see `drop_branch`.
    """

    shortcut: Block | None
    act: nn.Module | None

    def __init__(self, *, share: float = 0.0) -> None:
        super().__init__()
        self.share = share

    @abstractmethod
    def branch_steps(self, size: Slice, key: int) -> list[Step]:
        """Return the steps of the branch."""

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Run branch and shortcut at this size, and add them."""
        y = drop_branch(run_steps(self.branch_steps(size, key), x, mode), mode, self.share)
        y = y + (x if self.shortcut is None else self.shortcut(x, size, key, mode))
        return y if self.act is None else cast(Tensor, self.act(y))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost of branch and shortcut, and the output shape."""
        cost, after = count_steps(self.branch_steps(size, 0), shape)
        return cost if self.shortcut is None else cost + self.shortcut.cost(shape, size)[0], after

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract the block as a graph."""
        branch, _ = extract_steps(self.branch_steps(size, key), shape, fold_bn=fold_bn)
        block, shortcut = self.shortcut, nn.Identity()
        return traced(
            _Residual(
                nn.Sequential(*branch.values()),
                shortcut if block is None else block.extract(shape, size, key, fold_bn=fold_bn),
                copy.deepcopy(self.act),
            )
        )


class _Residual(nn.Module):
    def __init__(self, branch: nn.Module, shortcut: nn.Module, act: nn.Module | None) -> None:
        super().__init__()
        self.branch, self.shortcut, self.act = branch, shortcut, act

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x) + self.shortcut(x)
        return cast(Tensor, y if self.act is None else self.act(y))
