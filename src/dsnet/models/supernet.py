"""What every supernet is: a prefix, gates, segments between them, and a head.

    image ─ prefix ─ gate 0 ─ segment 0 ─ gate 1 ─ segment 1 ─ … ─ segment n ─ head ─ logits
                       │                    │
                    choice 0             choice 1

The prefix is the same for all images. A gate scales the features for everyone and, when asked, scores
its choices; a segment runs with the slice that was chosen. A family says which blocks stand where
(`prefix_steps`, `segment_steps`); running, grouping, counting and extracting are the same for all.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.gate import Gate, GateEncoding, HeadForm
from dsnet.models.blocks import Head, Step, run_steps
from dsnet.models.features import (
    Features,
    feature_shapes,
    prefix_features,
    route_features,
    routed_features,
)
from dsnet.models.group_by_route import Decide, greedy, run_from_states, run_gated
from dsnet.models.input_spec import InputSpec
from dsnet.routes import Route, RouteSpace, Slice
from dsnet.slicing import KeyState, Mode, SplitBatchNorm2d

__all__ = ["BnKey", "BoundRoute", "ModelSpec", "SliceTable", "GateState", "Supernet", "norm_keys"]

BnKey = Literal["stage", "prefix"]

SliceTable = tuple[tuple[tuple[Slice, ...], ...], ...]
"""[gate][choice] → sizes of the stages that this choice decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What `create_model` needs to build this network again; plain data."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()


class GateState(NamedTuple):
    """What stands at a gate: features already scaled by its attention, and what its routing head reads."""

    x: Tensor
    encoding: GateEncoding
    gate: int  # which gate
    batch_invariant: bool = False  # whether it is scored so, too

    def take(self, at: Tensor) -> GateState:
        """Some of the images, by their places [n]."""
        return GateState(
            self.x[at], GateEncoding(self.encoding.pooled[at], self.encoding.hidden[at]), *self[2:]
        )

    def narrow(self, start: int, stop: int) -> GateState:
        """The images of a range, without a copy."""
        encoding = GateEncoding(self.encoding.pooled[start:stop], self.encoding.hidden[start:stop])
        return GateState(self.x[start:stop], encoding, *self[2:])

    @classmethod
    def join(cls, states: Sequence[GateState]) -> GateState:
        """The images of all, in order."""
        encoding = GateEncoding(
            *(torch.cat(parts) for parts in zip(*(state.encoding for state in states), strict=True))
        )
        return cls(torch.cat([state.x for state in states]), encoding, *states[0][2:])


