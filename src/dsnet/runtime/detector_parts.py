"""A detector taken apart for a device, as `dsnet.runtime.parts` does it with a network.

What a part hands on is one row of numbers an image: the maps that were made so far and are wanted later, each
channels last, then the features at the gate. What the last part gives is one row, too: offsets, then logits.
So grouping, padding and graphs work as they do for classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.detection.fssd import Detector
from dsnet.models.blocks import ConvNormAct
from dsnet.routes import Route, Slice
from dsnet.runtime.norms import by_history
from dsnet.runtime.parts import End, History, Part, in_precision

__all__ = ["Behind", "Front", "Split", "ToFused", "pack_detector", "split_detector"]


def pack_detector(
    detector: Detector,
    choices: Sequence[int],
    *,
    image_size: int | tuple[int, int] | None = None,
    precision: torch.dtype | None = None,
    device: torch.device | None = None,
) -> dict[History, Part]:
    """The front and a part for every choice, as `dsnet.runtime.parts.pack`."""

    def head(route: Route) -> nn.Module:
        return _Head(_Projections(detector, route, image_size), _Pyramid(detector, route, image_size))

    return _pack(detector, choices, head, image_size, precision, device)


class Split(NamedTuple):
    """A detector in parts, and what is behind them for images of all choices at once."""

    parts: dict[History, Part]
    end: End


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
        sources = _Projections(detector, route, image_size)
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
    return Split(parts, End(in_precision(by_history(ends).to(device), precision), numbers))


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
) -> dict[History, Part]:
    """The front, and for every choice a part that ends with the head of its route."""
    network, wanted = detector.network, detector.table.strides
    for choice in choices:
        network.require_statistics(network.space.of_choices((choice,)))
    image = network.geometry.shape(image_size)
    blocks, taps, behind = _blocks(detector, (), image, 1, begun=False)
    noted = {stride: tap for stride, tap in taps.items() if stride in wanted}
    shapes = network.feature_shapes(network.space.of_choices((choices[0],)), image_size)
    handed = {**{stride: shapes[stride] for stride in noted}, 0: behind.shape}
    gate = network.gate(0).extract_deciding(behind.shape.channels)
    front = Front(blocks, list(noted.values()), gate).eval()
    parts: dict[History, Part] = {(): Part(in_precision(front.to(device), precision), image)}
    row = Shape(sum(math.prod(shape) for shape in handed.values()), 1, 1)
    for choice in choices:
        blocks, taps, last = _blocks(detector, (choice,), behind.shape, behind.stride, begun=True)
        taps = {**taps, last.stride: len(blocks)}
        own = {stride: tap for stride, tap in taps.items() if stride in wanted}
        part = Behind(blocks, handed, own, wanted, head(network.space.of_choices((choice,)))).eval()
        parts[choice,] = Part(in_precision(part.to(device), precision), row)
    return parts


class _End(NamedTuple):
    shape: Shape
    stride: int


def _blocks(
    detector: Detector, history: History, shape: Shape, stride: int, *, begun: bool
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


def _flat(x: Tensor) -> Tensor:
    """[B, C, H, W] → [B, H · W · C], without a copy where channels are last in memory."""
    return x.permute(0, 2, 3, 1).flatten(1)


class Front(nn.Module):
    """Images → maps that are wanted later and the features at the gate as one row, and scores."""

    def __init__(self, blocks: Sequence[nn.Module], taps: Sequence[int], gate: nn.Module) -> None:
        super().__init__()
        self.blocks, self.taps, self.gate = nn.ModuleList(blocks), tuple(taps), gate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, numbers, 1, 1] and scores [B, choices]."""
        kept = []
        for number, block in enumerate(self.blocks):
            if number in self.taps:
                kept.append(_flat(x))
            x = block(x)
        x, scores = self.gate(x)
        return torch.cat([*kept, _flat(x)], 1)[:, :, None, None], scores


class Behind(nn.Module):
    """A row of the front → a row of answers."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        handed: Mapping[int, Shape],  # by stride; 0: features at the gate
        taps: Mapping[int, int],
        wanted: Sequence[int],
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.blocks, self.handed, self.taps = nn.ModuleList(blocks), dict(handed), dict(taps)
        self.wanted, self.head = tuple(wanted), head

    def forward(self, row: Tensor) -> Tensor:
        """Rows [B, numbers, 1, 1] → [B, numbers]."""
        maps: dict[int, Tensor] = {}
        start = 0
        for stride, shape in self.handed.items():
            size = math.prod(shape)
            piece = row[:, start : start + size].reshape(-1, shape.height, shape.width, shape.channels)
            maps[stride] = piece.permute(0, 3, 1, 2)
            start += size
        x = maps.pop(0)
        for number, block in enumerate(self.blocks):
            for stride, tap in self.taps.items():
                if tap == number:
                    maps[stride] = x
            x = block(x)
        for stride, tap in self.taps.items():
            if tap == len(self.blocks):
                maps[stride] = x
        return cast(Tensor, self.head([maps[stride] for stride in self.wanted]))


class _Projections(nn.Module):
    """The sources of a route with as many channels each, norms folded; and their sizes."""

    def __init__(self, detector: Detector, route: Route, image_size: int | tuple[int, int] | None) -> None:
        super().__init__()
        table = detector.table
        maps = detector.network.feature_shapes(route, image_size)
        self.blocks = nn.ModuleList(
            cast(ConvNormAct, block).extract(
                maps[stride], Slice(width=table.project), route.number, fold_bn=True
            )
            for stride, block in zip(table.strides, detector.projections, strict=True)
        )
        self.sizes = [(maps[stride].height, maps[stride].width) for stride in table.strides]

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        return [block(x) for x, block in zip(maps, self.blocks, strict=True)]


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
            offsets.append(_flat(place(y)))
            logits.append(_flat(kind(y)))
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
            x if size == self.size else _resized(x, self.size) for x, size in zip(sources, sizes, strict=True)
        ]
        return cast(Tensor, self.levels(self.norm(torch.cat(same, 1))))


def _resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class _Head(nn.Module):
    """All that is behind a route's features."""

    def __init__(self, projections: _Projections, pyramid: _Pyramid) -> None:
        super().__init__()
        self.projections, self.pyramid = projections, pyramid

    def forward(self, maps: list[Tensor]) -> Tensor:
        return cast(Tensor, self.pyramid(self.projections(maps), self.projections.sizes))


class _ToRow(nn.Module):
    """Projections as one row, each map at a size that does not depend on the route."""

    def __init__(self, projections: _Projections, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.projections, self.sizes = projections, tuple(sizes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        sizes, sources = zip(self.projections.sizes, self.sizes, strict=True), self.projections(maps)
        rows = [
            _flat(x if own == size else _resized(x, size))
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


class ToFused(nn.Module):
    """Projections as one map, normed, as one row: positions, then channels."""

    scale: Tensor  # [C]
    shift: Tensor

    def __init__(self, projections: _Projections, norm: nn.BatchNorm2d, size: tuple[int, int]) -> None:
        super().__init__()
        self.projections, self.size = projections, size
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.weight * torch.rsqrt(norm.running_var + norm.eps)).detach()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", norm.bias.detach() - norm.running_mean * scale)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Maps [B, C, H, W] → [B, numbers]."""
        sources = zip(self.projections(maps), self.projections.sizes, strict=True)
        y = torch.cat([x if own == self.size else _resized(x, self.size) for x, own in sources], 1)
        return _flat(y * self.scale[:, None, None] + self.shift[:, None, None])


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
