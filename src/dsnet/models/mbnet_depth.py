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
    ConvSpec,
    Residual,
    SeparableBlock,
    StageRow,
    separable_blocks,
    separable_steps,
)
from dsnet.models.input_spec import InputSpec
from dsnet.models.mobilenet import MBNET, MBNet, make_routes
from dsnet.models.options import ConvOptions
from dsnet.models.registry import register_supernet
from dsnet.routes import Slice
from dsnet.slicing import Factory

__all__ = ["DepthNet", "DepthOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthOptions(ConvOptions):
    """Options of the case study: how the further layers of the third stage are joined to the first."""

    join: Literal["residual", "naive"] = "residual"

    def __post_init__(self) -> None:
        ConvOptions.__post_init__(self)
        if self.join not in ("residual", "naive"):
            raise DsnetError(f"join={shorten(self.join)} is not possible; choose from residual, naive")


class ResidualBlocks(Residual):
    """A sequence of separable blocks with a shortcut around it."""

    def __init__(self, blocks: Sequence[SeparableBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.shortcut = self.act = None

    def branch_steps(self, size: Slice, key: int) -> list[Step]:
        """Return the steps of all blocks."""
        return [step for block in self.blocks for step in cast(SeparableBlock, block).steps(size, key)]


class DepthNet(MBNet):
    """A MobileNetV1 whose first dynamic stage has two depths.

    Args:
        name: Name of the network and its route space.
        table: The architecture.
        options: Options of the model.
        factory: Device and precision of the parameters.
    """

    def build_blocks(self, spec: ConvSpec, options: ConvOptions) -> None:
        """Build all blocks after the stem."""
        table, keys = self.table, len(self.table.routes)
        deep, late = table.dynamic
        self.early = nn.ModuleList(separable_blocks(table.stem.width, table.early, spec))
        self.first, *others = separable_blocks(table.early[-1].width, [deep], spec, keys=keys)
        residual = cast(DepthOptions, options).join == "residual"
        self.others = ResidualBlocks(others) if residual else nn.ModuleList(others)
        self.late = nn.ModuleList(separable_blocks(deep.width, [late], spec, keys=keys))

    def early_blocks(self) -> Iterable[nn.Module]:
        """Return the blocks before the dynamic stages."""
        return self.early

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """Return the stage of two depths and the last stage."""
        (deep, late), key = self.slices(choices), self.key(choices)
        if isinstance(self.others, ResidualBlocks) and deep.depth > 1:
            last = separable_steps(self.late, [late], key)
            return [*self.first.steps(deep, key), Step(self.others, deep, key), *last]
        others: Iterable[nn.Module] = () if deep.depth == 1 else cast(nn.ModuleList, self.others)
        return separable_steps([self.first, *others, *self.late], [deep, late], key)


MBNET_DEPTH = replace(
    MBNET,
    routes=tuple(
        sizes for depth in (1, 6) for sizes in make_routes(((512,), (1024,)), (depth, 2), kernels=((3, 1),))
    ),
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
