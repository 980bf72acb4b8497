"""Feature maps of a supernet by stride, for tasks that need more than logits.

The map of a stride is the last output at that resolution, as the next layer reads it: scaled by the attention
of a gate if one follows. Strides are nominal: a route whose strided convolutions do not pad has smaller maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.gate import GateEncoding
from dsnet.models.group_by_route import Decide
from dsnet.routes import Route
from dsnet.slicing import Mode

if TYPE_CHECKING:
    from dsnet.models.supernet import Supernet

__all__ = [
    "Features",
    "PrefixFeatures",
    "feature_shapes",
    "prefix_features",
    "route_features",
    "routed_features",
]


class Features(NamedTuple):
    """Feature maps of images at one route."""

    route: Route
    indices: Tensor  # [n]: of these images in the batch
    maps: dict[int, Tensor]  # stride → [n, C, H, W], from the finest to the coarsest


@dataclass(frozen=True, slots=True)
class PrefixFeatures:
    """Features at the first gate, scaled by it, and the maps collected before it."""

    x: Tensor
    collector: _Collector
    encoding: GateEncoding | None = None  # the input of the routing head; None after `with_tensors`

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the features and all maps."""
        return (self.x, *self.collector.maps.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> PrefixFeatures:
        """Return the same with other ``tensors``."""
        maps = dict(zip(self.collector.maps, tensors[1:], strict=True))
        return PrefixFeatures(tensors[0], replace(self.collector, maps=maps))

    def with_strides(self, strides: Iterable[int]) -> PrefixFeatures:
        """Return the same with the maps of these strides only."""
        maps = {stride: x for stride, x in self.collector.maps.items() if stride in strides}
        return replace(self, collector=replace(self.collector, maps=maps))


def prefix_features(model: Supernet, x: Tensor, mode: Mode | None = None) -> PrefixFeatures:
    """Run images up to the first gate."""
    collector = _Collector((x.shape[2], x.shape[3]), mode)
    state = model.apply_gate(0, collector.run(model, (), x))
    return PrefixFeatures(state.x, collector, state.encoding)


def route_features(model: Supernet, prefix: PrefixFeatures, route: Route) -> Features:
    """Run a route from the first gate."""
    collector = replace(prefix.collector, maps=dict(prefix.collector.maps))
    y = collector.run(model, route.choices[:1], prefix.x)
    for gates in range(2, len(route.choices) + 1):
        y = collector.run(model, route.choices[:gates], model.apply_gate(gates - 1, y).x)
    return collector.finish(y, route, torch.arange(len(y), device=y.device))


def routed_features(model: Supernet, x: Tensor, decide: Decide) -> list[Features]:
    """Run each image at the route that the gates take for it, and return the results by route."""
    if model.training:
        raise DsnetError("gates decide in eval mode: call .eval(), or give a route")
    collector = _Collector((x.shape[2], x.shape[3]), None)
    y, indices = collector.run(model, (), x), torch.arange(len(x), device=x.device)
    results = list(_run_groups(model, collector, y, (), indices, decide)) if len(x) else []
    return sorted(results, key=lambda features: features.route.number)


def _run_groups(
    model: Supernet,
    collector: _Collector,
    y: Tensor,
    history: tuple[int, ...],
    indices: Tensor,
    decide: Decide,
) -> Iterable[Features]:
    """Group images by the decision of the next gate, and run each group."""
    gate = len(history)
    state = model.apply_gate(gate, y)
    positions = decide(model.gate_scores(state), gate, history[-1] if history else None)
    for position in sorted(set(positions.tolist())):
        members = (positions == position).nonzero()[:, 0]
        choices = (*history, model.gate(gate).choices[position])
        group = collector.select(members)
        z = group.run(model, choices, state.x[members])
        if gate + 1 < len(model.gates):
            yield from _run_groups(model, group, z, choices, indices[members], decide)
        else:
            yield group.finish(z, model.space.of_choices(choices), indices[members])


@dataclass(slots=True)
class _Collector:
    """Run segments and collect the feature map of each stride."""

    size: tuple[int, int]  # of the images
    mode: Mode | None
    stride: int = 1
    started: bool = False  # the image itself is no feature map
    maps: dict[int, Tensor] = field(default_factory=dict)

    def run(self, model: Supernet, choices: tuple[int, ...], x: Tensor) -> Tensor:
        """Run the segment after these choices."""
        model.check_statistics(choices, self.mode)
        for block, size, key in model.chain(choices):
            if block.stride > 1:
                self._collect(x)
                self.stride *= block.stride
            x, self.started = block(x, size, key, self.mode), True
        return x

    def select(self, index: Tensor) -> _Collector:
        """Return a collector for some of the images."""
        return replace(self, maps={stride: x[index] for stride, x in self.maps.items()})

    def finish(self, x: Tensor, route: Route, indices: Tensor) -> Features:
        """Collect the input of the head, and return all maps."""
        self._collect(x)
        return Features(route, indices, dict(self.maps))

    def _collect(self, x: Tensor) -> None:
        if self.started:
            self.maps[self.stride] = x if x.ndim == 4 else _tokens_to_map(x, self.size, self.stride)


def _tokens_to_map(x: Tensor, size: tuple[int, int], stride: int) -> Tensor:
    """Drop the class token and reshape: [B, 1 + h · w, E] → [B, E, h, w]."""
    height, width = (side // stride for side in size)
    return x[:, 1:].transpose(1, 2).reshape(len(x), x.shape[2], height, width)


def feature_shapes(model: Supernet, route: Route, shape: Shape) -> dict[int, Shape]:
    """Compute the channels and true sizes of a route's maps by stride, for images of this shape."""
    stride, shapes, image, started, tokens = 1, dict[int, Shape](), shape, False, False
    for gates in range(len(route.choices) + 1):
        for block, size, _ in model.chain(route.choices[:gates]):
            if block.stride > 1:
                if started:
                    shapes[stride] = shape
                stride *= block.stride
            _, shape = block.cost(shape, size)
            started, tokens = True, tokens or block.makes_tokens
    if tokens:
        shape = Shape(shape.channels, image.height // stride, image.width // stride)
    shapes[stride] = shape
    return shapes
