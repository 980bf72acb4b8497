"""A batch in which every image takes its own route: decide, group, run each group truly sliced, put back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.routes import Route, RouteSpace
from dsnet.slicing import Mode

__all__ = ["Decide", "GatedOutput", "Routable", "greedy", "run_assigned", "run_from_states", "run_gated"]


class Standing(Protocol):
    """What stands at a gate: some images' features, and what the gate makes of them."""

    def take(self, at: Tensor) -> Self:
        """Some of the images, by their places [n]."""

    def narrow(self, start: int, stop: int) -> Self:
        """The images of a range, without a copy."""

    @classmethod
    def join(cls, states: Sequence[Self]) -> Self:
        """The images of all, in order."""


S = TypeVar("S", bound=Standing)


class Chooses(Protocol):
    """A gate, as far as routing asks it."""

    @property
    def choices(self) -> tuple[int, ...]:
        """What it decides between."""


class Routable(Protocol[S]):
    """What routing needs of a network: a `Supernet` is one, and so is what a runtime makes of it."""

    @property
    def training(self) -> bool:
        """Whether it is in training mode; routing needs eval mode."""

    @property
    def name(self) -> str:
        """Which network."""

    @property
    def gates(self) -> Sized:
        """As many as it has."""

    @property
    def space(self) -> RouteSpace:
        """All routes."""

    @property
    def choices(self) -> tuple[int, ...]:
        """How many choices every gate of the whole space has."""

    @property
    def merges(self) -> bool:
        """Whether what follows depends on the last choice alone, so that histories may be joined."""

    def gate(self, stage: int) -> Chooses:
        """The gate in front of a stage."""

    def check_images(self, x: Tensor) -> None:
        """Raises an error that says what images this network takes."""

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> S:
        """Prefix and first gate."""

    def gate_scores(self, state: S) -> Tensor:
        """Scores [B, choices] of the gate for what stands at it."""

    def run_segment(self, state: S, choices: tuple[int, ...], mode: Mode | None = None) -> S:
        """From the gate that made the last of ``choices`` to the next one."""

    def run_last_segment(self, state: S, choices: tuple[int, ...], mode: Mode | None = None) -> Tensor:
        """From the last gate to the logits."""

    def run_from_states(
        self, states: dict[tuple[int, ...], S], choices: tuple[int, ...], mode: Mode | None = None
    ) -> Tensor:
        """A route's logits from what stands at the gates on its way, by history."""

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """All images at one route."""


Decide = Callable[[Tensor, int, int | None], Tensor]
"""(scores [B, choices], gate, the previous gate's choice or None) → positions [B] of the choices taken."""


def greedy(scores: Tensor, stage: int, previous: int | None) -> Tensor:
    """The gate's own decision: the best score, the cheaper one of equals."""
    return scores.argmax(1)


class GatedOutput(NamedTuple):
    """Logits and decisions, in the order of the batch."""

    logits: Tensor  # [B, classes]; empty where only the decisions were asked for
    choices: Tensor  # [B, gates]


def run_from_states(
    model: Routable[S], states: dict[tuple[int, ...], S], choices: tuple[int, ...], mode: Mode | None = None
) -> Tensor:
    """A route's logits from what stands at the gates on its way, by history; adds what is not there yet."""
    for gates in range(1, len(choices)):
        history = choices[:gates]
        if history not in states:
            states[history] = model.run_segment(states[history[:-1]], history, mode)
    return model.run_last_segment(states[choices[:-1]], choices, mode)


class _Group(NamedTuple):
    """Images at the same gate whose features have the same shape and norm keys."""

    rows: Tensor  # positions in the batch
    choices: tuple[int, ...]
    state: Any  # a Standing


_DecideGroup = Callable[[Tensor, int, _Group], Tensor]
"""(scores [n, choices], gate, group) → positions [n] of the choices taken."""


def run_gated(
    model: Routable[Any], x: Tensor, decide: Decide = greedy, *, mode: Mode | None = None, answer: bool = True
) -> GatedOutput:
    """Runs every image at the route that ``decide`` takes for it; regroups at every gate.

    Without ``answer`` the last segment is left out and the logits are empty.
    """

    def decide_group(scores: Tensor, stage: int, group: _Group) -> Tensor:
        return decide(scores, stage, group.choices[-1] if group.choices else None)

    return _run(model, x, decide_group, _options, mode, answer=answer)


def run_assigned(model: Routable[Any], x: Tensor, choices: Tensor) -> GatedOutput:
    """Run each image at its own ``choices`` [B, gates]; the gates' scores are computed and ignored."""
    positions = []
    for stage, options in enumerate(model.space.choices):
        matches = choices[:, stage, None] == torch.tensor(options, device=choices.device)
        unknown = choices[:, stage][~matches.any(1)]
        if len(unknown):
            raise DsnetError(f"{model.name} does not have choice {int(unknown[0])} at gate {stage}")
        positions.append(matches.int().argmax(1))

    def decide_group(scores: Tensor, stage: int, group: _Group) -> Tensor:
        return positions[stage][group.rows]

    return _run(model, x, decide_group, lambda model, stage: model.space.choices[stage], None, answer=True)