class Supernet(nn.Module, ABC):
    """One set of weights that runs as any route of its space.

    ``model(x, route)`` runs one route; ``model(x)`` lets the gates decide for every image. A pass takes
    everything it depends on as arguments and, in eval mode, changes nothing.
    """

    gated_mode = Mode(batch_invariant=True)  # of passes in which gates decide
    drops_everywhere = False  # whether stochastic depth and dropout are for all routes, or for the largest
    gate_weights: Mapping[str, tuple[float, float, float]] = MappingProxyType({})
    """Weights (CLS, CP, SGS) of Stage II's losses by the name of a space, where that sets spaces apart."""

    def __init__(
        self,
        name: str,
        *,
        slices: SliceTable,
        input_spec: InputSpec,
        gates: Sequence[Gate],
        head: Head,
        bn_key: BnKey = "prefix",
    ) -> None:
        super().__init__()
        self.spec = ModelSpec(name=name)
        self.slice_table, self.input_spec, self.bn_key = slices, input_spec, bn_key
        self.gates: nn.ModuleList = nn.ModuleList(gates)
        self.head: Head = head

    # --- what a family says ------------------------------------------------------------------------
    @abstractmethod
    def prefix_steps(self) -> list[Step]:
        """The blocks in front of the first gate."""

    @abstractmethod
    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """The blocks behind the gate that made the last of ``choices``, up to the next gate or the head."""

    def seal(self, space: RouteSpace) -> None:
        """Ends construction: a family calls it once all its blocks are in place.

        Lays out the chain of every segment once, so that a pass does not build it again. Whoever puts
        another block in a block's place afterwards calls this again.
        """
        self._space = space
        self._norms = tuple(m for m in self.modules() if isinstance(m, SplitBatchNorm2d))
        self._chains: dict[tuple[int, ...], tuple[Step, ...]] = {(): tuple(self.prefix_steps())}
        for gates in range(1, len(self.gates) + 1):
            for choices in itertools.product(*(range(len(row)) for row in self.slice_table[:gates])):
                self._chains[choices] = tuple(self.segment_steps(choices))
        blocks = dict.fromkeys(step.block for chain in self._chains.values() for step in chain)
        norms = {b: [m for m in b.modules() if isinstance(m, SplitBatchNorm2d)] for b in blocks}
        self._chain_norms = {
            choices: tuple((norm, step.key) for step in chain for norm in norms[step.block])
            for choices, chain in self._chains.items()
        }
        self._chain_stages = {
            choices: _divided(chain, self.slices(choices))
            for choices, chain in self._chains.items()
            if choices
        }

    @property
    def name(self) -> str:
        """What `create_model` calls it."""
        return self.spec.name

    @property
    def choices(self) -> tuple[int, ...]:
        """How many choices every gate of the whole space has."""
        return tuple(len(row) for row in self.slice_table)

    @property
    def merges(self) -> bool:
        """Whether a segment depends on the last choices alone, so that a mixed batch may join histories."""
        return self.bn_key == "stage"

    @property
    def space(self) -> RouteSpace:
        """All routes of this network. `reset_routing` narrows what its gates decide between."""
        return self._space

    def reset_routing(
        self,
        space: RouteSpace | None = None,
        *,
        form: HeadForm | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Gives every gate a new, untrained routing head for ``space``: this network's own, or narrowed."""
        space = self.space if space is None else self.space.narrow(space)
        for stage, choices in enumerate(space.choices):
            self.gate(stage).replace_routing(choices, generator, form=form)

    def chain(self, choices: tuple[int, ...]) -> tuple[Step, ...]:
        """`segment_steps` as laid out; the prefix for no choices."""
        try:
            return self._chains[choices]
        except (KeyError, TypeError):
            possible = " × ".join(f"0 to {len(row) - 1}" for row in self.slice_table)
            raise DsnetError(f"{self.spec.name} has no choices {choices!r}; possible: {possible}") from None

    # --- running -----------------------------------------------------------------------------------
    def forward(self, x: Tensor, route: Route | int | None = None, *, mode: Mode | None = None) -> Tensor:
        """Images [B, C, H, W] → logits [B, classes], at one route or, without one, gated."""
        if route is None:
            return run_gated(self, x, mode=mode).logits
        return self.run_route(x, self.space.resolve(route), mode)

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """`forward` at a route that is known to be one of this network's."""
        state = self.run_prefix(x, mode)
        for stage in range(1, len(self.gates)):
            state = self.run_segment(state, route.choices[:stage], mode)
        return self.run_last_segment(state, route.choices, mode)

    def run_stages(
        self, x: Tensor, route: Route | int, mode: Mode | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits, and what every dynamic stage of the route says of the images: [B, width] each."""
        choices = self.space.resolve(route).choices
        state = self.run_prefix(x, mode)
        stages: list[Tensor] = []
        for gates in range(1, len(choices) + 1):
            made = choices[:gates]
            self._check_segment(state, made, mode)
            y = state.x
            for steps in self._stage_steps(made):
                y = run_steps(steps, y, mode)
                stages.append(self.head.pool(y))
            if gates < len(choices):
                state = self.apply_gate(gates, y)
        return run_steps([self.head_step(choices)], y, mode), tuple(stages)

    def _stage_steps(self, choices: tuple[int, ...]) -> tuple[tuple[Step, ...], ...]:
        """The steps of every stage that the last of ``choices`` decides."""
        stages = self._chain_stages[choices]
        if stages is None:
            sizes = "; ".join(map(str, self.slices(choices)))
            raise DsnetError(
                f"the blocks of {self.name} behind the choices {list(choices)} cannot be divided among its "
                f"stages, of sizes {sizes}. `segment_steps` must give the blocks of all stages in order, "
                "each with its stage's size; where two stages in a row have equal sizes, the table's objects"
            )
        return stages

    @overload
    def features(self, x: Tensor, route: Route | int, *, mode: Mode | None = None) -> Features: ...
    @overload
    def features(self, x: Tensor, route: None = None, *, decide: Decide = greedy) -> list[Features]: ...
    def features(
        self,
        x: Tensor,
        route: Route | int | None = None,
        *,
        mode: Mode | None = None,
        decide: Decide = greedy,
    ) -> Features | list[Features]:
        """Maps of images [B, C, H, W] by stride, at one route; without one gated, a list with one for each.

        The routing heads and the classifier are not needed; see `feature_shapes` for what to expect.
        """
        self.check_images(x)
        if route is None:
            return routed_features(self, x, decide)
        return route_features(self, prefix_features(self, x, mode), self.space.resolve(route))

    def feature_shapes(
        self, route: Route | int, image_size: int | tuple[int, int] | None = None
    ) -> dict[int, Shape]:
        """Channels, height and width of a route's maps, by stride."""
        return feature_shapes(self, self.space.resolve(route), self.input_spec.shape(image_size))

    def route(self, x: Tensor, decide: Decide = greedy) -> Tensor:
        """Decisions [B, gates]: the route's number (one gate) or each gate's choice (several)."""
        return run_gated(self, x, decide, answer=False).choices

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> GateState:
        """Prefix and first gate: all that runs before the first decision."""
        self.check_images(x)
        self.check_statistics((), mode)
        return self.apply_gate(0, run_steps(self.chain(()), x, mode), mode)

    def apply_gate(self, gate: int, x: Tensor, mode: Mode | None = None) -> GateState:
        """What a gate makes of the features in front of it."""
        invariant = mode is not None and mode.batch_invariant
        scaled, encoding = self.gates[gate](x, batch_invariant=invariant)
        return GateState(scaled, encoding, gate, invariant)

    def gate_scores(self, state: GateState) -> Tensor:
        """Scores [B, choices] of the gate for what stands at it."""
        return self.gate(state.gate).score(state.encoding, batch_invariant=state.batch_invariant)

    def run_segment(self, state: GateState, choices: tuple[int, ...], mode: Mode | None = None) -> GateState:
        """From the gate that made the last of ``choices`` to the next one."""
        self._check_segment(state, choices, mode, last=False)
        return self.apply_gate(len(choices), run_steps(self.chain(choices), state.x, mode), mode)

    def run_last_segment(
        self, state: GateState, choices: tuple[int, ...], mode: Mode | None = None
    ) -> Tensor:
        """From the last gate to the logits."""
        self._check_segment(state, choices, mode, last=True)
        return run_steps((*self.chain(choices), self.head_step(choices)), state.x, mode)

    def segment_output(self, x: Tensor, choices: tuple[int, ...], mode: Mode | None = None) -> Tensor:
        """What stands behind the gate that made the last of ``choices``, up to the next gate or the logits.

        ``x`` are features that its attention has scaled; they may be wider than the previous choice, if what
        is beyond it is zero.
        """
        self.check_statistics(choices, mode)
        chain = self.chain(choices)
        return run_steps(
            (*chain, self.head_step(choices)) if len(choices) == len(self.gates) else chain, x, mode
        )

    def run_from_states(
        self, states: dict[tuple[int, ...], GateState], choices: tuple[int, ...], mode: Mode | None = None
    ) -> Tensor:
        """Run a route from the last of its gates that ``states`` holds, and return its logits.

        ``states`` maps choices made so far to the state at the next gate and starts as
        ``{(): model.run_prefix(x)}``. Missing states are added, so that routes
        with a common beginning share it.
        """
        return run_from_states(self, states, choices, mode)

    def head_step(self, choices: tuple[int, ...]) -> Step:
        """The head as the last link of a route's chain."""
        return Step(self.head, self.slices(choices)[-1])

    def slices(self, choices: tuple[int, ...]) -> tuple[Slice, ...]:
        """Sizes of the stages that the last of ``choices`` decides."""
        return self.slice_table[len(choices) - 1][choices[-1]]

    def bind(self, route: Route | int) -> BoundRoute:
        """The network at one route as a module of one argument, sharing these weights.

        `torch.jit.trace` takes it, for images of the size it is traced with; `dsnet.extract` gives a network
        without this restriction.
        """
        return BoundRoute(self, self.space.resolve(route))

    def gate(self, stage: int) -> Gate:
        """The gate in front of a stage."""
        return cast(Gate, self.gates[stage])

    def check_images(self, x: Tensor) -> None:
        """Raises an error that says what images this network takes."""
        takes = f"{self.spec.name} takes images [batch, {self.input_spec.channels}, height, width]"
        if not isinstance(x, Tensor):
            raise DsnetError(f"{takes} as a tensor, not a {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            kind = "nested tensor" if x.is_nested else f"{x.layout} tensor"
            raise DsnetError(f"{takes} as a dense tensor, not a {kind}; convert it (to_dense, torch.stack)")
        if x.ndim != 4 or x.shape[1] != self.input_spec.channels:
            raise DsnetError(f"{takes}, not a tensor of shape {list(x.shape)}")
        self.input_spec.check(x.shape[2], x.shape[3])
        weight = self.head.classifier.weight
        if x.device != weight.device:
            raise DsnetError(
                f"the images are on {x.device}, {self.spec.name} is on {weight.device}; move one of them"
            )
        if x.dtype != weight.dtype and not (
            x.is_floating_point() and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
        ):
            raise DsnetError(
                f"the images are {x.dtype}, {self.spec.name} is {weight.dtype}; convert one of them"
            )

    # --- norm keys ---------------------------------------------------------------------------------
    def key(self, choices: tuple[int, ...]) -> int:
        """Norm key of the layers behind the gate that made the last of ``choices``."""
        if self.bn_key == "stage":
            return choices[-1]
        key = 0
        for choice, options in zip(choices, self.slice_table, strict=False):
            key = key * len(options) + choice
        return key

    def image_keys(self, choices: Tensor) -> Tensor:
        """`key` for every image by itself: choices [B, gates] → [B]."""
        if self.bn_key == "stage":
            return choices[:, -1]
        key = torch.zeros_like(choices[:, 0])
        for column, options in zip(choices.unbind(1), self.slice_table, strict=False):
            key = key * len(options) + column
        return key

    def norms(self, choices: tuple[int, ...]) -> Iterator[tuple[SplitBatchNorm2d, int]]:
        """Every split batch norm between the image and the end of the segment, with the key it uses."""
        for gates in range(len(choices) + 1):
            yield from self._chain_norms[choices[:gates]]

    def key_states(self, route: Route | int) -> set[KeyState]:
        """Where the norm statistics that a route uses come from."""
        return {norm.states[key] for norm, key in self.norms(self.space.resolve(route).choices)}

    def _check_segment(
        self, state: GateState, choices: tuple[int, ...], mode: Mode | None, *, last: bool | None = None
    ) -> None:
        """Raises where ``choices`` do not go on from where ``state`` stands, or lack statistics."""
        self.chain(choices)
        if len(choices) != state.gate + 1:
            raise DsnetError(
                f"what stands at gate {state.gate} goes on with {state.gate + 1} choices, not with {choices}"
            )
        if last is not None and last != (len(choices) == len(self.gates)):
            ahead = "a further gate: use run_segment" if last else "the logits: use run_last_segment"
            raise DsnetError(f"choices {choices} lead to {ahead}")
        self.check_statistics(choices, mode)

    def check_statistics(self, choices: tuple[int, ...], mode: Mode | None) -> None:
        """Raises where the blocks behind the last of ``choices`` lack norm statistics that they would use."""
        if not (
            self.training
            or torch.compiler.is_compiling()  # `bind` has checked
            or (mode is not None and mode.statistics is not None)
        ):
            self._require(choices, self._chain_norms[choices])

    def require_statistics(self, route: Route) -> None:
        """Raises where a route would use norm statistics that were never made.

        A network just built has none at all, and may run; one that has some must have those it uses.
        """
        self._require(route.choices, self.norms(route.choices))

    def _require(self, choices: tuple[int, ...], norms: Iterable[tuple[SplitBatchNorm2d, int]]) -> None:
        fresh = sum(norm.states[key] is KeyState.FRESH for norm, key in norms)
        if fresh and any(any(norm.states) for norm in self._norms):
            raise DsnetError(
                f"{self.spec.name} has batch-norm statistics, but not for the choices {list(choices)} "
                f"({fresh} norms are as built); make them with dsnet.recalibrate(model, batches), or "
                "`dsnet recalibrate`"
            )


def norm_keys(choices: Sequence[int], bn_key: BnKey) -> tuple[int, ...]:
    """How many norm keys each stage has when its gates have so many choices."""
    if bn_key not in ("stage", "prefix"):
        raise DsnetError(f"unknown bn_key {bn_key!r}; possible: stage, prefix")
    return tuple(choices) if bn_key == "stage" else tuple(itertools.accumulate(choices, operator.mul))


def _divided(chain: Sequence[Step], sizes: Sequence[Slice]) -> tuple[tuple[Step, ...], ...] | None:
    """Divide a segment's steps among its stages, by their position; None where the sizes do not say how.

    Steps stand in the order of the stages, each with a size equal to its stage's. Only where two stages in a
    row have equal sizes does it matter which object a step was given.
    """
    stages: list[list[Step]] = [[] for _ in sizes]
    at = 0
    for step in chain:
        following = sizes[at + 1] if at + 1 < len(sizes) else None
        moved_on = step.size is following and step.size is not sizes[at]
        if stages[at] and following is not None and (moved_on or step.size != sizes[at]):
            at += 1
        if step.size != sizes[at]:
            return None
        stages[at].append(step)
    return tuple(map(tuple, stages)) if all(stages) else None


class BoundRoute(nn.Module):
    """A supernet at one route: a module of one argument, for compilers and for timing."""

    def __init__(self, network: Supernet, route: Route) -> None:
        super().__init__()
        network.require_statistics(route)
        self.network, self.bound_route = network, route
        self.training = network.training

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → logits [B, classes]."""
        return self.network.run_route(x, self.bound_route)

    def extra_repr(self) -> str:
        """For printing."""
        return str(self.bound_route)
