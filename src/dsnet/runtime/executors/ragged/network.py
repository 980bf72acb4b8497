"""Plain modules that differ in their widths alone, run as one: every image at the widths of its route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.gate import InferenceGate
from dsnet.kernels.launch import on_device_of
from dsnet.runtime.backends.base import Executable
from dsnet.runtime.executors.ragged.assignment import RouteAssignment
from dsnet.runtime.executors.ragged.layers import (
    Attention,
    Classifier,
    Depthwise,
    Gate,
    Gated,
    Note,
    OpenGate,
    Pointwise,
    Source,
    State,
    Stem,
)
from dsnet.runtime.executors.ragged.support import ASIDE, Link, chain_of, mismatch
from dsnet.runtime.partition.feature_maps import Behind, Front

__all__ = ["Ragged"]


class Ragged(Executable):
    """Modules of one structure as one function of images and their routes.

    Gives what the modules give; with ``out`` logits, or a detector's rows, are written there, those of images
    left out stay as they are.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        chains = [chain_of(module) for module in modules]
        reason = mismatch(chains)
        if reason is not None:
            raise DsnetError(reason)
        module = modules[0]
        self.gives_rows = isinstance(module, Front)
        self.handed = tuple(module.handed.values()) if isinstance(module, Behind) else ()  # as one row
        self.layers = _layers(chains)
        self.count = len(modules)

    def __call__(
        self, *inputs: Tensor, assignment: RouteAssignment | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Images, or features, [B, C, H, W] → features and scores, or logits."""
        (x,) = inputs
        assignment = RouteAssignment.single(len(x), x.device) if assignment is None else assignment
        images, channels, height, width = x.shape
        noted: list[State] = []
        if isinstance(self.layers[0], Stem):
            x = x.to(self.layers[0].w.dtype).contiguous()
            state = State(torch.full((1,), x.data_ptr(), device=x.device), ((height, width),))
        elif self.handed:
            *noted, state = _taken_apart(x, self.handed)
        else:
            begin = x.permute(0, 2, 3, 1).contiguous().view(images, height * width, channels)
            state = State(begin, ((height, width),))
        found = self.run(state, assignment, out, noted)
        if isinstance(found, Gated):
            return found.row if self.gives_rows else found.features, found.scores
        return (found,)

    def run(
        self,
        state: State,
        assignment: RouteAssignment,
        out: Tensor | None = None,
        noted: Sequence[State] = (),
    ) -> Gated | Tensor:
        """Features between two layers → those at the gate, or logits, or with features of before a row.

        All routes begin with the same sizes.
        """
        through = [layer for layer in self.layers if not isinstance(layer, Note | Source)]
        if state.scale is not None and not isinstance(through[0] if through else None, Pointwise):
            state = State(state.scaled, state.sizes)
        state, *given = (s._replace(sizes=s.sizes[:1] * self.count) for s in (state, *noted))
        last, kept = self.layers[-1], list[State]()
        if isinstance(last, Source) and out is None:
            out = state.x.new_empty(len(state.x), last.numbers)
        with on_device_of(state.x):
            for layer in self.layers:
                if isinstance(layer, Note):
                    kept.append(state)
                elif isinstance(layer, Source):
                    assert out is not None
                    layer.write(given.pop(0) if layer.early else state, assignment, out)
                elif layer is last:
                    found: Gated | Tensor = layer.run(state, assignment, out)
                    return found._replace(noted=tuple(kept)) if isinstance(found, Gated) else found
                else:
                    state = layer.run(state, assignment)
        assert out is not None
        return out

    def at(self, route: int) -> Executable:
        """Return what runs all images at one of the routes."""
        return self if self.count == 1 else _SingleRoute(self, route)

    @property
    def resident(self) -> int:
        """Bytes of weights."""
        found = {
            tensor.data_ptr(): tensor.nbytes
            for layer in self.layers
            for value in vars(layer).values()
            for tensor in (value if isinstance(value, tuple) else (value,))
            if isinstance(tensor, Tensor)
        }
        return sum(found.values())


class _SingleRoute(Executable):
    def __init__(self, ragged: Ragged, route: int) -> None:
        self.ragged, self.route = ragged, route

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x = inputs[0]
        routes = torch.full((len(x),), self.route, dtype=torch.int32, device=x.device)
        return self.ragged(x, assignment=RouteAssignment.of_routes(routes, self.ragged.count))


def _taken_apart(row: Tensor, shapes: Sequence[Shape]) -> list[State]:
    """Features of these shapes out of what holds them one behind the other [images, numbers, 1, 1]."""
    found, start = [], 0
    for channels, height, width in shapes:
        stop = start + channels * height * width
        x = row[:, start:stop].reshape(len(row), height * width, channels).contiguous()
        found.append(State(x, ((height, width),)))
        start = stop
    return found


def _layers(chains: Sequence[Sequence[Link]]) -> list[Any]:
    layers: list[Any] = []
    columns = list(zip(*chains, strict=True))
    start = 0  # of a source's channels
    for at, links in enumerate(columns):
        kind = links[0][0]
        following = next((later[0][0] for later in columns[at + 1 :] if later[0][0] not in ASIDE), "")
        summed = following in ("attention", "classifier", "gate")
        parts = [own for _, own in links]
        if kind == "note":
            layers.append(Note())
            continue
        if kind in ("source", "noted"):
            layers.append(Source(parts, start, early=kind == "noted"))
            start = layers[-1].stop
            continue
        if kind == "pointwise":
            layers.append(Pointwise(parts, store=following != "classifier", summed=summed))
        elif kind == "depthwise":
            layers.append(Depthwise(parts, summed=summed))
        elif kind == "attention":
            layers.append(Attention([own[0] for own in parts]))
        elif kind == "stem":
            layers.append(Stem(cast(nn.Conv2d, parts[0][0]), parts[0][1]))
        elif kind == "gate":
            layers.append(Gate(cast(InferenceGate, parts[0][0])))
        elif kind == "open":
            layers.append(OpenGate())
        else:
            layers.append(Classifier([cast(nn.Linear, own[0]) for own in parts]))
    return layers