def _run(
    model: Routable[Any],
    x: Tensor,
    decide: _DecideGroup,
    options_of: Callable[[Routable[Any], int], tuple[int, ...]],
    mode: Mode | None,
    *,
    answer: bool,
) -> GatedOutput:
    if model.training:
        raise DsnetError("a gated pass needs the network in eval mode: call .eval(), or give a route")
    if cast(Any, torch.jit).is_tracing():  # torch does not declare it
        raise DsnetError(
            "a gated pass cannot be traced: the trace would repeat the decisions for these images. Trace one "
            "route, model.bind(route), or use dsnet.runtime.compile"
        )
    model.check_images(x)
    # What leads to a gate; a plan has chosen when it was made. What leads to the logits decides nothing.
    before = getattr(model, "gated_mode", None) if mode is None else mode
    batch, gates = x.shape[0], len(model.gates)
    if x.device.type == "meta" and batch:
        raise DsnetError("decisions need values: a gated pass cannot run on the meta device; give a route")
    if batch == 1:
        return _run_one(model, x, decide, options_of, before, mode, answer=answer)
    choices = torch.empty(batch, gates, dtype=torch.long, device=x.device)
    if batch == 0:  # nothing to decide, but the logits still have their shape
        return GatedOutput(model.run_route(x, model.space.smallest, mode), choices)
    groups = [_Group(torch.arange(batch, device=x.device), (), model.run_prefix(x, before))]
    for _ in range(gates - 1):
        moved = []
        for group in _split(model, groups, decide, options_of(model, len(groups[0].choices)), choices):
            moved.append(group._replace(state=model.run_segment(group.state, group.choices, before)))
        groups = _merge(model, moved)
    groups = _split(model, groups, decide, options_of(model, len(groups[0].choices)), choices)
    logits = []
    for group in groups if answer else ():
        logits.append(model.run_last_segment(group.state, group.choices, mode))
    if not logits:
        return GatedOutput(x.new_empty(0), choices)
    order, joined = torch.cat([group.rows for group in groups]), torch.cat(logits)
    return GatedOutput(torch.empty_like(joined).index_copy(0, order, joined), choices)


def _run_one(
    model: Routable[Any],
    x: Tensor,
    decide: _DecideGroup,
    options_of: Callable[[Routable[Any], int], tuple[int, ...]],
    before: Mode | None,
    mode: Mode | None,
    *,
    answer: bool,
) -> GatedOutput:
    """Run one image, which needs no groups."""
    row = torch.zeros(1, dtype=torch.long, device=x.device)
    state, taken = model.run_prefix(x, before), tuple[int, ...]()
    for stage in range(len(model.gates)):
        if stage:
            state = model.run_segment(state, taken, before)
        decided = decide(model.gate_scores(state), stage, _Group(row, taken, state))
        _check_positions(decided, 1)
        taken = (*taken, _choice(options_of(model, stage), stage, int(decided)))
    choices = torch.tensor([taken], device=x.device)
    return GatedOutput(model.run_last_segment(state, taken, mode) if answer else x.new_empty(0), choices)


def _options(model: Routable[Any], stage: int) -> tuple[int, ...]:
    options = model.gate(stage).choices
    strange = sorted(set(options) - set(model.space.choices[stage]))
    if strange:
        raise DsnetError(f"gate {stage} decides between choices that {model.name} does not have: {strange}")
    return options


def _choice(options: tuple[int, ...], stage: int, position: int) -> int:
    if not 0 <= position < len(options):
        raise DsnetError(f"decide gave position {position}; gate {stage} has 0 to {len(options) - 1}")
    return options[position]


def _split(
    model: Routable[Any],
    groups: list[_Group],
    decide: _DecideGroup,
    options: tuple[int, ...],
    choices: Tensor,
) -> list[_Group]:
    """Decide at the gate of the groups, write the choices and split the groups by them."""
    stage = len(groups[0].choices)
    taken = []
    for group in groups:
        scores = model.gate_scores(group.state)
        taken.append(decide(scores, stage, group))
        _check_positions(taken[-1], len(scores))
    positions = torch.cat(taken).tolist()  # the one time per gate that the host waits
    for position in set(positions):
        _choice(options, stage, position)
    parts, start = [], 0
    for group, own in zip(groups, taken, strict=True):
        count = len(group.rows)
        sizes = Counter(positions[start : start + count])
        start += count
        if len(sizes) > 1:  # sorted once: each choice's images then lie side by side
            order = own.argsort(stable=True)
            group = group._replace(rows=group.rows[order], state=group.state.take(order))
        begin = 0
        for position, size in sorted(sizes.items()):
            part = group._replace(choices=(*group.choices, options[position]))
            if size < count:
                state = group.state.narrow(begin, begin + size)
                part = part._replace(rows=group.rows[begin : begin + size], state=state)
            choices[part.rows, stage] = options[position]
            parts.append(part)
            begin += size
    return parts


def _check_positions(positions: object, images: int) -> None:
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(positions, Tensor) or positions.shape != (images,) or positions.dtype not in integers:
        given = (
            f"a {positions.dtype} tensor of shape {list(positions.shape)}"
            if isinstance(positions, Tensor)
            else f"a {type(positions).__name__}"
        )
        raise DsnetError(f"decide must give one position for each of {images} images, not {given}")


def _merge(model: Routable[Any], groups: list[_Group]) -> list[_Group]:
    """Joins groups for which all that follows is the same; one history then stands for all of them."""
    alike: dict[tuple[int, ...], list[_Group]] = {}
    for group in groups:
        alike.setdefault(group.choices[-1:] if model.merges else group.choices, []).append(group)
    return [members[0] if len(members) == 1 else _join(members) for members in alike.values()]


def _join(groups: list[_Group]) -> _Group:
    state = groups[0].state.join([group.state for group in groups])
    return _Group(torch.cat([group.rows for group in groups]), groups[0].choices, state)
