"""DS-ResNet and DS-ResNet++: ResNet-50, sliced in width by four gates, or in width and depth by one.

The tables are those of the paper (Table 5, "Routing space of DS-ResNet and DS-ResNet++"). The first stage of
DS-ResNet++ has nine widths, one for each of its nine routes.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from dsnet.models.blocks import Block, Step
from dsnet.models.conv_blocks import ChannelAttention, ConvNormAct, ConvSpec, MaxPool, Residual
from dsnet.models.counting import segment_costs
from dsnet.models.heads import PoolHead
from dsnet.models.input_spec import InputSpec
from dsnet.models.layout import SliceTable, norm_keys
from dsnet.models.options import ConvOptions
from dsnet.models.registry import register_supernet
from dsnet.models.supernet import Supernet
from dsnet.routes import Route, RouteSpace, Slice, small_medium_large
from dsnet.slicing import Factory

__all__ = ["Bottleneck", "ResNet", "ResNetTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetTable:
    """The architecture of a DS-ResNet."""

    input_spec: InputSpec
    num_classes: int
    stem_width: int
    stem_stride: int
    max_pool: bool
    strides: tuple[int, ...]  # of the stages
    slices: SliceTable  # [gate][choice] → sizes; a single gate decides all stages, several one stage each
    channels_per_group: int
    gate_weights: tuple[tuple[str, tuple[float, float, float]], ...] = ()  # of Stage II by space

    @property
    def full(self) -> tuple[Slice, ...]:
        """The stages at full size."""
        return tuple(itertools.chain.from_iterable(choices[-1] for choices in self.slices))


class Bottleneck(Residual):
    """Convolutions 1 × 1, 3 × 3 (strided), attention, 1 × 1, and a shortcut. The last norm starts at zero."""

    def __init__(
        self,
        width_in: int,
        size: Slice,
        spec: ConvSpec,
        *,
        stride: int,
        project: bool,
        share: float,  # of the stochastic depth rate
        keys: int,
    ) -> None:
        super().__init__(share=share)
        self.stride = stride
        width, hidden = size.width, cast(int, size.hidden)
        layer = functools.partial(ConvNormAct, spec=spec, keys=keys)
        self.reduce = layer(width_in, hidden, filters="hidden")
        self.spatial = layer(hidden, hidden, kernel=3, stride=stride, filters="hidden")
        self.attention = ChannelAttention(hidden, spec.factory)
        self.expand = layer(hidden, width, act=False, init_weight=0.0)
        self.shortcut = layer(width_in, width, stride=stride, act=False) if project else None
        self.act = spec.make_activation()

    def branch_steps(self, size: Slice, key: int) -> list[Step]:
        """Return the steps of the convolutions and the attention."""
        blocks = (self.reduce, self.spatial, self.attention, self.expand)
        return [Step(block, size, key) for block in blocks]


class ResNet(Supernet):
    """A DS-ResNet built from its table.

    Args:
        name: Name of the network and its route space.
        table: The architecture.
        options: Options of the model.
        factory: Device and precision of the parameters.
        order: Combinations of choices, cheapest first (default: computed from the costs).
    """

    def __init__(
        self,
        name: str,
        table: ResNetTable,
        options: ConvOptions,
        factory: Factory,
        *,
        order: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        full, gates = table.full, len(table.slices)
        if gates == 1:
            space = RouteSpace.of_table(name, table.slices[0], small_medium_large(len(table.slices[0])))
        else:
            space = _product_space(name, table, _order(name, table) if order is None else order)
        widths_in = (table.stem_width, *(size.width for size in full[:-1]))
        super().__init__(
            space,
            slices=table.slices,
            gate_widths=widths_in[:gates],
            input_spec=table.input_spec,
            options=options,
            factory=factory,
            bn_key=options.bn_key,
        )
        self.table, self.gate_weights = table, dict(table.gate_weights)
        self.head = PoolHead(full[-1].width, options.num_classes or table.num_classes, factory)
        spec = options.conv_spec(factory, channels_per_group=table.channels_per_group)
        self.stem = ConvNormAct(
            options.in_channels, table.stem_width, spec, kernel=3, stride=table.stem_stride
        )
        self.max_pool = MaxPool() if table.max_pool else None
        keys = norm_keys([len(choices) for choices in table.slices], options.bn_key)
        before = list(itertools.accumulate((size.depth for size in full), initial=0))
        self.stages = nn.ModuleList(
            nn.ModuleList(
                Bottleneck(
                    width_in if layer == 0 else size.width,
                    size,
                    spec,
                    stride=stride if layer == 0 else 1,
                    project=layer == 0,
                    share=(before[stage] + layer) / max(before[-1] - 1, 1),
                    keys=keys[stage if gates > 1 else 0],
                )
                for layer in range(size.depth)
            )
            for stage, (width_in, size, stride) in enumerate(zip(widths_in, full, table.strides, strict=True))
        )
        self.seal()

    def prefix_steps(self) -> list[Step]:
        """Return stem and max-pool."""
        size = Slice(width=self.table.stem_width, kernel=3, padding=1)
        steps = [Step(self.stem, size)]
        if self.max_pool is not None:
            steps.append(Step(self.max_pool, size))
        return steps

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """Return the blocks that run of the stages that the last choice decides."""
        key, sizes = self.key(choices), self.slices(choices)
        first = 0 if len(self.gates) == 1 else len(choices) - 1
        return [
            Step(cast(Block, block), size, key)
            for stage, size in enumerate(sizes, start=first)
            for block in itertools.islice(cast(nn.ModuleList, self.stages[stage]), size.depth)
        ]


def _product_space(name: str, table: ResNetTable, order: tuple[tuple[int, ...], ...]) -> RouteSpace:
    """Build the space of all combinations of choices in this order; named spaces have all of them."""
    routes = tuple(
        Route(
            space=name,
            number=number,
            choices=choices,
            stages=tuple(table.slices[gate][choice][0] for gate, choice in enumerate(choices)),
        )
        for number, choices in enumerate(order)
    )
    numbers = tuple(range(len(routes)))
    narrowings = tuple((space, numbers) for space, _ in table.gate_weights)
    return RouteSpace(name=name, routes=routes, narrowings=narrowings)


@functools.cache
def _order(name: str, table: ResNetTable) -> tuple[tuple[int, ...], ...]:
    """Sort the combinations by cost at the default image size, classes and options."""
    combinations = tuple(itertools.product(*(range(len(choices)) for choices in table.slices)))
    model = ResNet(name, table, ConvOptions(), {"device": torch.device("meta")}, order=combinations)
    madds = {c: cost.madds() for c, cost in segment_costs(model, table.input_spec.shape()).items()}
    return tuple(sorted(combinations, key=lambda c: (sum(madds[c[:n]] for n in range(len(c) + 1)), c)))


# --- the families -------------------------------------------------------------------------------------
def _size(width: int, depth: int) -> Slice:
    return Slice(width=width, depth=depth, hidden=width // 4, kernel=3, padding=1)


def _by_ratio(widths: tuple[int, ...], layers: tuple[int, ...]) -> SliceTable:
    """Build the slices of one gate a stage with four equispaced ratios each."""
    return tuple(
        tuple((_size(width * quarter // 4, depth),) for quarter in (1, 2, 3, 4))
        for width, depth in zip(widths, layers, strict=True)
    )


def _compound(
    widths: tuple[int, ...], multiples: tuple[int, ...], layers: tuple[tuple[int, ...], ...]
) -> SliceTable:
    """Build the slices of one gate for width and depth of all stages."""
    return (
        tuple(
            tuple(_size(width * m, depth) for m, depth in zip(multiples, depths, strict=True))
            for width, depths in zip(widths, layers, strict=True)
        ),
    )


# S, M and L of DS-ResNet have all routes. They differ in the weights of the losses CLS, CP and SGS of their
# gates (the paper's ablation of losses for gate training).
_BY_LOSSES = (("S", (0.0, 0.5, 1.0)), ("M", (1.0, 0.5, 1.0)), ("L", (0.0, 0.0, 1.0)))

DS_RESNET = ResNetTable(
    input_spec=InputSpec(image_size=224, stride=32),
    num_classes=1000,
    stem_width=64,
    stem_stride=2,
    max_pool=True,
    strides=(1, 2, 2, 2),
    slices=_by_ratio((256, 512, 1024, 2048), (3, 4, 6, 3)),
    channels_per_group=16,
    gate_weights=_BY_LOSSES,
)

DS_RESNET_PLUS = replace(
    DS_RESNET,
    slices=_compound(
        tuple(range(128, 257, 16)),
        (1, 2, 4, 8),
        (
            (2, 2, 5, 2),
            (2, 2, 5, 2),
            (2, 3, 6, 2),
            (2, 3, 6, 2),
            (3, 3, 6, 2),
            (3, 3, 7, 2),
            (3, 4, 7, 3),
            (3, 4, 8, 3),
            (3, 4, 8, 3),
        ),
    ),
    channels_per_group=4,
    gate_weights=(),
)

_CIFAR = InputSpec(image_size=32, stride=8)
DS_RESNET_CIFAR = replace(DS_RESNET, input_spec=_CIFAR, num_classes=10, stem_stride=1, max_pool=False)
DS_RESNET_PLUS_CIFAR = replace(
    DS_RESNET_PLUS, input_spec=_CIFAR, num_classes=10, stem_stride=1, max_pool=False
)

DS_RESNET_TINY = ResNetTable(
    input_spec=InputSpec(image_size=16, stride=2),
    num_classes=10,
    stem_width=16,
    stem_stride=1,
    max_pool=False,
    strides=(1, 2),
    slices=_by_ratio((64, 128), (2, 2)),
    channels_per_group=2,
    gate_weights=_BY_LOSSES,
)

DS_RESNET_PLUS_TINY = replace(
    DS_RESNET_TINY,
    slices=_compound((32, 40, 48, 64), (1, 2), ((1, 1), (1, 2), (2, 2), (2, 2))),
    gate_weights=(),
)


@register_supernet("DS-ResNet: ResNet-50, 4 gates × 4 widths = 256 routes (paper, Table 5)", ConvOptions)
def ds_resnet(options: ConvOptions, factory: Factory) -> ResNet:
    """DS-ResNet at 224 × 224."""
    return ResNet("ds_resnet", DS_RESNET, options, factory)


@register_supernet("DS-ResNet for 32 × 32 images", ConvOptions)
def ds_resnet_cifar(options: ConvOptions, factory: Factory) -> ResNet:
    """DS-ResNet at 32 × 32."""
    return ResNet("ds_resnet_cifar", DS_RESNET_CIFAR, options, factory)


@register_supernet("DS-ResNet for 16 × 16 images: 2 gates × 4 widths", ConvOptions)
def ds_resnet_tiny(options: ConvOptions, factory: Factory) -> ResNet:
    """A small DS-ResNet at 16 × 16."""
    return ResNet("ds_resnet_tiny", DS_RESNET_TINY, options, factory)


@register_supernet("DS-ResNet++: 9 routes in width and depth, one gate (paper, Table 5)", ConvOptions)
def ds_resnet_plus(options: ConvOptions, factory: Factory) -> ResNet:
    """DS-ResNet++ at 224 × 224."""
    return ResNet("ds_resnet_plus", DS_RESNET_PLUS, options, factory)


@register_supernet("DS-ResNet++ for 32 × 32 images", ConvOptions)
def ds_resnet_plus_cifar(options: ConvOptions, factory: Factory) -> ResNet:
    """DS-ResNet++ at 32 × 32."""
    return ResNet("ds_resnet_plus_cifar", DS_RESNET_PLUS_CIFAR, options, factory)


@register_supernet("DS-ResNet++ for 16 × 16 images", ConvOptions)
def ds_resnet_plus_tiny(options: ConvOptions, factory: Factory) -> ResNet:
    """A small DS-ResNet++ at 16 × 16."""
    return ResNet("ds_resnet_plus_tiny", DS_RESNET_PLUS_TINY, options, factory)
