"""The base class of all supernets: a prefix, gates with segments between them, and a head.

    image ─ prefix ─ gate 0 ─ segment 0 ─ gate 1 ─ segment 1 ─ … ─ segment n ─ head ─ logits
                       │                    │
                    choice 0             choice 1

The prefix is the same for all images. A gate scales the features and, on request, scores its choices. A
segment runs with the slice of the choice taken. A family says which blocks the prefix and the segments have
(`prefix_steps`, `segment_steps`). Running, grouping, counting and extraction are the same for all families.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.gate import Gate, GateEncoding, HeadForm, SingleRouteGate
from dsnet.models.blocks import Step, run_steps
from dsnet.models.features import Features, feature_shapes, prefix_features, route_features, routed_features
from dsnet.models.group_by_route import Decide, greedy, run_from_states, run_gated
from dsnet.models.heads import Head
from dsnet.models.input_spec import InputSpec
from dsnet.models.layout import BnKey, SliceTable, norm_keys, split_stages
from dsnet.models.options import GateOptions
from dsnet.routes import Route, RouteSpace, Slice
from dsnet.slicing import Factory, KeyState, Mode, SplitBatchNorm2d

__all__ = ["BoundRoute", "GateState", "ModelSpec", "Supernet"]

C = TypeVar("C", int, Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The arguments with which `create_model` builds a network again; plain data.

    Attributes:
        name: Name of the model.
        options: Names and values of the options that were given.

    Examples:
        >>> import dsnet
        >>> dsnet.create_model("ds_mbnet_tiny", num_classes=3).spec
        ModelSpec(name='ds_mbnet_tiny', options=(('num_classes', 3),))
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()


class GateState(NamedTuple):
    """Images at a gate: their features, scaled by its attention, and the input of its routing head."""

    x: Tensor
    encoding: GateEncoding
    gate: int  # index of the gate
    batch_invariant: bool = False  # whether the gate scores batch-invariantly too

    def take(self, index: Tensor) -> GateState:
        """Select images by index [n]."""
        return GateState(self.x[index], self.encoding.select(index), *self[2:])

    def narrow(self, start: int, stop: int) -> GateState:
        """Select a range of images, without a copy."""
        return GateState(self.x[start:stop], self.encoding.select(slice(start, stop)), *self[2:])

    @classmethod
    def join(cls, states: Sequence[GateState]) -> GateState:
        """Concatenate states of the same gate."""
        encoding = GateEncoding.cat(state.encoding for state in states)
        return cls(torch.cat([state.x for state in states]), encoding, *states[0][2:])


class Supernet(nn.Module, ABC):
    """One set of weights that runs as any route of its space.

    ``model(x, route)`` runs one route; ``model(x)`` lets the gates decide for each image. A pass takes
    everything it depends on as arguments and, in eval mode, changes nothing.

    A family derives from this class, sets ``head`` and its blocks in its constructor, ends that with `seal`,
    and defines `prefix_steps` and `segment_steps`.

    Args:
        space: All routes, cheapest first.
        slices: Sizes of the stages that each choice of each gate decides.
        gate_widths: Channels of the features at each gate, at full width.
        input_spec: The images that the network takes; their channels are those of ``options``.
        options: Options of the model.
        factory: Device and precision of the parameters.
        bn_key: With several gates, keep norm statistics for each history of choices (``prefix``), or for each
            choice of the stage's own gate (``stage``).

    Examples:
        >>> import dsnet
        >>> model = dsnet.create_model("ds_mbnet_tiny", num_classes=3)
        >>> images = torch.zeros(2, 3, 16, 16)
        >>> model(images, model.space.largest).shape, model.route(images).shape
        (torch.Size([2, 3]), torch.Size([2, 1]))
    """

    gated_mode = Mode(batch_invariant=True)  # of passes in which gates decide
    drops_everywhere = False  # apply stochastic depth and dropout to all routes, not only to the largest
    gate_type: type[Gate] = Gate
    gate_weights: Mapping[str, tuple[float, float, float]] = MappingProxyType({})
    """Weights (CLS, CP, SGS) of Stage II's losses by the name of a space, where they differ by space."""

    key_set: int = 0
    """Number of the set of norm keys, where a network has several: one for each image size."""

    head: Head
    """The classifier. A family sets it in its constructor, after that of this class."""

    def __init__(
        self,
        space: RouteSpace,
        *,
        slices: SliceTable,
        gate_widths: Sequence[int],
        input_spec: InputSpec,
        options: GateOptions,
        factory: Factory,
        bn_key: BnKey = "prefix",
    ) -> None:
        super().__init__()
        self.spec = ModelSpec(name=space.name)
        self.slice_table, self.bn_key, self._space = slices, bn_key, space
        self.input_spec = replace(input_spec, channels=options.in_channels)
        self.gates = nn.ModuleList(
            self.gate_type(width, choices=choices, form=options.head_form(), **factory)
            if len(space) > 1
            else SingleRouteGate()
            for width, choices in zip(gate_widths, space.choices, strict=True)
        )

    # --- defined by a family -----------------------------------------------------------------------
    @abstractmethod
    def prefix_steps(self) -> list[Step]:
        """Return the blocks before the first gate."""

    @abstractmethod
    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """Return the blocks from the gate that made the last of ``choices`` to the next gate or the head."""

    def seal(self) -> None:
        """Lay out the steps of all segments. A family calls this at the end of its constructor.

        Call it again after replacing a block.
        """
        self._norms = tuple(m for m in self.modules() if isinstance(m, SplitBatchNorm2d))
        prefix = tuple(step._replace(key=self.key_set) for step in self.prefix_steps())
        self._steps: dict[tuple[int, ...], tuple[Step, ...]] = {(): prefix}
        for gates in range(1, len(self.gates) + 1):
            for choices in itertools.product(*map(range, self.choices[:gates])):
                self._steps[choices] = tuple(self.segment_steps(choices))
        self._stages = {c: split_stages(steps, self.slices(c)) for c, steps in self._steps.items() if c}
        blocks = {step.block for steps in self._steps.values() for step in steps}
        norms = {b: [m for m in b.modules() if isinstance(m, SplitBatchNorm2d)] for b in blocks}
        self._segment_norms = {
            choices: tuple((norm, step.key) for step in steps for norm in norms[step.block])
            for choices, steps in self._steps.items()
        }

    # --- structure ---------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The name that `create_model` takes."""
        return self.spec.name

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of choices of each gate in the full space."""
        return tuple(len(row) for row in self.slice_table)

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """The choices that lead to each segment, those of the first gate first."""
        return tuple(choices for choices in self._steps if choices)

    @property
    def merges(self) -> bool:
        """Whether a segment depends on the last choice only, so that routing histories can be merged."""
        return self.bn_key == "stage"

    @property
    def space(self) -> RouteSpace:
        """All routes of this network. `reset_routing` narrows what its gates decide between."""
        return self._space

    def gate(self, stage: int) -> Gate:
        """Return the gate before a stage."""
        return cast(Gate, self.gates[stage])

    def at(self, route: Route | int) -> tuple[Supernet, Route]:
        """Return the network that runs a route at the route's image size, and its own route.

        This is the network itself, unless it has several image sizes.
        """
        return self, self.space.resolve(route)

    def chain(self, choices: tuple[int, ...]) -> tuple[Step, ...]:
        """Return the steps of a segment.

        Args:
            choices: Choices made so far; none for the prefix.

        Raises:
            DsnetError: The network has no such choices.
        """
        try:
            return self._steps[choices]
        except (KeyError, TypeError):
            possible = " × ".join(f"0 to {len(row) - 1}" for row in self.slice_table)
            raise DsnetError(f"{self.spec.name} has no choices {choices!r}; possible: {possible}") from None

    def head_step(self, choices: tuple[int, ...]) -> Step:
        """Return the head as the last step of a route."""
        return Step(self.head, self.slices(choices)[-1])

    def slices(self, choices: tuple[int, ...]) -> tuple[Slice, ...]:
        """Return the sizes of the stages that the last of ``choices`` decides."""
        return self.slice_table[len(choices) - 1][choices[-1]]

    def reset_routing(
        self,
        space: RouteSpace | None = None,
        *,
        form: HeadForm | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Give each gate a new, untrained routing head.

        Args:
            space: Routes to decide between (default: all routes of this network).
            form: Form of the heads (default: that of the present ones).
            generator: Source of the initial weights.
        """
        space = self.space if space is None else self.space.narrow(space)
        for stage, choices in enumerate(space.choices):
            self.gate(stage).replace_routing(choices, generator, form=form)

    # --- running -----------------------------------------------------------------------------------
    def forward(self, x: Tensor, route: Route | int | None = None, *, mode: Mode | None = None) -> Tensor:
        """Compute logits [B, classes] of images [B, C, H, W].

        Args:
            x: Images.
            route: The route for all images. Without one, the gates decide for each image.
            mode: How the pass runs, e.g. which norm statistics it uses.

        Raises:
            DsnetError: The route is not one of the space, the images do not fit, or norm statistics are
                missing.
        """
        if route is None:
            return run_gated(self, x, mode=mode).logits
        return self.run_route(x, self.space.resolve(route), mode)

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """Compute logits at a route that is known to be in the space of this network."""
        state = self.run_prefix(x, mode)
        for stage in range(1, len(self.gates)):
            state = self.run_segment(state, route.choices[:stage], mode)
        return self.run_last_segment(state, route.choices, mode)

    def run_stages(
        self, x: Tensor, route: Route | int, mode: Mode | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute logits and the features of each stage.

        Args:
            x: Images [B, C, H, W].
            route: The route.
            mode: How the pass runs.

        Returns:
            Logits [B, classes], and the pooled features [B, width] of each dynamic stage of the route.

        Examples:
            >>> import dsnet
            >>> model = dsnet.create_model("ds_resnet_tiny")
            >>> logits, stages = model.run_stages(torch.zeros(2, 3, 16, 16), model.space.largest)
            >>> [tuple(stage.shape) for stage in stages]
            [(2, 64), (2, 128)]
        """
        choices = self.space.resolve(route).choices
        state = self.run_prefix(x, mode)
        stages: list[Tensor] = []
        for gates in range(1, len(choices) + 1):
            history = choices[:gates]
            self.check_statistics(history, mode)
            y = state.x
            divided = self._stages[history]
            if divided is None:
                raise DsnetError(
                    f"the blocks of {self.name} after the choices {list(history)} do not follow its stages, "
                    f"of sizes {'; '.join(map(str, self.slices(history)))}. `segment_steps` must give the "
                    "blocks of all stages in order, each with its stage's size; where two stages in a row "
                    "have equal sizes, the table's objects"
                )
            for steps in divided:
                y = run_steps(steps, y, mode)
                stages.append(self.head.pool(y))
            if gates < len(choices):
                state = self.apply_gate(gates, y)
        return run_steps([self.head_step(choices)], y, mode), tuple(stages)

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
        """Compute feature maps by stride, without the classifier.

        Args:
            x: Images [B, C, H, W].
            route: The route for all images. Without one, the gates decide for each image.
            mode: How the pass runs; with a route only.
            decide: How gates decide; without a route only.

        Returns:
            The maps at ``route``, or a list with one result for each route taken. `feature_shapes` gives the
            shapes of the maps.

        Examples:
            >>> import dsnet
            >>> model = dsnet.create_model("ds_mbnet_tiny")
            >>> maps = model.features(torch.zeros(2, 3, 16, 16), 0).maps
            >>> {stride: tuple(x.shape) for stride, x in maps.items()}
            {1: (2, 4, 16, 16), 2: (2, 12, 8, 8), 4: (2, 8, 4, 4), 8: (2, 16, 2, 2)}
        """
        self.check_images(x)
        if route is None:
            return routed_features(self, x, decide)
        return route_features(self, prefix_features(self, x, mode), self.space.resolve(route))

    def feature_shapes(
        self, route: Route | int, image_size: int | tuple[int, int] | None = None
    ) -> dict[int, Shape]:
        """Compute the shapes of a route's feature maps by stride.

        Args:
            route: The route.
            image_size: Side of the images, or (height, width) (default: that of the model).
        """
        return feature_shapes(self, self.space.resolve(route), self.input_spec.shape(image_size))

    def route(self, x: Tensor, decide: Decide = greedy) -> Tensor:
        """Let the gates decide for images [B, C, H, W].

        Returns:
            The choice of each gate, [B, gates]. With one gate this is the number of the route; with several,
            ``model.space.of_choices`` gives the route.
        """
        return run_gated(self, x, decide, logits=False).choices

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> GateState:
        """Run the prefix and the first gate, which is all that precedes the first decision."""
        self.check_images(x)
        self.check_statistics((), mode)
        return self.apply_gate(0, run_steps(self.chain(()), x, mode), mode)

    def apply_gate(self, gate: int, x: Tensor, mode: Mode | None = None) -> GateState:
        """Apply the attention of a gate to the features before it."""
        invariant = mode is not None and mode.batch_invariant
        scaled, encoding = self.gates[gate](x, batch_invariant=invariant)
        return GateState(scaled, encoding, gate, invariant)

    @property
    def has_gate(self) -> bool:
        """Whether gates can decide between the routes."""
        return True

    def require_gate(self) -> None:
        """Raise unless gates can decide between the routes of this network."""

    def gate_encoding(self, state: GateState) -> GateEncoding:
        """Return the input of the routing head of the gate that ``state`` is at."""
        return state.encoding

    def gate_scores(self, state: GateState) -> Tensor:
        """Compute the scores [B, choices] of the gate that ``state`` is at."""
        return self.gate(state.gate).score(state.encoding, batch_invariant=state.batch_invariant)

    def run_segment(self, state: GateState, choices: tuple[int, ...], mode: Mode | None = None) -> GateState:
        """Run from the gate that made the last of ``choices`` to the next gate.

        Args:
            state: Images at the gate that made the last choice.
            choices: Choices made so far, including that of this gate.
            mode: How the pass runs.

        Returns:
            The images at the next gate.
        """
        self._check_segment(state, choices, last=False)
        return self.apply_gate(len(choices), self.segment_output(state.x, choices, mode), mode)

    def run_last_segment(
        self, state: GateState, choices: tuple[int, ...], mode: Mode | None = None
    ) -> Tensor:
        """Run from the last gate to the logits [B, classes]."""
        self._check_segment(state, choices, last=True)
        return self.segment_output(state.x, choices, mode)

    def segment_output(self, x: Tensor, choices: tuple[int, ...], mode: Mode | None = None) -> Tensor:
        """Run a segment on features, up to the input of the next gate or to the logits.

        Args:
            x: Features, scaled by the gate that made the last of ``choices``. They may be wider than the
                previous choice if the further channels are zero.
            choices: Choices made so far.
            mode: How the pass runs.
        """
        self.check_statistics(choices, mode)
        steps = self.chain(choices)
        if len(choices) == len(self.gates):
            steps = (*steps, self.head_step(choices))
        return run_steps(steps, x, mode)

    def run_from_states(
        self, states: dict[tuple[int, ...], GateState], choices: tuple[int, ...], mode: Mode | None = None
    ) -> Tensor:
        """Run a route from the last of its gates that ``states`` holds, and return its logits.

        Args:
            states: Images at the next gate by the choices made so far, at first
                ``{(): model.run_prefix(x)}``. Missing states are added, so that routes with a common
                beginning share it.
            choices: Choices of the route.
            mode: How the pass runs.

        Returns:
            Logits [B, classes].

        Examples:
            >>> import dsnet
            >>> model = dsnet.create_model("ds_resnet_tiny")
            >>> states = {(): model.run_prefix(torch.zeros(2, 3, 16, 16))}
            >>> logits = [model.run_from_states(states, choices) for choices in ((0, 0), (0, 3))]
            >>> sorted(states)
            [(), (0,)]
        """
        return run_from_states(self, states, choices, mode)

    def bind(self, route: Route | int) -> BoundRoute:
        """Return the network at one route as a module of one argument that shares these weights.

        It can be compiled, or traced by `torch.jit.trace` for images of the size traced with. `dsnet.extract`
        returns a network without this restriction.

        Examples:
            >>> import dsnet
            >>> dsnet.create_model("ds_mbnet_tiny").bind(0)(torch.zeros(2, 3, 16, 16)).shape
            torch.Size([2, 10])
        """
        return BoundRoute(self, self.space.resolve(route))

    def check_images(self, x: Tensor) -> None:
        """Raise unless ``x`` are images that this network takes, on its device and in its precision."""
        self.input_spec.check_images(x, self.spec.name, self.head.classifier.weight)

    # --- norm keys ---------------------------------------------------------------------------------
    def key(self, choices: tuple[int, ...]) -> int:
        """Return the norm key of the segment after these choices."""
        return self._key(choices)

    def image_keys(self, choices: Tensor) -> Tensor:
        """Return the `key` of each image: choices [B, gates] → [B]."""
        return self._key(choices.unbind(1))

    def _key(self, choices: Sequence[C]) -> C:
        key = choices[-1 if self.bn_key == "stage" else 0]
        if self.bn_key == "prefix":
            for choice, row in zip(choices[1:], self.slice_table[1:], strict=False):
                key = key * len(row) + choice
        if self.key_set:
            key = key + self.key_set * norm_keys(self.choices, self.bn_key)[len(choices) - 1]
        return key

    def norms(self, choices: tuple[int, ...]) -> Iterator[tuple[SplitBatchNorm2d, int]]:
        """Yield each split batch norm from the image to the end of the segment, with the key it uses."""
        for gates in range(len(choices) + 1):
            yield from self._segment_norms[choices[:gates]]

    def key_states(self, route: Route | int) -> set[KeyState]:
        """Return the states of the norm statistics that a route uses."""
        return {norm.states[key] for norm, key in self.norms(self.space.resolve(route).choices)}

    def _check_segment(self, state: GateState, choices: tuple[int, ...], *, last: bool) -> None:
        """Raise unless ``choices`` lead from ``state`` to a further gate, or with ``last`` to the head."""
        self.chain(choices)
        if len(choices) != state.gate + 1:
            count = "1 choice" if state.gate == 0 else f"{state.gate + 1} choices"
            raise DsnetError(f"expected {count} at gate {state.gate}, got {choices}")
        if last != (len(choices) == len(self.gates)):
            target = "a further gate: use run_segment" if last else "the logits: use run_last_segment"
            raise DsnetError(f"choices {choices} lead to {target}")

    def check_statistics(self, choices: tuple[int, ...], mode: Mode | None) -> None:
        """Raise if the segment after these choices lacks norm statistics that it would use."""
        if not (
            self.training
            or torch.compiler.is_compiling()  # `bind` has checked
            or (mode is not None and mode.statistics is not None)
        ):
            self._require(choices, self._segment_norms[choices])

    def require_statistics(self, route: Route) -> None:
        """Raise if a route would use norm statistics that were never computed.

        A network just built has none and may run. A network that has some must have those it uses.
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


class BoundRoute(nn.Module):
    """A supernet at one route, as a module of one argument. `Supernet.bind` makes it."""

    def __init__(self, network: Supernet, route: Route) -> None:
        super().__init__()
        network.require_statistics(route)
        self.network, self.bound_route = network, route
        self.training = network.training

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [B, classes] of images [B, C, H, W]."""
        return self.network.run_route(x, self.bound_route)

    def extra_repr(self) -> str:
        """Return the route for printing."""
        return str(self.bound_route)
