"""FSSD on a supernet: features of several strides, fused at one size, and an SSD head on a pyramid of maps.

Every feature is projected to the same number of channels at every route and resized to the nominal size of
the finest map, so the priors do not depend on the route. All norms of the detector are split by route, like
those of the network behind its gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.detection.boxes import prior_boxes, priors_per_position
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.blocks import count_steps
from dsnet.models.conv_blocks import ConvNormAct, ConvSpec
from dsnet.models.counting import prefix_cost
from dsnet.models.features import Features, PrefixFeatures, prefix_features, route_features
from dsnet.models.static_network import plain_cost
from dsnet.routes import Route, Slice
from dsnet.slicing import Factory, Mode, SlicedConv2d, SplitBatchNorm2d

__all__ = [
    "Detector",
    "DetectorOutput",
    "FssdTable",
    "PyramidLevel",
    "RoutedDetectorOutput",
    "conv_slice",
    "incompatibility",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FssdTable:
    """The sizes of a detector, as data."""

    strides: tuple[int, ...] = (8, 16, 32)  # of the features that are fused
    project: int = 256  # channels of each of them
    pyramid: tuple[int, ...] = (
        128,
        256,
        256,
        256,
        256,
        256,
    )  # channels; each map has half the last one's size
    ratios: tuple[tuple[float, ...], ...] = ((2.0,), (2.0, 3.0), (2.0, 3.0), (2.0, 3.0), (2.0,), (2.0,))

    def __post_init__(self) -> None:
        if len(self.pyramid) != len(self.ratios) or not self.pyramid:
            raise DsnetError(
                f"expected ratios for each of {len(self.pyramid)} pyramid maps (at least 1), "
                f"got {len(self.ratios)}"
            )
        if not self.strides or list(self.strides) != sorted(set(self.strides)):
            raise DsnetError(f"strides must rise, the finest first, not {self.strides}")
        if min(self.project, *self.strides, *self.pyramid) < 1:
            raise DsnetError(f"strides and channels must be at least 1: {self}")


def incompatibility(network: Supernet, table: FssdTable) -> str | None:
    """Return why a detector cannot be built on a network, or None if it can."""
    if len(network.gates) != 1:
        return f"it has {len(network.gates)} gates, not one"
    available = network.feature_shapes(0)
    missing = [str(stride) for stride in table.strides if stride not in available]
    if missing:
        return f"it has no features of stride {', '.join(missing)}, only of {', '.join(map(str, available))}"
    return None


class DetectorOutput(NamedTuple):
    """Raw predictions for p priors of B images."""

    offsets: Tensor  # [B, p, 4], see `dsnet.detection.decode`
    logits: Tensor  # [B, p, 1 + classes]; the first is the background


class RoutedDetectorOutput(NamedTuple):
    """Raw predictions, and the number [B] of the route that each image took."""

    output: DetectorOutput
    routes: Tensor


class PyramidLevel(NamedTuple):
    """A map of the pyramid: the block that makes it, and the heads on it."""

    block: ConvNormAct
    offset_head: nn.Conv2d
    class_head: nn.Conv2d


class Detector(nn.Module):
    """An FSSD detector on a supernet with one gate. The classifier of the supernet is not used.

    Args:
        network: The supernet; its weights are trained with the detector.
        classes: The number of classes, without the background.
        table: Sizes of the detector.
        generator: Source of the initial weights.

    Raises:
        DsnetError: The network does not have exactly one gate, or lacks features of the table's strides.
    """

    def __init__(
        self,
        network: Supernet,
        classes: int,
        table: FssdTable = FssdTable(),  # noqa: B008  (a frozen value)
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(network, Supernet) or len(network.gates) != 1:
            name = getattr(network, "name", type(network).__name__)
            raise DsnetError(
                "a detector is built on a supernet with one gate (ds_mbnet, ds_mbnet_plus, mbnet), "
                f"not on {name}"
            )
        if (reason := incompatibility(network, table)) is not None:
            raise DsnetError(f"{network.name}: {reason}")
        self.network, self.table, self.classes = network, table, classes
        keys, largest = len(network.space), network.feature_shapes(network.space.largest)
        weight = network.head.classifier.weight
        factory = Factory(device=weight.device, dtype=weight.dtype)
        spec = ConvSpec(factory=factory)

        def block(ins: int, outs: int, kernel: int, stride: int = 1) -> ConvNormAct:
            return ConvNormAct(ins, outs, spec, kernel=kernel, stride=stride, keys=keys)

        def heads(outs: int) -> nn.ModuleList:
            return nn.ModuleList(
                nn.Conv2d(width, outs * priors_per_position(ratios), 3, padding=1, **factory)
                for width, ratios in zip(table.pyramid, table.ratios, strict=True)
            )

        fused = table.project * len(table.strides)
        self.projections = nn.ModuleList(
            block(largest[stride].channels, table.project, 1) for stride in table.strides
        )
        self.norm = SplitBatchNorm2d(fused, keys=keys, **factory)
        self.pyramid = nn.ModuleList(
            block(ins, outs, 3, 1 if level == 0 else 2)
            for level, (ins, outs) in enumerate(zip((fused, *table.pyramid[:-1]), table.pyramid, strict=True))
        )
        self.places = heads(4)  # "places" and "kinds" are names in checkpoints
        self.kinds = heads(1 + classes)
        self._reset_parameters(generator)

    def _reset_parameters(self, generator: torch.Generator | None) -> None:
        for module in (*self.projections.modules(), *self.pyramid.modules()):
            if isinstance(module, SlicedConv2d):
                module.reset_parameters(generator)
        for head in (*self.places, *self.kinds):
            conv = cast(nn.Conv2d, head)
            nn.init.normal_(conv.weight, std=0.01, generator=generator)
            nn.init.zeros_(cast(Tensor, conv.bias))

    def sources(self) -> Iterator[tuple[int, ConvNormAct]]:
        """Iterate over the strides of the fused features and their projections."""
        for stride, projection in zip(self.table.strides, self.projections, strict=True):
            yield stride, cast(ConvNormAct, projection)

    def levels(self) -> Iterator[PyramidLevel]:
        """Iterate over the maps of the pyramid, the finest first."""
        for modules in zip(self.pyramid, self.places, self.kinds, strict=True):
            yield PyramidLevel(*cast("tuple[ConvNormAct, nn.Conv2d, nn.Conv2d]", modules))

    # --- running -------------------------------------------------------------------------------------
    def forward(
        self, x: Tensor, route: Route | int | None = None, *, mode: Mode | None = None
    ) -> DetectorOutput:
        """Predict offsets and logits of all priors.

        Args:
            x: Images [B, C, H, W].
            route: The route of all images; without one, each image takes its gate's choice.
            mode: How norms and stochastic layers behave. A gated call takes none.
        """
        if route is None:
            return self.run(x).output
        return self._predict(self.network.features(x, route, mode=mode), (x.shape[2], x.shape[3]), mode)

    def run(self, x: Tensor) -> RoutedDetectorOutput:
        """Run each image [B, C, H, W] at the route that the gate chooses for it."""
        size, groups = (x.shape[2], x.shape[3]), self.network.features(x)
        if not groups:  # an empty batch still has output shapes
            features = self.network.features(x, self.network.space.smallest)
            return RoutedDetectorOutput(self._predict(features, size, None), features.indices)
        outputs = [self._predict(group, size, None) for group in groups]
        order = torch.cat([group.indices for group in groups]).argsort()
        numbers = torch.cat([torch.full_like(group.indices, group.route.number) for group in groups])
        output = DetectorOutput(*(torch.cat(tensors)[order] for tensors in zip(*outputs, strict=True)))
        return RoutedDetectorOutput(output, numbers[order])

    def outputs(
        self, x: Tensor, routes: Iterable[Route], mode: Mode | None = None
    ) -> Iterator[DetectorOutput]:
        """Run several routes on the same images, one by one. The layers before the gate run once."""
        entered = self.enter(x, mode)
        for route in routes:
            yield self.output_from(entered, route)

    def enter(self, x: Tensor, mode: Mode | None = None) -> PrefixFeatures:
        """Run images up to the gate, and keep the earlier maps that are fused."""
        self.network.check_images(x)
        return prefix_features(self.network, x, mode).with_strides(self.table.strides)

    def output_from(self, entered: PrefixFeatures, route: Route) -> DetectorOutput:
        """Run a route on what `enter` returns."""
        features = route_features(self.network, entered, route)
        return self._predict(features, entered.collector.size, entered.collector.mode)

    def route(self, x: Tensor) -> Tensor:
        """Return the number [B] of the route that the gate chooses for each image."""
        (choices,) = self.network.route(x).unbind(1)
        return choices

    def _predict(self, features: Features, size: tuple[int, int], mode: Mode | None) -> DetectorOutput:
        key, sources = features.route.number, []
        height, width = (side // self.table.strides[0] for side in size)
        for stride, projection in self.sources():
            y = projection(features.maps[stride], Slice(width=self.table.project), key, mode)
            if y.shape[2:] != (height, width):
                y = F.interpolate(y, size=(height, width), mode="bilinear", align_corners=False)
            sources.append(y)
        y = self.norm(torch.cat(sources, 1), key, mode)
        offsets, logits = [], []
        for level in self.levels():
            y = level.block(y, conv_slice(level.block), key, mode)
            offsets.append(_by_prior(level.offset_head(y), 4))
            logits.append(_by_prior(level.class_head(y), 1 + self.classes))
        return DetectorOutput(torch.cat(offsets, 1), torch.cat(logits, 1))

    # --- counting ------------------------------------------------------------------------------------
    def sizes(self, image_size: int | tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Compute the heights and widths of the pyramid's maps, the same at all routes."""
        shape, sizes = self.fused_shape(image_size), []
        for block, *_ in self.levels():
            _, shape = block.cost(shape, conv_slice(block))
            sizes.append((shape.height, shape.width))
        return sizes

    def priors(self, image_size: int | tuple[int, int] | None = None) -> Tensor:
        """Make the prior boxes [p, 4] for a size of images: centres and sizes, on the detector's device."""
        return prior_boxes(self.sizes(image_size), self.table.ratios).to(self.norm.weight.device)

    def cost(self, route: Route | int, image_size: int | tuple[int, int] | None = None) -> Cost:
        """Count a route of the detector: the network without its head, the projections, the pyramid."""
        network = self.network
        total, shape = prefix_cost(network, network.input_spec.shape(image_size))
        total += count_steps(network.chain(network.space.resolve(route).choices), shape)[0]
        maps = network.feature_shapes(route, image_size)
        for stride, projection in self.sources():
            total += projection.cost(maps[stride], Slice(width=self.table.project))[0]
        shape = self.fused_shape(image_size)
        total += self.norm.cost(shape.channels)
        for block, *heads in self.levels():
            cost, shape = block.cost(shape, conv_slice(block))
            for head in heads:
                cost += plain_cost(head, shape)[0]
            total += cost
        return total

    def fused_shape(self, image_size: int | tuple[int, int] | None = None) -> Shape:
        """Compute the shape of the fused map, the same at all routes."""
        image, stride = self.network.input_spec.shape(image_size), self.table.strides[0]
        channels = self.table.project * len(self.table.strides)
        return Shape(channels, image.height // stride, image.width // stride)

    def norms(self) -> Sequence[SplitBatchNorm2d]:
        """Return the detector's own norms, without the network's. Each has a key for every route."""
        own = (self.projections, self.norm, self.pyramid)
        return [m for child in own for m in child.modules() if isinstance(m, SplitBatchNorm2d)]


def conv_slice(block: ConvNormAct) -> Slice:
    """Return the slice that runs a 3 × 3 block of the pyramid at full width."""
    return Slice(width=block.conv.out_channels, kernel=3, padding=1)


def _by_prior(y: Tensor, values: int) -> Tensor:
    """Reshape [B, priors · values, H, W] to [B, H · W · priors, values]."""
    images, channels, height, width = y.shape
    return y.permute(0, 2, 3, 1).reshape(images, height * width * channels // values, values)
