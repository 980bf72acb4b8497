"""A detector taken apart for a device, as `dsnet.runtime.partition.segments` does it with a network.

What a part hands on is one row of numbers an image: the maps that were made so far and are wanted later, each
channels last, then the features at the gate. What the last part gives is one row, too: offsets, then logits.
So grouping, padding and graphs work as they do for classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.detection.model.fssd import Detector
from dsnet.errors import DsnetError
from dsnet.models.conv_blocks import ConvNormAct
from dsnet.models.features import PrefixFeatures
from dsnet.routes import Route, Slice
from dsnet.runtime.partition.feature_maps import Behind, Front, Projections, ToFused, flat_maps, resized_maps
from dsnet.runtime.partition.per_image_norm import by_history
from dsnet.runtime.partition.segments import Segment, SegmentKey, SharedHead, in_precision

__all__ = ["Split", "pack_detector", "share_detector", "split_detector"]


def pack_detector(
    detector: Detector,
    choices: Sequence[int],
    *,
    image_size: int | tuple[int, int] | None = None,
    precision: torch.dtype | None = None,
    device: torch.device | None = None,
) -> dict[SegmentKey, Segment]:
    """The front and a part for every choice, as `dsnet.runtime.partition.segments.pack`."""

    def head(route: Route) -> nn.Module:
        return _Head(_projections(detector, route, image_size), _Pyramid(detector, route, image_size))

    return _pack(detector, choices, head, image_size, precision, device)


def share_detector(
    detector: Detector, choices: Sequence[int], *, image_size: int | tuple[int, int] | None = None
) -> dict[SegmentKey, Segment]:
    """Return the same segments as `pack_detector`, as slices of the detector's own weights."""
    network = detector.network
    routes = [network.space.of_choices((choice,)) for choice in choices]
    for route in routes:
        network.require_statistics(route)
    image = network.input_spec.shape(image_size)
    weight = detector.norm.weight
    with torch.no_grad():
        prefix = detector.enter(torch.zeros(1, *image, device=weight.device, dtype=weight.dtype))
    row = Shape(sum(x.numel() for x in prefix.tensors()), 1, 1)
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
        row = torch.cat([maps.flatten(1) for maps in prefix.tensors()], 1)
        return row[:, :, None, None], self.detector.network.gate(0).score(prefix.encoding)


