"""The paper's case study of dynamic depth (Guideline I): MobileNetV1 whose third stage runs 1 or 6 layers.

With ``join="residual"`` the other five layers are a residual branch on the output of the first. With
``"naive"`` they simply follow it, so that the two routes share weights without an additive relation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from torch import nn

from dsnet.errors import DsnetError, shorten
from dsnet.models.blocks import Step
from dsnet.models.conv_blocks import (
    ConvNormAct,
    Residual,
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
from dsnet.routes import RouteSpace, Slice
from dsnet.slicing import Factory

__all__ = ["DepthNet", "DepthOptions", "DepthTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthOptions(ConvOptions):
    """Options of the case study: how the further layers of the third stage are joined to the first."""

    join: Literal["residual", "naive"] = "residual"

    def __post_init__(self) -> None:
        ConvOptions.__post_init__(self)
        if self.join not in ("residual", "naive"):
            raise DsnetError(f"join={shorten(self.join)} is not possible; choose from residual, naive")


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthTable:
    """The architecture of a network of the case study."""

    input_spec: InputSpec
    num_classes: int
    stem: StageRow
    early: tuple[StageRow, ...]
    deep: StageRow  # the stage that runs its first layer only, or all
    late: StageRow


class ResidualBlocks(Residual):
    """A sequence of separable blocks with a shortcut around it."""

    def __init__(self, blocks: Sequence[SeparableBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.shortcut = self.act = None

    def branch_steps(self, size: Slice, key: int) -> list[Step]:
        """Return the steps of all blocks."""
        return [step for block in self.blocks for step in cast(SeparableBlock, block).steps(size, key)]


class DepthNet(Supernet):
    """A MobileNetV1 with one stage of two depths.

    Args:
        name: Name of the network and its route space.
        table: The architecture.
        options: Options of the model.
        factory: Device and precision of the parameters.
    """

    def __init__(self, name: str, table: DepthTable, options: DepthOptions, factory: Factory) -> None:
        routes = tuple(
            (
                Slice(width=table.deep.width, depth=depth, kernel=3, padding=1),
                Slice(width=table.late.width, depth=table.late.layers, kernel=3, padding=1),
            )
            for depth in (1, table.deep.layers)
        )
        super().__init__(
            RouteSpace.of_table(name, routes),
            slices=(routes,),
            gate_widths=[table.early[-1].width],
            input_spec=table.input_spec,
            options=options,
            factory=factory,
            bn_key=options.bn_key,
        )
        self.table = table
        self.head = PoolHead(table.late.width, options.num_classes or table.num_classes, factory)
        spec = options.conv_spec(factory)

        self.stem = ConvNormAct(
            options.in_channels, table.stem.width, spec, kernel=3, stride=table.stem.stride
        )
        self.early = nn.ModuleList(separable_blocks(table.stem.width, table.early, spec))
        self.first, *others = separable_blocks(table.early[-1].width, [table.deep], spec, keys=2)
        self.others: nn.ModuleList | ResidualBlocks = (
            ResidualBlocks(others) if options.join == "residual" else nn.ModuleList(others)
        )
        self.late = nn.ModuleList(separable_blocks(table.deep.width, [table.late], spec, keys=2))
        self.seal()

    def prefix_steps(self) -> list[Step]:
        """Return stem and early stages."""
        size = Slice(width=self.table.stem.width, kernel=3, padding=1)
        sizes = [replace(size, width=row.width, depth=row.layers) for row in self.table.early]
        return [Step(self.stem, size), *separable_steps(self.early, sizes)]

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """Return the stage of two depths and the last stage."""
        (deep, late), key = self.slices(choices), self.key(choices)
        if isinstance(self.others, ResidualBlocks) and deep.depth > 1:
            last = separable_steps(self.late, [late], key)
            return [*self.first.steps(deep, key), Step(self.others, deep, key), *last]
        others: Iterable[nn.Module] = () if deep.depth == 1 else cast(nn.ModuleList, self.others)
        return separable_steps([self.first, *others, *self.late], [deep, late], key)


MBNET_DEPTH = DepthTable(
    input_spec=InputSpec(image_size=224, stride=32),
    num_classes=1000,
    stem=StageRow(32, 1, 2),
    early=(StageRow(64, 1, 1), StageRow(128, 2, 2), StageRow(256, 2, 2)),
    deep=StageRow(512, 6, 2),
    late=StageRow(1024, 2, 2),
)

MBNET_DEPTH_CIFAR = replace(
    MBNET_DEPTH,
    input_spec=InputSpec(image_size=32, stride=8),
    num_classes=10,
    stem=StageRow(32, 1, 1),
    early=(StageRow(64, 1, 1), StageRow(128, 2, 1), StageRow(256, 2, 2)),
)


@register_supernet("MobileNetV1 whose third stage has 1 or 6 layers (paper, Guideline I)", DepthOptions)
def mbnet_depth(options: DepthOptions, factory: Factory) -> DepthNet:
    """The case study at 224 × 224."""
    return DepthNet("mbnet_depth", MBNET_DEPTH, options, factory)


@register_supernet("The same for 32 × 32 images", DepthOptions)
def mbnet_depth_cifar(options: DepthOptions, factory: Factory) -> DepthNet:
    """The case study at 32 × 32."""
    return DepthNet("mbnet_depth_cifar", MBNET_DEPTH_CIFAR, options, factory)
