"""FSSD on a supernet: features of three strides, brought to one size and fused, then a pyramid of priors.

Every source is projected to as many channels whatever the route, and resized to the finest map's nominal
size, so that priors do not depend on the route. All norms of the detector are split by route, as those of the
network behind its gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.detection.model.priors import prior_boxes, priors_at
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.blocks import ConvNormAct, Factory, count_steps, make_activation
from dsnet.models.counting import prefix_cost
from dsnet.models.features import Features, PrefixFeatures, prefix_features, route_features
from dsnet.models.static_network import plain_cost
from dsnet.routes import Route, Slice
from dsnet.slicing import Mode, SlicedConv2d, SplitBatchNorm2d

__all__ = ["Answers", "Detector", "FssdTable", "RoutedAnswers", "rows", "unfit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FssdTable:
    """The detector behind a network, as data."""

    strides: tuple[int, ...] = (8, 16, 32)  # of the features that are fused
    project: int = 256  # channels of each of them
    pyramid: tuple[int, ...] = (
        128,
        256,
        256,
        256,
        256,
        256,
    )  # channels; each map has half the size of the last
    ratios: tuple[tuple[float, ...], ...] = ((2.0,), (2.0, 3.0), (2.0, 3.0), (2.0, 3.0), (2.0,), (2.0,))

    def __post_init__(self) -> None:
        if len(self.pyramid) != len(self.ratios) or not self.pyramid:
            raise DsnetError(f"{len(self.pyramid)} maps of the pyramid have ratios for {len(self.ratios)}")
        if not self.strides or list(self.strides) != sorted(set(self.strides)):
            raise DsnetError(f"strides must rise, the finest first, not {self.strides}")
        if min(self.project, *self.strides, *self.pyramid) < 1:
            raise DsnetError(f"strides and channels must be at least 1: {self}")


def unfit(network: Supernet, table: FssdTable) -> str | None:
    """Why a detector cannot stand on a network; none: it can."""
    if len(network.gates) != 1:
        return f"it has {len(network.gates)} gates, not one"
    there = network.feature_shapes(0)
    missing = [str(stride) for stride in table.strides if stride not in there]
    if missing:
        return f"it has no features of stride {', '.join(missing)}, only of {', '.join(map(str, there))}"
    return None


class Answers(NamedTuple):
    """Of B images and p priors."""

    offsets: Tensor  # [B, p, 4]
    logits: Tensor  # [B, p, 1 + classes]


class RoutedAnswers(NamedTuple):
    """Answers for every prior, and the number [B] of the route that gave each image's."""

    answers: Answers
    routes: Tensor