class _SlicedBehind(nn.Module):
    """Runs a route of a detector on such rows, and returns rows of offsets and logits."""

    def __init__(self, detector: Detector, route: Route, prefix: PrefixFeatures) -> None:
        super().__init__()
        self.detector, self.route, self.prefix = detector, route, prefix
        self.shapes = [x.shape[1:] for x in prefix.tensors()]

    def forward(self, row: Tensor) -> Tensor:
        pieces = torch.split(row.flatten(1), [shape.numel() for shape in self.shapes], 1)
        maps = [piece.view(-1, *shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
        output = self.detector.output_from(self.prefix.with_tensors(maps), self.route)
        return torch.cat([values.flatten(1) for values in output], 1)


class Split(NamedTuple):
    """A detector in parts, and what is behind them for images of all choices at once."""

    parts: dict[SegmentKey, Segment]
    end: SharedHead


def split_detector(
    detector: Detector,
    choices: Sequence[int],
    *,
    fused: bool = False,
    image_size: int | tuple[int, int] | None = None,
    precision: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Split:
    """As `pack_detector`, but parts end with the projections: what is behind them has the same weights for
    all choices, except for its norms.

    ``fused``: they end where all features are one map, for a backend that writes them there at once.
    """
    sizes, shape = _handed_sizes(detector, choices, image_size), detector.fused_shape(image_size)
    numbers = math.prod(shape) if fused else detector.table.project * sum(map(math.prod, sizes))

    def head(route: Route) -> nn.Module:
        sources = _projections(detector, route, image_size)
        if fused:
            norm = detector.norm.extract(shape.channels, route.number)
            return ToFused(sources, norm, (shape.height, shape.width))
        return _ToRow(sources, sizes)

    def end(route: Route) -> nn.Module:
        fold = len(choices) == 1
        if fused:
            return _FromFused(_Levels(detector, route, image_size, fold=fold), shape)
        return _FromRow(_Pyramid(detector, route, image_size, fold=fold), detector.table.project, sizes)

    parts = _pack(detector, choices, head, image_size, precision, device)
    ends = [end(detector.network.space.of_choices((choice,))).eval() for choice in choices]
    return Split(parts, SharedHead(in_precision(by_history(ends).to(device), precision), numbers))


def _handed_sizes(
    detector: Detector, choices: Sequence[int], image_size: int | tuple[int, int] | None
) -> list[tuple[int, int]]:
    """Of each source, behind its projection: its own where all choices have the same, else as it is fused."""
    network, fused = detector.network, detector.fused_shape(image_size)
    shapes = [network.feature_shapes(network.space.of_choices((c,)), image_size) for c in choices]
    found = []
    for stride in detector.table.strides:
        own = {(shape[stride].height, shape[stride].width) for shape in shapes}
        found.append(own.pop() if len(own) == 1 else (fused.height, fused.width))
    return found


def _pack(
    detector: Detector,
    choices: Sequence[int],
    head: Callable[[Route], nn.Module],
    image_size: int | tuple[int, int] | None,
    precision: torch.dtype | None,
    device: torch.device | None,
) -> dict[SegmentKey, Segment]:
    """The front, and for every choice a part that ends with the head of its route."""
    network, wanted = detector.network, detector.table.strides
    for choice in choices:
        network.require_statistics(network.space.of_choices((choice,)))
    image = network.input_spec.shape(image_size)
    blocks, taps, behind = _blocks(detector, (), image, 1, begun=False)
    noted = {stride: tap for stride, tap in taps.items() if stride in wanted}
    shapes = network.feature_shapes(network.space.of_choices((choices[0],)), image_size)
    handed = {**{stride: shapes[stride] for stride in noted}, 0: behind.shape}
    gate = network.gate(0).extract_with_routing(behind.shape.channels)
    front = Front(blocks, list(noted.values()), gate).eval()
    parts: dict[SegmentKey, Segment] = {(): Segment(in_precision(front.to(device), precision), image)}
    row = Shape(sum(math.prod(shape) for shape in handed.values()), 1, 1)
    for choice in choices:
        blocks, taps, last = _blocks(detector, (choice,), behind.shape, behind.stride, begun=True)
        taps = {**taps, last.stride: len(blocks)}
        own = {stride: tap for stride, tap in taps.items() if stride in wanted}
        part = Behind(blocks, handed, own, wanted, head(network.space.of_choices((choice,)))).eval()
        parts[choice,] = Segment(in_precision(part.to(device), precision), row)
    return parts


class _End(NamedTuple):
    shape: Shape
    stride: int


def _blocks(
    detector: Detector, history: SegmentKey, shape: Shape, stride: int, *, begun: bool
) -> tuple[list[nn.Module], dict[int, int], _End]:
    """Plain blocks, in front of which of them a stride's map is whole, and what stands behind all."""
    made: list[nn.Module] = []
    taps: dict[int, int] = {}
    for block, size, key in detector.network.chain(history):
        if block.stride > 1:
            if begun:
                taps[stride] = len(made)
            stride *= block.stride
        made.append(block.extract(shape, size, key, fold_bn=True))
        _, shape = block.cost(shape, size)
        begun = True
    return made, taps, _End(shape, stride)


def _projections(detector: Detector, route: Route, image_size: int | tuple[int, int] | None) -> Projections:
    """The sources of a route with as many channels each, norms folded."""
    table, maps = detector.table, detector.network.feature_shapes(route, image_size)
    blocks = (
        cast(ConvNormAct, block).extract(maps[stride], Slice(width=table.project), route.number, fold_bn=True)
        for stride, block in zip(table.strides, detector.projections, strict=True)
    )
    return Projections(blocks, [(maps[stride].height, maps[stride].width) for stride in table.strides])


class _Levels(nn.Module):
    """Pyramid and heads of a route, norms folded where asked for."""

    def __init__(
        self,
        detector: Detector,
        route: Route,
        image_size: int | tuple[int, int] | None,
        *,
        fold: bool,
    ) -> None:
        super().__init__()
        shape, key = detector.fused_shape(image_size), route.number
        levels = []
        for level in detector.pyramid:
            block = cast(ConvNormAct, level)
            own = Slice(width=block.conv.out_channels, kernel=3, padding=1)
            levels.append(block.extract(shape, own, key, fold_bn=fold))
            _, shape = block.cost(shape, own)
        self.levels = nn.ModuleList(levels)
        self.places, self.kinds = _copies(detector.places), _copies(detector.kinds)

    def forward(self, y: Tensor) -> Tensor:
        offsets, logits = [], []
        for block, place, kind in zip(self.levels, self.places, self.kinds, strict=True):
            y = block(y)
            offsets.append(flat_maps(place(y)))
            logits.append(flat_maps(kind(y)))
        return torch.cat([*offsets, *logits], 1)


class _Pyramid(nn.Module):
    """Fusion, pyramid and heads of a route."""

    def __init__(
        self,
        detector: Detector,
        route: Route,
        image_size: int | tuple[int, int] | None,
        *,
        fold: bool = True,
    ) -> None:
        super().__init__()
        shape = detector.fused_shape(image_size)
        self.size = (shape.height, shape.width)
        self.norm = detector.norm.extract(shape.channels, route.number)
        self.levels = _Levels(detector, route, image_size, fold=fold)

    def forward(self, sources: list[Tensor], sizes: Sequence[tuple[int, int]]) -> Tensor:
        same = [
            x if size == self.size else resized_maps(x, self.size)
            for x, size in zip(sources, sizes, strict=True)
        ]
        return cast(Tensor, self.levels(self.norm(torch.cat(same, 1))))


class _Head(nn.Module):
    """All that is behind a route's features."""

    def __init__(self, projections: Projections, pyramid: _Pyramid) -> None:
        super().__init__()
        self.projections, self.pyramid = projections, pyramid

    def forward(self, maps: list[Tensor]) -> Tensor:
        return cast(Tensor, self.pyramid(self.projections(maps), self.projections.sizes))


class _ToRow(nn.Module):
    """Projections as one row, each map at a size that does not depend on the route."""

    def __init__(self, projections: Projections, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.projections, self.sizes = projections, tuple(sizes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        sizes, sources = zip(self.projections.sizes, self.sizes, strict=True), self.projections(maps)
        rows = [
            flat_maps(x if own == size else resized_maps(x, size))
            for x, (own, size) in zip(sources, sizes, strict=True)
        ]
        return torch.cat(rows, 1)


class _FromRow(nn.Module):
    """The pyramid of such a row."""

    def __init__(self, pyramid: _Pyramid, channels: int, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.pyramid, self.channels, self.sizes = pyramid, channels, tuple(sizes)

    def forward(self, row: Tensor) -> Tensor:
        sources, start = [], 0
        for height, width in self.sizes:
            end = start + self.channels * height * width
            piece = row[:, start:end].reshape(-1, height, width, self.channels)
            sources.append(piece.permute(0, 3, 1, 2))
            start = end
        return cast(Tensor, self.pyramid(sources, self.sizes))


class _FromFused(nn.Module):
    """Pyramid and heads of such a row."""

    def __init__(self, levels: _Levels, shape: Shape) -> None:
        super().__init__()
        self.levels, self.shape = levels, shape

    def forward(self, row: Tensor) -> Tensor:
        channels, height, width = self.shape
        return cast(Tensor, self.levels(row.view(-1, height, width, channels).permute(0, 3, 1, 2)))


def _copies(heads: nn.ModuleList) -> nn.ModuleList:
    made = []
    for head in heads:
        conv = cast(nn.Conv2d, head)
        weight, bias = conv.weight.detach(), cast(Tensor, conv.bias).detach()
        own = nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1, device="meta")
        own.weight, own.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        made.append(own)
    return nn.ModuleList(made)
