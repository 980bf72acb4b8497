"""The paper's case study of dynamic depth (Guideline I): MobileNetV1 whose third stage runs 1 or 6 layers.

With ``join="residual"`` the other five layers are a residual branch on the output of the first. With
``"naive"`` they simply follow it, so that the two routes share weights without an additive relation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.errors import DsnetError, shorten
from dsnet.models.blocks import Block, Step, count_steps, run_steps
from dsnet.models.conv_blocks import ConvNormAct, SeparableBlock
from dsnet.models.heads import PoolHead
from dsnet.models.input_spec import InputSpec
from dsnet.models.mobilenet import StageRow
from dsnet.models.options import ConvOptions
from dsnet.models.registry import register_supernet
from dsnet.models.supernet import Supernet
from dsnet.routes import RouteSpace, Slice
from dsnet.slicing import Factory, Mode
from dsnet.slicing.static import traced

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


class ResidualBlocks(Block):
    """A sequence of blocks with a shortcut around it."""

    def __init__(self, blocks: Sequence[SeparableBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def _steps(self, size: Slice, key: int) -> list[Step]:
        return [step for block in self.blocks for step in cast(SeparableBlock, block).steps(size, key)]

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Run at this size."""
        return x + run_steps(self._steps(size, key), x, mode)

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost; the shape does not change."""
        return count_steps(self._steps(size, 0), shape)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract the blocks with their shortcut."""
        parts = [step.block.extract(shape, size, key, fold_bn=fold_bn) for step in self._steps(size, key)]
        return traced(_Shortcut(nn.Sequential(*parts)))


class _Shortcut(nn.Module):
    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.chain(x))


class DepthNet(Supernet):
    """A MobileNetV1 with one stage of two depths."""

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

        def stage(width: int, row: StageRow, keys: int) -> list[SeparableBlock]:
            return [
                SeparableBlock(
                    width if layer == 0 else row.width,
                    row.width,
                    spec,
                    stride=row.stride if layer == 0 else 1,
                    keys=(keys, keys),
                )
                for layer in range(row.layers)
            ]

        self.stem = ConvNormAct(
            options.in_channels, table.stem.width, spec, kernel=3, stride=table.stem.stride
        )
        self.early = nn.ModuleList()
        width = table.stem.width
        for row in table.early:
            self.early.extend(stage(width, row, 1))
            width = row.width
        first, *others = stage(width, table.deep, 2)
        self.first = first
        self.others: nn.ModuleList | ResidualBlocks = (
            ResidualBlocks(others) if options.join == "residual" else nn.ModuleList(others)
        )
        self.late = nn.ModuleList(stage(table.deep.width, table.late, 2))
        self.seal()

    def prefix_steps(self) -> list[Step]:
        """Return stem and early stages."""
        size = Slice(width=self.table.stem.width, kernel=3, padding=1)
        steps = [Step(self.stem, size)]
        rows = (row for row in self.table.early for _ in range(row.layers))
        for block, row in zip(self.early, rows, strict=True):
            steps += cast(SeparableBlock, block).steps(replace(size, width=row.width), 0)
        return steps

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """Return the stage of two depths and the last stage."""
        deep, late = self.slices(choices)
        key = self.key(choices)
        steps = self.first.steps(deep, key)
        if deep.depth > 1:
            if isinstance(self.others, ResidualBlocks):
                steps.append(Step(self.others, deep, key))
            else:
                for block in self.others:
                    steps += cast(SeparableBlock, block).steps(deep, key)
        for block in self.late:
            steps += cast(SeparableBlock, block).steps(late, key)
        return steps


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
