"""DS-MBNet and DS-MBNet++: MobileNetV1 with sliced widths (kernels, paddings) after its fifth block.

The tables are those of the paper (Table 4, "Routing space of DS-MBNet and DS-MBNet++"). The padding p applies
to the strided depthwise convolution of each dynamic stage, since otherwise the cheapest routes cannot run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, cast

from torch import nn

from dsnet.models.blocks import Step
from dsnet.models.conv_blocks import (
    ConvNormAct,
    ConvSpec,
    SeparableBlock,
    StageRow,
    separable_blocks,
    separable_steps,
)
from dsnet.models.heads import PoolHead
from dsnet.models.input_spec import InputSpec
from dsnet.models.options import ConvOptions
from dsnet.models.registry import register_supernet
from dsnet.models.supernet import Supernet
from dsnet.routes import RouteSpace, Slice, small_medium_large
from dsnet.slicing import Factory

__all__ = ["MBNET", "MBNet", "MBNetTable", "make_routes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MBNetTable:
    """The architecture of a DS-MBNet."""

    input_spec: InputSpec
    num_classes: int
    stem: StageRow
    early: tuple[StageRow, ...]
    early_kernel: int
    dynamic: tuple[StageRow, ...]  # at full width
    routes: tuple[tuple[Slice, ...], ...]  # cheapest first, one slice per dynamic stage
    gate: Literal["inside", "entrance"]  # inside: after the depthwise half of the first dynamic block
    channels_per_group: int = 16
    attention: bool = True  # after each depthwise half
    activation: str = "silu"  # default of the option


class MBNet(Supernet):
    """A DS-MBNet built from its table.

    Args:
        name: Name of the network and its route space.
        table: The architecture.
        options: Options of the model.
        factory: Device and precision of the parameters.
    """

    def __init__(self, name: str, table: MBNetTable, options: ConvOptions, factory: Factory) -> None:
        super().__init__(
            RouteSpace.of_table(name, table.routes, small_medium_large(len(table.routes))),
            slices=(table.routes,),
            gate_widths=[table.early[-1].width],
            input_spec=table.input_spec,
            options=options,
            factory=factory,
            bn_key=options.bn_key,
        )
        self.table = table
        self.head = PoolHead(table.dynamic[-1].width, options.num_classes or table.num_classes, factory)
        spec = options.conv_spec(
            factory, activation=table.activation, channels_per_group=table.channels_per_group
        )
        self.stem = ConvNormAct(
            options.in_channels, table.stem.width, spec, kernel=3, stride=table.stem.stride
        )
        self.build_blocks(spec, options)
        self.seal()

    def build_blocks(self, spec: ConvSpec, options: ConvOptions) -> None:
        """Build all blocks after the stem."""
        table = self.table
        early = separable_blocks(
            table.stem.width, table.early, spec, kernel=table.early_kernel, attention=table.attention
        )
        dynamic = separable_blocks(
            table.early[-1].width,
            table.dynamic,
            spec,
            kernel=max(sizes[0].kernel or 3 for sizes in table.routes),
            keys=len(table.routes),
            attention=table.attention,
            gate_inside=table.gate == "inside",
        )
        self.blocks = nn.ModuleList([*early, *dynamic])
        self.first_dynamic = len(early)

    def early_blocks(self) -> Iterable[nn.Module]:
        """Return the blocks before the dynamic stages."""
        return self.blocks[: self.first_dynamic]

    def prefix_steps(self) -> list[Step]:
        """Return stem and early blocks, and with a gate inside a block also its depthwise convolution."""
        table, kernel = self.table, self.table.early_kernel
        sizes = [
            Slice(width=row.width, depth=row.layers, kernel=kernel, padding=kernel // 2)
            for row in table.early
        ]
        steps = [Step(self.stem, Slice(width=table.stem.width, kernel=3, padding=1))]
        steps += separable_steps(self.early_blocks(), sizes)
        if table.gate == "inside":
            gated = cast(SeparableBlock, self.blocks[self.first_dynamic])
            steps.append(Step(gated.depthwise, Slice(width=table.early[-1].width, kernel=3, padding=1)))
        return steps

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """Return the dynamic blocks at the sizes of the route."""
        blocks, sizes = self.blocks[self.first_dynamic :], self.slices(choices)
        steps = separable_steps(blocks, sizes, self.key(choices))
        return steps[1:] if self.table.gate == "inside" else steps


# --- the families -------------------------------------------------------------------------------------
def make_routes(
    stages: tuple[tuple[int, ...], ...], layers: tuple[int, ...], kernels: tuple[tuple[int, int], ...]
) -> tuple[tuple[Slice, ...], ...]:
    """Build the routes from the widths and layers of each stage, and (kernel, padding) of each route."""
    return tuple(
        tuple(
            Slice(width=width, depth=depth, kernel=kernel, padding=padding)
            for width, depth in zip(widths, layers, strict=True)
        )
        for widths, (kernel, padding) in zip(zip(*stages, strict=True), kernels, strict=True)
    )


DS_MBNET = MBNetTable(
    input_spec=InputSpec(image_size=224, stride=32),
    num_classes=1000,
    stem=StageRow(16, 1, 2),
    early=(StageRow(32, 1, 1), StageRow(48, 2, 2), StageRow(96, 2, 2)),
    early_kernel=3,
    dynamic=(StageRow(640, 6, 2), StageRow(1152, 2, 2)),
    routes=make_routes(
        (tuple(range(224, 641, 32)), tuple(range(736, 1153, 32))), (6, 2), kernels=((3, 1),) * 14
    ),
    gate="inside",
)

DS_MBNET_PLUS = MBNetTable(
    input_spec=InputSpec(image_size=224, stride=32, smallest=64),
    num_classes=1000,
    stem=StageRow(16, 1, 2),
    early=(StageRow(32, 1, 1), StageRow(48, 2, 2), StageRow(96, 2, 2)),
    early_kernel=5,
    dynamic=(StageRow(640, 6, 2), StageRow(1152, 2, 2)),
    routes=make_routes(
        (tuple(range(288, 641, 32)), tuple(range(800, 1153, 32))),
        (6, 2),
        kernels=((3, 0),) * 2 + ((3, 1),) * 2 + ((5, 2),) * 4 + ((7, 3),) * 4,
    ),
    gate="entrance",
)

DS_MBNET_CIFAR = replace(
    DS_MBNET,
    input_spec=InputSpec(image_size=32, stride=8),
    num_classes=10,
    stem=StageRow(16, 1, 1),
    early=(StageRow(32, 1, 1), StageRow(48, 2, 1), StageRow(96, 2, 2)),
)

DS_MBNET_PLUS_CIFAR = replace(
    DS_MBNET_PLUS,
    input_spec=InputSpec(image_size=32, stride=8, smallest=16),
    num_classes=10,
    stem=StageRow(16, 1, 1),
    early=(StageRow(32, 1, 1), StageRow(48, 2, 1), StageRow(96, 2, 2)),
)

MBNET = MBNetTable(
    input_spec=InputSpec(image_size=224, stride=32),
    num_classes=1000,
    stem=StageRow(32, 1, 2),
    early=(StageRow(64, 1, 1), StageRow(128, 2, 2), StageRow(256, 2, 2)),
    early_kernel=3,
    dynamic=(StageRow(512, 6, 2), StageRow(1024, 2, 2)),
    routes=make_routes(((512,), (1024,)), (6, 2), kernels=((3, 1),)),
    gate="entrance",
    attention=False,
    activation="relu",
)

DS_MBNET_TINY = MBNetTable(
    input_spec=InputSpec(image_size=16, stride=8),
    num_classes=10,
    stem=StageRow(4, 1, 1),
    early=(StageRow(8, 1, 2), StageRow(12, 1, 1)),
    early_kernel=3,
    dynamic=(StageRow(96, 2, 2), StageRow(192, 1, 2)),
    routes=make_routes(((8, 24, 48, 96), (16, 48, 96, 192)), (2, 1), kernels=((3, 1),) * 4),
    gate="inside",
    channels_per_group=4,
)

DS_MBNET_PLUS_TINY = replace(
    DS_MBNET_TINY,
    input_spec=InputSpec(image_size=16, stride=8, smallest=16),
    early_kernel=5,
    routes=make_routes(
        ((8, 24, 48, 96), (16, 48, 96, 192)), (2, 1), kernels=((3, 0), (3, 1), (5, 2), (7, 3))
    ),
    gate="entrance",
)


DS_MBNET_SMALL = MBNetTable(
    input_spec=InputSpec(image_size=64, stride=16),
    num_classes=10,
    stem=StageRow(16, 1, 2),
    early=(StageRow(32, 1, 1), StageRow(64, 1, 2)),
    early_kernel=3,
    dynamic=(StageRow(128, 2, 2), StageRow(256, 2, 2)),
    routes=make_routes(((32, 64, 96, 128), (64, 128, 192, 256)), (2, 2), kernels=((3, 1),) * 4),
    gate="inside",
    channels_per_group=8,
)


@register_supernet("DS-MBNet: MobileNetV1, 14 widths, one gate (paper, Table 4)", ConvOptions)
def ds_mbnet(options: ConvOptions, factory: Factory) -> MBNet:
    """DS-MBNet at 224 × 224."""
    return MBNet("ds_mbnet", DS_MBNET, options, factory)


@register_supernet("MobileNetV1 as a network of one route, a backbone to compare with", ConvOptions)
def mbnet(options: ConvOptions, factory: Factory) -> MBNet:
    """MobileNetV1 at 224 × 224."""
    return MBNet("mbnet", MBNET, options, factory)


@register_supernet("DS-MBNet for 32 × 32 images", ConvOptions)
def ds_mbnet_cifar(options: ConvOptions, factory: Factory) -> MBNet:
    """DS-MBNet at 32 × 32."""
    return MBNet("ds_mbnet_cifar", DS_MBNET_CIFAR, options, factory)


@register_supernet("DS-MBNet for 16 × 16 images, trains on a CPU in seconds", ConvOptions)
def ds_mbnet_tiny(options: ConvOptions, factory: Factory) -> MBNet:
    """A small DS-MBNet at 16 × 16."""
    return MBNet("ds_mbnet_tiny", DS_MBNET_TINY, options, factory)


@register_supernet("DS-MBNet for photos of 64 × 64 pixels, trains on a CPU in a minute", ConvOptions)
def ds_mbnet_small(options: ConvOptions, factory: Factory) -> MBNet:
    """A small DS-MBNet at 64 × 64."""
    return MBNet("ds_mbnet_small", DS_MBNET_SMALL, options, factory)


@register_supernet(
    "DS-MBNet++: 12 routes in width, kernel and padding, one gate (paper, Table 4)", ConvOptions
)
def ds_mbnet_plus(options: ConvOptions, factory: Factory) -> MBNet:
    """DS-MBNet++ at 224 × 224."""
    return MBNet("ds_mbnet_plus", DS_MBNET_PLUS, options, factory)


@register_supernet("DS-MBNet++ for 32 × 32 images", ConvOptions)
def ds_mbnet_plus_cifar(options: ConvOptions, factory: Factory) -> MBNet:
    """DS-MBNet++ at 32 × 32."""
    return MBNet("ds_mbnet_plus_cifar", DS_MBNET_PLUS_CIFAR, options, factory)


@register_supernet("DS-MBNet++ for 16 × 16 images, trains on a CPU in seconds", ConvOptions)
def ds_mbnet_plus_tiny(options: ConvOptions, factory: Factory) -> MBNet:
    """A small DS-MBNet++ at 16 × 16."""
    return MBNet("ds_mbnet_plus_tiny", DS_MBNET_PLUS_TINY, options, factory)
