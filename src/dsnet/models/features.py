"""Feature maps of a supernet by their stride, for tasks that need more than logits.

A map is the last thing that a network makes at a stride, as what follows reads it: scaled by the attention of
a gate where one stands there. Strides are nominal: a route whose strided convolutions do not pad has smaller
maps.
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
    "PrefixFeatures",
    "Features",
    "prefix_features",
    "feature_shapes",
    "route_features",
    "routed_features",
]


class Features(NamedTuple):
    """What a route makes of images, by stride: maps [n, C, H, W], from the finest to the coarsest."""

    route: Route
    places: Tensor  # [n]: where these images are in the batch
    maps: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class PrefixFeatures:
    """What stands at the first gate: features that it has scaled, and the maps that were made before it."""

    x: Tensor
    walk: _Walk
    encoding: GateEncoding | None = None  # what the routing head reads; none behind `holding`

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return (self.x, *self.walk.maps.values())

    def holding(self, tensors: Sequence[Tensor]) -> PrefixFeatures:
        """The same with other tensors in place of these."""
        maps = dict(zip(self.walk.maps, tensors[1:], strict=True))
        return PrefixFeatures(tensors[0], replace(self.walk, maps=maps))

    def only(self, strides: Iterable[int]) -> PrefixFeatures:
        """Without the maps of other strides."""
        maps = {stride: x for stride, x in self.walk.maps.items() if stride in strides}
        return replace(self, walk=replace(self.walk, maps=maps))


def prefix_features(model: Supernet, x: Tensor, mode: Mode | None = None) -> PrefixFeatures:
    """Images up to the first gate."""
    walk = _Walk((x.shape[2], x.shape[3]), mode)
    state = model.apply_gate(0, walk.run(model, (), x))
    return PrefixFeatures(state.x, walk, state.encoding)


def route_features(model: Supernet, entered: PrefixFeatures, route: Route) -> Features:
    """A route from there on."""
    own = replace(entered.walk, maps=dict(entered.walk.maps))
    y = own.run(model, route.choices[:1], entered.x)
    for gates in range(2, len(route.choices) + 1):
        y = own.run(model, route.choices[:gates], model.apply_gate(gates - 1, y).x)
    return own.end(y, route, torch.arange(len(y), device=y.device))


def routed_features(model: Supernet, x: Tensor, decide: Decide) -> list[Features]:
    """Every image at the route that the gates take for it, routes in order."""
    if model.training:
        raise DsnetError("gates decide in eval mode: call .eval(), or give a route")
    walk = _Walk((x.shape[2], x.shape[3]), None)
    y, places = walk.run(model, (), x), torch.arange(len(x), device=x.device)
    found = list(_behind(model, walk, y, (), places, decide)) if len(x) else []
    return sorted(found, key=lambda features: features.route.number)


def _behind(
    model: Supernet, walk: _Walk, y: Tensor, choices: tuple[int, ...], places: Tensor, decide: Decide
) -> Iterable[Features]:
    """Divides images by what the next gate takes for them, and goes on with each group."""
    gate = len(choices)
    state = model.apply_gate(gate, y)
    taken = decide(model.gate_scores(state), gate, choices[-1] if choices else None)
    for position in sorted(set(taken.tolist())):
        at = (taken == position).nonzero()[:, 0]
        made = (*choices, model.gate(gate).choices[position])
        own = walk.take(at)
        z = own.run(model, made, state.x[at])
        if gate + 1 < len(model.gates):
            yield from _behind(model, own, z, made, places[at], decide)
        else:
            yield own.end(z, model.space.of_choices(made), places[at])


@dataclass(slots=True)
class _Walk:
    """A pass through a network that notes maps on its way."""

    size: tuple[int, int]  # of the images
    mode: Mode | None
    stride: int = 1
    begun: bool = False  # the image itself is no feature
    maps: dict[int, Tensor] = field(default_factory=dict)

    def run(self, model: Supernet, choices: tuple[int, ...], x: Tensor) -> Tensor:
        """The blocks behind the last of ``choices``."""
        model.check_statistics(choices, self.mode)
        for block, size, key in model.chain(choices):
            if block.stride > 1:
                self._note(x)
                self.stride *= block.stride
            x, self.begun = block(x, size, key, self.mode), True
        return x

    def take(self, at: Tensor) -> _Walk:
        """For some of the images."""
        return replace(self, maps={stride: x[at] for stride, x in self.maps.items()})

    def end(self, x: Tensor, route: Route, places: Tensor) -> Features:
        """With what stands in front of the head."""
        self._note(x)
        return Features(route, places, dict(self.maps))

    def _note(self, x: Tensor) -> None:
        if self.begun:
            self.maps[self.stride] = x if x.ndim == 4 else _map_of_tokens(x, self.size, self.stride)


def _map_of_tokens(x: Tensor, size: tuple[int, int], stride: int) -> Tensor:
    """[B, 1 + h · w, E] → [B, E, h, w], without the class token."""
    height, width = (side // stride for side in size)
    return x[:, 1:].transpose(1, 2).reshape(len(x), x.shape[2], height, width)


def feature_shapes(model: Supernet, route: Route, shape: Shape) -> dict[int, Shape]:
    """Channels and true sizes of a route's maps, by stride, for images of this shape."""
    stride, found, image, begun, tokens = 1, dict[int, Shape](), shape, False, False
    for gates in range(len(route.choices) + 1):
        for block, size, _ in model.chain(route.choices[:gates]):
            if block.stride > 1:
                if begun:
                    found[stride] = shape
                stride *= block.stride
            _, shape = block.cost(shape, size)
            begun, tokens = True, tokens or block.makes_tokens
    if tokens:
        shape = Shape(shape.channels, image.height // stride, image.width // stride)
    found[stride] = shape
    return found
