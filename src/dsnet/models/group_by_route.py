"""Gated passes: each image of a batch takes its own route.

At each gate the images are grouped by the gate's decision, and each group runs the next segment at its own
size. Logits return in the order of the batch.
"""

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

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class RoutableState(Protocol):
    """Images at a gate: features, and what the gate computes its scores from."""

    def take(self, index: Tensor) -> Self:
        """Select images by index [n]."""

    def narrow(self, start: int, stop: int) -> Self:
        """Select a range of images, without a copy."""

    @classmethod
    def join(cls, states: Sequence[Self]) -> Self:
        """Concatenate states of the same gate."""


S = TypeVar("S", bound=RoutableState)


class HasChoices(Protocol):
    """The part of a gate that routing reads."""

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices that the gate scores, in the order of the scores."""


class Routable(Protocol[S]):
    """A network that can be routed: a `Supernet`, or a network compiled by `dsnet.runtime`."""

    @property
    def training(self) -> bool:
        """Whether the network is in training mode."""

    @property
    def name(self) -> str:
        """Name of the network."""

    @property
    def gates(self) -> Sized:
        """The gates."""

    @property
    def space(self) -> RouteSpace:
        """All routes."""

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of choices of each gate in the full space."""

    @property
    def merges(self) -> bool:
        """Whether a segment depends on the last choice only, so that routing histories can be merged."""

    def gate(self, stage: int) -> HasChoices:
        """Return the gate before a stage."""

    def check_images(self, x: Tensor) -> None:
        """Raise unless ``x`` are images that this network takes."""

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> S:
        """Run the prefix and the first gate."""

    def gate_scores(self, state: S) -> Tensor:
        """Compute the scores [B, choices] of the gate that ``state`` is at."""

    def run_segment(self, state: S, choices: tuple[int, ...], mode: Mode | None = None) -> S:
        """Run from the gate that made the last of ``choices`` to the next gate."""

    def run_last_segment(self, state: S, choices: tuple[int, ...], mode: Mode | None = None) -> Tensor:
        """Run from the last gate to the logits [B, classes]."""

    def run_from_states(
        self, states: dict[tuple[int, ...], S], choices: tuple[int, ...], mode: Mode | None = None
    ) -> Tensor:
        """Run a route from the last of its gates that ``states`` holds, and return its logits."""

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """Compute the logits of all images at one route."""


Decide = Callable[[Tensor, int, int | None], Tensor]
"""(scores [B, choices], gate, the previous gate's choice or None) → positions [B] of the choices taken."""


def greedy(scores: Tensor, stage: int, previous: int | None) -> Tensor:
    """Take the choice with the best score, the first of equal ones.

    Examples:
        >>> greedy(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.5, 0.0]]), 0, None).tolist()
        [1, 0]
    """
    return scores.argmax(1)


class GatedOutput(NamedTuple):
    """Logits and decisions, in the order of the batch."""

    logits: Tensor  # [B, classes]; empty if not computed
    choices: Tensor  # [B, gates]


def run_from_states(
    model: Routable[S], states: dict[tuple[int, ...], S], choices: tuple[int, ...], mode: Mode | None = None
) -> Tensor:
    """Run a route from the last of its gates that ``states`` holds; see `Supernet.run_from_states`."""
    for gates in range(1, len(choices)):
        history = choices[:gates]
        if history not in states:
            states[history] = model.run_segment(states[history[:-1]], history, mode)
    return model.run_last_segment(states[choices[:-1]], choices, mode)


class _Group(NamedTuple):
    """Images at the same gate whose features have the same shape and norm keys."""

    rows: Tensor  # [n]: positions in the batch
    choices: tuple[int, ...]  # made so far
    state: Any  # a RoutableState


_DecideGroup = Callable[[Tensor, _Group], Tensor]
"""(scores [n, choices], group) → positions [n] of the choices taken."""


def run_gated(
    model: Routable[Any], x: Tensor, decide: Decide = greedy, *, mode: Mode | None = None, logits: bool = True
) -> GatedOutput:
    """Run each image at the route that ``decide`` takes for it; regroup the images at every gate.

    Args:
        model: A supernet in eval mode, or a compiled network.
        x: Images [B, C, H, W].
        decide: Function of the scores [n, choices] of some images, the gate and the previous gate's choice
            (None at the first gate), which returns the position [n] of the choice for each image.
        mode: How the pass runs (default: batch-invariantly up to the last gate).
        logits: Compute logits. Without them the segment after the last gate does not run.

    Returns:
        Logits [B, classes] and choices [B, gates], in the order of the batch.

    Raises:
        DsnetError: The network is in training mode, the images do not fit, or ``decide`` returns a position
            that the gate does not have.

    Examples:
        >>> import dsnet
        >>> model = dsnet.create_model("ds_mbnet_tiny", generator=torch.Generator().manual_seed(0))
        >>> images = torch.zeros(2, 3, 16, 16)
        >>> output = run_gated(model, images, lambda scores, gate, previous: torch.tensor([0, 3]))
        >>> output.choices.tolist(), output.logits.shape
        ([[0], [3]], torch.Size([2, 10]))
    """

    def decide_group(scores: Tensor, group: _Group) -> Tensor:
        return decide(scores, len(group.choices), group.choices[-1] if group.choices else None)

    require_gate = getattr(model, "require_gate", None)  # compiled networks have none
    if require_gate is not None:
        require_gate()
    return _run(model, x, decide_group, None, mode, logits=logits)