class Detector(nn.Module):
    """A supernet with one gate, and what finds boxes in its features. Its classifier is not used."""

    def __init__(
        self,
        network: Supernet,
        classes: int,
        table: FssdTable = FssdTable(),  # noqa: B008  (a frozen value)
        *,
        activation: str = "silu",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(network, Supernet) or len(network.gates) != 1:
            name = getattr(network, "name", type(network).__name__)
            raise DsnetError(
                "a detector is built on a supernet with one gate (ds_mbnet, ds_mbnet_plus, mbnet), "
                f"not on {name}"
            )
        if (why := unfit(network, table)) is not None:
            raise DsnetError(f"{network.name}: {why}")
        self.network, self.table, self.classes = network, table, classes
        keys, widest = len(network.space), network.feature_shapes(network.space.largest)
        weight = network.head.classifier.weight
        factory = Factory(device=weight.device, dtype=weight.dtype)

        def layer(ins: int, outs: int, kernel: int, stride: int = 1) -> ConvNormAct:
            conv = SlicedConv2d(ins, outs, kernel=kernel, stride=stride, **factory)
            return ConvNormAct(
                conv, SplitBatchNorm2d(outs, keys=keys, **factory), make_activation(activation)
            )

        self.projections = nn.ModuleList(
            layer(widest[stride].channels, table.project, 1) for stride in table.strides
        )
        self.norm = SplitBatchNorm2d(table.project * len(table.strides), keys=keys, **factory)
        channels = (table.project * len(table.strides), *table.pyramid[:-1])
        self.pyramid = nn.ModuleList(
            layer(ins, outs, 3, 1 if level == 0 else 2)
            for level, (ins, outs) in enumerate(zip(channels, table.pyramid, strict=True))
        )
        self.places = nn.ModuleList(self._heads(4, factory))
        self.kinds = nn.ModuleList(self._heads(1 + classes, factory))
        self._reset_parameters(generator)

    def _heads(self, outs: int, factory: Factory) -> list[nn.Conv2d]:
        found = []
        for width, ratios in zip(self.table.pyramid, self.table.ratios, strict=True):
            found.append(nn.Conv2d(width, outs * priors_at(ratios), 3, padding=1, **factory))
        return found

    def _reset_parameters(self, generator: torch.Generator | None) -> None:
        for part in (self.projections, self.pyramid):
            for module in part.modules():
                if isinstance(module, SlicedConv2d):
                    module.reset_parameters(generator)
        for head in (*self.places, *self.kinds):
            conv = cast(nn.Conv2d, head)
            nn.init.normal_(conv.weight, std=0.01, generator=generator)
            nn.init.zeros_(cast(Tensor, conv.bias))

    # --- running -------------------------------------------------------------------------------------
    def forward(self, x: Tensor, route: Route | int | None = None, *, mode: Mode | None = None) -> Answers:
        """Images [B, C, H, W] → answers for every prior, at one route or, without one, gated."""
        size = (x.shape[2], x.shape[3])
        if route is not None:
            return self._answer(self.network.features(x, route, mode=mode), size, mode)
        return self.run(x).answers

    def run(self, x: Tensor) -> RoutedAnswers:
        """Every image at the route that the gate takes for it."""
        size, groups = (x.shape[2], x.shape[3]), self.network.features(x)
        if not groups:  # no images, but their answers still have a shape
            nothing = self.network.features(x, self.network.space.smallest)
            return RoutedAnswers(self._answer(nothing, size, None), nothing.indices)
        found = [self._answer(group, size, None) for group in groups]
        order = torch.cat([group.indices for group in groups]).argsort()
        numbers = torch.cat([torch.full_like(group.indices, group.route.number) for group in groups])
        answers = Answers(*(torch.cat(parts)[order] for parts in zip(*found, strict=True)))
        return RoutedAnswers(answers, numbers[order])

    def answers(self, x: Tensor, routes: Iterable[Route], mode: Mode | None = None) -> Iterator[Answers]:
        """One route after the other; what stands in front of the gate runs once."""
        entered = self.enter(x, mode)
        for route in routes:
            yield self.answer_from(entered, route)

    def enter(self, x: Tensor, mode: Mode | None = None) -> PrefixFeatures:
        """Images up to the gate, with the maps that were made before it and are wanted."""
        self.network.check_images(x)
        return prefix_features(self.network, x, mode).with_strides(self.table.strides)

    def answer_from(self, entered: PrefixFeatures, route: Route) -> Answers:
        """A route's answers from there on."""
        features = route_features(self.network, entered, route)
        return self._answer(features, entered.collector.size, entered.collector.mode)

    def route(self, x: Tensor) -> Tensor:
        """The number [B] of the route that the gate takes for each image."""
        (choices,) = self.network.route(x).unbind(1)
        return choices

    def _answer(self, features: Features, size: tuple[int, int], mode: Mode | None) -> Answers:
        key, sources = features.route.number, []
        height, width = (side // self.table.strides[0] for side in size)
        for stride, projection in zip(self.table.strides, self.projections, strict=True):
            y = projection(features.maps[stride], Slice(width=self.table.project), key, mode)
            if y.shape[2:] != (height, width):
                y = F.interpolate(y, size=(height, width), mode="bilinear", align_corners=False)
            sources.append(y)
        y = self.norm(torch.cat(sources, 1), key, mode)
        offsets, logits = [], []
        for block, place, kind in zip(self.pyramid, self.places, self.kinds, strict=True):
            y = block(y, _slice(cast(ConvNormAct, block)), key, mode)
            offsets.append(rows(place(y), 4))
            logits.append(rows(kind(y), 1 + self.classes))
        return Answers(torch.cat(offsets, 1), torch.cat(logits, 1))

    # --- counting ------------------------------------------------------------------------------------
    def sizes(self, image_size: int | tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Heights and widths of the pyramid's maps, the same for all routes."""
        shape = self.fused_shape(image_size)
        found = []
        for block in self.pyramid:
            _, shape = cast(ConvNormAct, block).cost(shape, _slice(cast(ConvNormAct, block)))
            found.append((shape.height, shape.width))
        return found

    def priors(self, image_size: int | tuple[int, int] | None = None) -> Tensor:
        """Prior boxes [p, 4] for images of this size, as centres and sizes, on the network's device."""
        return prior_boxes(self.sizes(image_size), self.table.ratios).to(self.norm.weight.device)

    def cost(self, route: Route | int, image_size: int | tuple[int, int] | None = None) -> Cost:
        """The whole detector at a route: the network up to its features, projections, pyramid and heads."""
        network = self.network
        choices = network.space.resolve(route).choices
        total, shape = prefix_cost(network, network.input_spec.shape(image_size))
        total += count_steps(network.chain(choices), shape)[0]
        maps = network.feature_shapes(route, image_size)
        for stride, projection in zip(self.table.strides, self.projections, strict=True):
            block = cast(ConvNormAct, projection)
            total += block.cost(maps[stride], Slice(width=self.table.project))[0]
        shape = self.fused_shape(image_size)
        total += self.norm.cost(shape.channels)
        for level, place, kind in zip(self.pyramid, self.places, self.kinds, strict=True):
            block = cast(ConvNormAct, level)
            cost, shape = block.cost(shape, _slice(block))
            total += cost + plain_cost(place, shape)[0] + plain_cost(kind, shape)[0]
        return total

    def fused_shape(self, image_size: int | tuple[int, int] | None = None) -> Shape:
        """Of what the pyramid stands on, the same for all routes."""
        image, stride = self.network.input_spec.shape(image_size), self.table.strides[0]
        channels = self.table.project * len(self.table.strides)
        return Shape(channels, image.height // stride, image.width // stride)

    def norms(self) -> Sequence[SplitBatchNorm2d]:
        """Those that are the detector's own; every one has a key for every route."""
        mine = (self.projections, self.norm, self.pyramid)
        return [m for part in mine for m in part.modules() if isinstance(m, SplitBatchNorm2d)]


def _slice(block: ConvNormAct) -> Slice:
    return Slice(width=block.conv.out_channels, kernel=3, padding=1)


def rows(y: Tensor, numbers: int) -> Tensor:
    """[B, priors · numbers, H, W] → [B, H · W · priors, numbers]."""
    images, channels, height, width = y.shape
    return y.permute(0, 2, 3, 1).reshape(images, height * width * channels // numbers, numbers)
