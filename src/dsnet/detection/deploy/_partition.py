"""Split a detector into segments for a device, as `dsnet.runtime.partition.segments` splits a network.

A segment passes one row of numbers per image on: the maps that are needed later, each channels last, then the
features at the gate. The last segment also returns one row: offsets, then logits. So grouping, padding and
CUDA graphs work as they do for classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.detection.model.fssd import Detector, conv_slice
from dsnet.errors import DsnetError
from dsnet.models.conv_blocks import ConvNormAct
from dsnet.models.features import PrefixFeatures
from dsnet.routes import Route, Slice
from dsnet.runtime.partition.feature_maps import (
    Behind,
    Front,
    Projections,
    ToFused,
    flat_maps,
    maps_from_row,
    resized_maps,
)
from dsnet.runtime.partition.per_image_norm import by_history
from dsnet.runtime.partition.segments import Segment, SegmentKey, SharedHead, in_precision

__all__ = ["pack_detector", "share_detector", "split_detector"]

ImageSize = int | tuple[int, int] | None


def pack_detector(
    detector: Detector,
    choices: Sequence[int],
    *,
    image_size: ImageSize = None,
    precision: torch.dtype | None = None,
    device: torch.device | None = None,
) -> dict[SegmentKey, Segment]:
    """Return the prefix and a segment for every choice, as `dsnet.runtime.partition.segments.pack`."""

    def head(route: Route) -> nn.Module:
        projections = _projections(detector, route, image_size)
        return _Head(projections, _Pyramid(detector, route, image_size, projections.sizes))

    return _pack(detector, choices, head, image_size, precision, device)


def share_detector(
    detector: Detector, choices: Sequence[int], *, image_size: ImageSize = None
) -> dict[SegmentKey, Segment]:
    """Return the same segments as `pack_detector`, as slices of the detector's own weights."""
    network = detector.network
    routes = [network.space.of_choices((choice,)) for choice in choices]
    for route in routes:
        network.require_statistics(route)
    image = network.input_spec.shape(image_size)
    weight = detector.norm.weight
    with torch.no_grad():
        prefix = detector.enter(torch.zeros(0, *image, device=weight.device, dtype=weight.dtype))
    row = Shape(sum(math.prod(x.shape[1:]) for x in prefix.tensors()), 1, 1)
    segments: dict[SegmentKey, Segment] = {(): Segment(_SlicedFront(detector), image)}
    for route in routes:
        segments[route.choices] = Segment(_SlicedBehind(detector, route, prefix), row)
    return segments


class _SlicedFront(nn.Module):
    """Runs a detector up to its gate: images → rows of maps [B, numbers, 1, 1] and scores [B, choices]."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector, self.choices = detector, detector.network.gate(0).choices

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.detector.training or self.detector.network.gate(0).choices != self.choices:
            what = "is in training mode" if self.detector.training else "has another routing head"
            raise DsnetError(f"the detector that this plan shares {what} now; call .eval(), or compile again")
        prefix = self.detector.enter(x)
        assert prefix.encoding is not None
        row = torch.cat([flat_maps(maps) for maps in prefix.tensors()], 1)
        return row[:, :, None, None], self.detector.network.gate(0).score(prefix.encoding)


class _SlicedBehind(nn.Module):
    """Runs a route of a detector on such rows, and returns rows of offsets and logits."""

    def __init__(self, detector: Detector, route: Route, prefix: PrefixFeatures) -> None:
        super().__init__()
        self.detector, self.route, self.prefix = detector, route, prefix
        self.shapes = [Shape(*x.shape[1:]) for x in prefix.tensors()]

    def forward(self, row: Tensor) -> Tensor:
        prefix = self.prefix.with_tensors(maps_from_row(row, self.shapes))
        output = self.detector.output_from(prefix, self.route)
        return torch.cat([values.flatten(1) for values in output], 1)


def split_detector(
    detector: Detector,
    choices: Sequence[int],
    *,
    fused: bool = False,
    image_size: ImageSize = None,
    precision: torch.dtype | None = None,
    device: torch.device | None = None,
) -> tuple[dict[SegmentKey, Segment], SharedHead]:
    """Return segments that end with the projections, and what runs behind all of them.

    What is behind the projections has the same weights for all choices, except for its norms. With ``fused``
    segments end where all features are one map, for a backend that writes them there at once.
    """
    sizes, fused_shape = _handed_sizes(detector, choices, image_size), detector.fused_shape(image_size)
    shapes = [fused_shape] if fused else [Shape(detector.table.project, *size) for size in sizes]

    def head(route: Route) -> nn.Module:
        projections = _projections(detector, route, image_size)
        if fused:
            norm = detector.norm.extract(fused_shape.channels, route.number)
            return ToFused(projections, norm, (fused_shape.height, fused_shape.width))
        return _ToRow(projections, sizes)

    def end(route: Route) -> nn.Module:
        fold = len(choices) == 1
        if fused:
            return _FromRow(_Levels(detector, route, image_size, fold=fold), shapes)
        return _FromRow(_Pyramid(detector, route, image_size, sizes, fold=fold), shapes)

    parts = _pack(detector, choices, head, image_size, precision, device)
    ends = [end(detector.network.space.of_choices((choice,))).eval() for choice in choices]
    shared = in_precision(by_history(ends).to(device), precision)
    return parts, SharedHead(shared, sum(map(math.prod, shapes)))


def _handed_sizes(detector: Detector, choices: Sequence[int], image_size: ImageSize) -> list[tuple[int, int]]:
    """Return the size of each projected map: its own if all choices agree on it, else the fused map's."""
    network, fused = detector.network, detector.fused_shape(image_size)
    shapes = [network.feature_shapes(network.space.of_choices((c,)), image_size) for c in choices]
    by_stride = [{shape[stride][1:] for shape in shapes} for stride in detector.table.strides]
    return [sizes.pop() if len(sizes) == 1 else fused[1:] for sizes in by_stride]