def run_assigned(model: Routable[Any], x: Tensor, choices: Tensor) -> GatedOutput:
    """Run each image at its own ``choices`` [B, gates]; the gates' scores are computed and ignored."""
    positions = []
    for stage, options in enumerate(model.space.choices):
        matches = choices[:, stage, None] == torch.tensor(options, device=choices.device)
        unknown = choices[:, stage][~matches.any(1)]
        if len(unknown):
            raise DsnetError(f"{model.name} does not have choice {int(unknown[0])} at gate {stage}")
        positions.append(matches.int().argmax(1))

    def decide_group(scores: Tensor, group: _Group) -> Tensor:
        return positions[len(group.choices)][group.rows]

    return _run(model, x, decide_group, model.space.choices, None, logits=True)


def _run(
    model: Routable[Any],
    x: Tensor,
    decide: _DecideGroup,
    options: Sequence[tuple[int, ...]] | None,  # of each gate; None: those that the gates score
    mode: Mode | None,
    *,
    logits: bool,
) -> GatedOutput:
    if model.training:
        raise DsnetError("a gated pass needs the network in eval mode: call .eval(), or give a route")
    if cast(Any, torch.jit).is_tracing():  # torch does not declare it
        raise DsnetError(
            "a gated pass cannot be traced: the trace would repeat the decisions for these images. Trace one "
            "route, model.bind(route), or use dsnet.runtime.compile"
        )
    model.check_images(x)
    batch, gates = x.shape[0], len(model.gates)
    if x.device.type == "meta" and batch:
        raise DsnetError("decisions need values: a gated pass cannot run on the meta device; give a route")
    choices = torch.empty(batch, gates, dtype=torch.long, device=x.device)
    if batch == 0:  # nothing to decide, but the logits still have their shape
        return GatedOutput(model.run_route(x, model.space.smallest, mode), choices)
    options = [_options(model, stage) for stage in range(gates)] if options is None else options
    # Up to the last gate decisions depend on the features; compiled networks have no such mode.
    gate_mode = getattr(model, "gated_mode", None) if mode is None else mode
    groups = [_Group(torch.arange(batch, device=x.device), (), model.run_prefix(x, gate_mode))]
    for stage, row in enumerate(options):
        if stage:
            moved = [g._replace(state=model.run_segment(g.state, g.choices, gate_mode)) for g in groups]
            groups = _merge(model, moved)
        groups = _split(model, groups, decide, row, choices)
    if not logits:
        return GatedOutput(x.new_empty(0), choices)
    outputs = [model.run_last_segment(group.state, group.choices, mode) for group in groups]
    if len(groups) == 1 and batch == 1:
        return GatedOutput(outputs[0], choices)
    order, joined = torch.cat([group.rows for group in groups]), torch.cat(outputs)
    return GatedOutput(torch.empty_like(joined).index_copy(0, order, joined), choices)


def _options(model: Routable[Any], stage: int) -> tuple[int, ...]:
    options = model.gate(stage).choices
    unknown = sorted(set(options) - set(model.space.choices[stage]))
    if unknown:
        raise DsnetError(f"gate {stage} decides between choices that {model.name} does not have: {unknown}")
    return options


def _split(
    model: Routable[Any],
    groups: list[_Group],
    decide: _DecideGroup,
    options: tuple[int, ...],
    choices: Tensor,
) -> list[_Group]:
    """Decide at the gate of the groups, write the choices and split the groups by them."""
    stage = len(groups[0].choices)
    decisions = [_decide(decide, model.gate_scores(group.state), group) for group in groups]
    positions = torch.cat(decisions).tolist()  # the one time per gate that the host waits
    for position in set(positions):
        if not 0 <= position < len(options):
            raise DsnetError(f"decide gave position {position}; gate {stage} has 0 to {len(options) - 1}")
    if len(groups) == 1 and len(set(positions)) == 1:  # the whole batch goes on together
        choice = options[positions[0]]
        choices[:, stage] = choice
        return [groups[0]._replace(choices=(*groups[0].choices, choice))]
    parts, start = [], 0
    for group, decision in zip(groups, decisions, strict=True):
        count = len(group.rows)
        sizes = Counter(positions[start : start + count])
        start += count
        if len(sizes) > 1:  # sorted once: the images of each choice are then adjacent
            order = decision.argsort(stable=True)
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


def _decide(decide: _DecideGroup, scores: Tensor, group: _Group) -> Tensor:
    """Return the decisions for a group, checked to be one integer for each image."""
    positions: object = decide(scores, group)
    if isinstance(positions, Tensor):
        if positions.shape == (len(scores),) and positions.dtype in INTEGERS:
            return positions
        given = f"a {positions.dtype} tensor of shape {list(positions.shape)}"
    else:
        given = f"a {type(positions).__name__}"
    raise DsnetError(f"decide must give one position for each of {len(scores)} images, not {given}")


def _merge(model: Routable[Any], groups: list[_Group]) -> list[_Group]:
    """Join groups whose remaining computation is the same; the choices of the first represent all of them."""
    by_key: dict[tuple[int, ...], list[_Group]] = {}
    for group in groups:
        by_key.setdefault(group.choices[-1:] if model.merges else group.choices, []).append(group)
    return [members[0] if len(members) == 1 else _join(members) for members in by_key.values()]


def _join(groups: list[_Group]) -> _Group:
    state = groups[0].state.join([group.state for group in groups])
    return _Group(torch.cat([group.rows for group in groups]), groups[0].choices, state)
