"""Modules that differ in their sizes alone, run as one network in which every image has its own route."""

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
from dsnet.runtime.executors.ragged._assignment import RouteAssignment
from dsnet.runtime.executors.ragged._layers import (
    Attention,
    ClassifierLayer,
    Depthwise,
    FusionSource,
    Gated,
    GateLayer,
    Pointwise,
    SaveFeatures,
    SingleRouteGateLayer,
    State,
    Stem,
)
from dsnet.runtime.executors.ragged.support import PASS_THROUGH, Link, chain_of, mismatch
from dsnet.runtime.partition.feature_maps import Behind, Front

__all__ = ["Ragged"]


class Ragged(Executable):
    """Modules of the same structure as one function of images and their routes.

    It returns what the modules return. Logits, or the rows of a detector, are written to ``out`` if it is
    given; there, the rows of skipped images keep their values.

    Args:
        modules: A module per route.

    Raises:
        DsnetError: There is no kernel for a layer, or the modules differ in more than their sizes.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        chains = [chain_of(module) for module in modules]
        reason = mismatch(chains)
        if reason is not None:
            raise DsnetError(reason)
        module = modules[0]
        self.returns_rows = isinstance(module, Front)
        self.row_shapes = tuple(module.handed.values()) if isinstance(module, Behind) else ()
        self.layers = _layers(chains)
        self.count = len(modules)

    def __call__(
        self, *inputs: Tensor, assignment: RouteAssignment | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Run images or features [B, C, H, W]; return features and scores, or logits."""
        (x,) = inputs
        assignment = RouteAssignment.single(len(x), x.device) if assignment is None else assignment
        images, channels, height, width = x.shape
        saved: list[State] = []
        if isinstance(self.layers[0], Stem):
            x = x.to(self.layers[0].w.dtype).contiguous()
            state = State(torch.full((1,), x.data_ptr(), device=x.device), ((height, width),))
        elif self.row_shapes:
            *saved, state = _split_row(x, self.row_shapes)
        else:
            features = x.permute(0, 2, 3, 1).contiguous().view(images, height * width, channels)
            state = State(features, ((height, width),))
        output = self.run(state, assignment, out, saved)
        if isinstance(output, Gated):
            return output.row if self.returns_rows else output.features, output.scores
        return (output,)

    def run(
        self,
        state: State,
        assignment: RouteAssignment,
        out: Tensor | None = None,
        saved: Sequence[State] = (),
    ) -> Gated | Tensor:
        """Run features, all of the same size, at the routes of their images.

        Args:
            state: Features in front of the first layer.
            assignment: The routes.
            out: Where logits or rows are written.
            saved: Features that a detector saved in front of the gate.
        """
        main = [layer for layer in self.layers if not isinstance(layer, SaveFeatures | FusionSource)]
        if state.scale is not None and not isinstance(main[0] if main else None, Pointwise):
            state = State(state.scaled, state.sizes)
        state, *early = (s._replace(sizes=s.sizes[:1] * self.count) for s in (state, *saved))
        last, kept = self.layers[-1], list[State]()
        if isinstance(last, FusionSource) and out is None:
            out = state.x.new_empty(len(state.x), last.numbers)
        with on_device_of(state.x):
            for layer in self.layers:
                if isinstance(layer, SaveFeatures):
                    kept.append(state)
                elif isinstance(layer, FusionSource):
                    assert out is not None
                    layer.write(early.pop(0) if layer.early else state, assignment, out)
                elif layer is last:
                    output: Gated | Tensor = layer.run(state, assignment, out)
                    return output._replace(saved=tuple(kept)) if isinstance(output, Gated) else output
                else:
                    state = layer.run(state, assignment)
        assert out is not None
        return out

    def at(self, route: int) -> Executable:
        """Return an executable that runs all images at one route."""
        assert 0 <= route < self.count, f"route {route} of {self.count}"
        return self if self.count == 1 else _SingleRoute(self, route)

    @property
    def resident(self) -> int:
        """The bytes of all weights."""
        sizes = {
            tensor.data_ptr(): tensor.nbytes
            for layer in self.layers
            for value in vars(layer).values()
            for tensor in (value if isinstance(value, tuple) else (value,))
            if isinstance(tensor, Tensor)
        }
        return sum(sizes.values())


class _SingleRoute(Executable):
    def __init__(self, ragged: Ragged, route: int) -> None:
        self.ragged, self.route = ragged, route

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x = inputs[0]
        routes = torch.full((len(x),), self.route, dtype=torch.int32, device=x.device)
        return self.ragged(x, assignment=RouteAssignment.of_routes(routes, self.ragged.count))


def _split_row(rows: Tensor, shapes: Sequence[Shape]) -> list[State]:
    """Split rows [images, numbers, 1, 1] into the features of several maps."""
    states, start = [], 0
    for channels, height, width in shapes:
        stop = start + channels * height * width
        x = rows[:, start:stop].reshape(len(rows), height * width, channels).contiguous()
        states.append(State(x, ((height, width),)))
        start = stop
    return states


def _layers(chains: Sequence[Sequence[Link]]) -> list[Any]:
    layers: list[Any] = []
    columns = list(zip(*chains, strict=True))
    start = 0  # of the channels of the next fusion source
    for position, links in enumerate(columns):
        kind = links[0][0]
        following = next((c[0][0] for c in columns[position + 1 :] if c[0][0] not in PASS_THROUGH), "")
        summed = following in ("attention", "classifier", "gate")
        modules = [row for _, row in links]
        if kind == "save":
            layers.append(SaveFeatures())
        elif kind in ("source", "early source"):
            layers.append(FusionSource(modules, start, early=kind == "early source"))
            start = layers[-1].stop
        elif kind == "pointwise":
            layers.append(Pointwise(modules, store=following != "classifier", summed=summed))
        elif kind == "depthwise":
            layers.append(Depthwise(modules, summed=summed))
        elif kind == "attention":
            layers.append(Attention([row[0] for row in modules]))
        elif kind == "stem":
            layers.append(Stem(cast(nn.Conv2d, modules[0][0]), modules[0][1]))
        elif kind == "gate":
            layers.append(GateLayer(cast(InferenceGate, modules[0][0])))
        elif kind == "single-route gate":
            layers.append(SingleRouteGateLayer())
        else:
            layers.append(ClassifierLayer([cast(nn.Linear, row[0]) for row in modules]))
    return layers