def _pack(
    detector: Detector,
    choices: Sequence[int],
    head: Callable[[Route], nn.Module],
    image_size: ImageSize,
    precision: torch.dtype | None,
    device: torch.device | None,
) -> dict[SegmentKey, Segment]:
    """Return the prefix, and for every choice a segment that ends with the head of its route."""
    network, strides = detector.network, detector.table.strides
    routes = [network.space.of_choices((choice,)) for choice in choices]
    for route in routes:
        network.require_statistics(route)
    image = network.input_spec.shape(image_size)
    blocks, taps, shape, stride = _blocks(detector, (), image, 1, started=False)
    prefix_taps = {stride: tap for stride, tap in taps.items() if stride in strides}
    shapes = network.feature_shapes(routes[0], image_size)
    row_shapes = {**{stride: shapes[stride] for stride in prefix_taps}, 0: shape}
    gate = network.gate(0).extract_with_routing(shape.channels)
    front = Front(blocks, list(prefix_taps.values()), gate).eval()
    parts: dict[SegmentKey, Segment] = {(): Segment(in_precision(front.to(device), precision), image)}
    row = Shape(sum(map(math.prod, row_shapes.values())), 1, 1)
    for route in routes:
        blocks, taps, _, last = _blocks(detector, route.choices, shape, stride, started=True)
        taps[last] = len(blocks)
        taps = {stride: tap for stride, tap in taps.items() if stride in strides}
        part = Behind(blocks, row_shapes, taps, strides, head(route)).eval()
        parts[route.choices] = Segment(in_precision(part.to(device), precision), row)
    return parts


def _blocks(
    detector: Detector, history: SegmentKey, shape: Shape, stride: int, *, started: bool
) -> tuple[list[nn.Module], dict[int, int], Shape, int]:
    """Return plain blocks, which of them reads each stride's map, and the shape and stride behind them."""
    blocks: list[nn.Module] = []
    taps: dict[int, int] = {}
    for block, size, key in detector.network.chain(history):
        if block.stride > 1:
            if started:
                taps[stride] = len(blocks)
            stride *= block.stride
        blocks.append(block.extract(shape, size, key, fold_bn=True))
        _, shape = block.cost(shape, size)
        started = True
    return blocks, taps, shape, stride


def _projections(detector: Detector, route: Route, image_size: ImageSize) -> Projections:
    """Return the projections of a route, norms folded."""
    table, maps = detector.table, detector.network.feature_shapes(route, image_size)
    blocks = (
        cast(ConvNormAct, block).extract(maps[stride], Slice(width=table.project), route.number, fold_bn=True)
        for stride, block in zip(table.strides, detector.projections, strict=True)
    )
    return Projections(blocks, [(maps[stride].height, maps[stride].width) for stride in table.strides])


class _Levels(nn.Module):
    """Pyramid and heads of a route; its norms are folded if ``fold`` is set."""

    def __init__(self, detector: Detector, route: Route, image_size: ImageSize, *, fold: bool) -> None:
        super().__init__()
        shape, levels = detector.fused_shape(image_size), []
        for block, *_ in detector.levels():
            levels.append(block.extract(shape, conv_slice(block), route.number, fold_bn=fold))
            _, shape = block.cost(shape, conv_slice(block))
        self.levels = nn.ModuleList(levels)
        self.places, self.kinds = copy.deepcopy(detector.places), copy.deepcopy(detector.kinds)

    def forward(self, y: Tensor) -> Tensor:
        offsets, logits = [], []
        for block, offset_head, class_head in zip(self.levels, self.places, self.kinds, strict=True):
            y = block(y)
            offsets.append(flat_maps(offset_head(y)))
            logits.append(flat_maps(class_head(y)))
        return torch.cat([*offsets, *logits], 1)


class _Pyramid(nn.Module):
    """Fusion, pyramid and heads of a route: projected maps of ``sizes`` → rows."""

    def __init__(
        self,
        detector: Detector,
        route: Route,
        image_size: ImageSize,
        sizes: Sequence[tuple[int, int]],
        *,
        fold: bool = True,
    ) -> None:
        super().__init__()
        shape = detector.fused_shape(image_size)
        self.sizes, self.targets = tuple(sizes), [(shape.height, shape.width)] * len(sizes)
        self.norm = detector.norm.extract(shape.channels, route.number)
        self.levels = _Levels(detector, route, image_size, fold=fold)

    def forward(self, *sources: Tensor) -> Tensor:
        y = torch.cat(resized_maps(sources, self.sizes, self.targets), 1)
        return cast(Tensor, self.levels(self.norm(y)))


class _Head(nn.Module):
    """Everything behind the features of a route."""

    def __init__(self, projections: Projections, pyramid: _Pyramid) -> None:
        super().__init__()
        self.projections, self.pyramid = projections, pyramid

    def forward(self, maps: list[Tensor]) -> Tensor:
        return cast(Tensor, self.pyramid(*self.projections(maps)))


class _ToRow(nn.Module):
    """Projections as one row, each map at a size that does not depend on the route."""

    def __init__(self, projections: Projections, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.projections, self.sizes = projections, tuple(sizes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        resized = resized_maps(self.projections(maps), self.projections.sizes, self.sizes)
        return torch.cat([flat_maps(x) for x in resized], 1)


class _FromRow(nn.Module):
    """What runs on the maps of such a row."""

    def __init__(self, head: nn.Module, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.head, self.shapes = head, tuple(shapes)

    def forward(self, row: Tensor) -> Tensor:
        return cast(Tensor, self.head(*maps_from_row(row, self.shapes)))
