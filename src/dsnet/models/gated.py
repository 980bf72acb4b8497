"""A batch in which every image takes its own route: decide, group, run each group truly sliced, put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.slicing import Mode

if TYPE_CHECKING:
    from dsnet.models.supernet import State, Supernet

__all__ = ["Decide", "GatedOutput", "greedy", "run_gated"]

Decide = Callable[[Tensor, int, int | None], Tensor]
"""(scores [B, choices], gate, the previous gate's choice or None) → positions [B] of the choices taken."""


def greedy(scores: Tensor, stage: int, previous: int | None) -> Tensor:
    """The gate's own decision: the best score, the cheaper one of equals."""
    return scores.argmax(1)


class GatedOutput(NamedTuple):
    """Logits and decisions, in the order of the batch."""

    logits: Tensor  # [B, classes]; empty where only the decisions were asked for
    choices: Tensor  # [B, gates]


class _Group(NamedTuple):
    """Images that stand at the same gate with the same features' shape and norm keys."""

    rows: Tensor  # their places in the batch
    choices: tuple[int, ...]
    state: State


def run_gated(
    model: Supernet, x: Tensor, decide: Decide = greedy, *, mode: Mode | None = None, answer: bool = True
) -> GatedOutput:
    """Runs every image at the route that ``decide`` takes for it; regroups at every gate.

    Without ``answer`` the last segment is left out and the logits are empty.
    """
    if model.training:
        raise DsnetError("a gated pass needs the network in eval mode: call .eval(), or give a route")
    model.check_images(x)
    batch, gates = x.shape[0], len(model.gates)
    choices = torch.empty(batch, gates, dtype=torch.long, device=x.device)
    if batch == 0:  # nothing to decide, but the logits still have their shape
        return GatedOutput(model.run_route(x, model.space.smallest, mode), choices)
    if x.device.type == "meta":
        raise DsnetError("decisions need values: a gated pass cannot run on the meta device; give a route")
    groups = [_Group(torch.arange(batch, device=x.device), (), model.enter(x, mode))]
    for _ in range(gates - 1):
        moved = []
        for group in _split(model, groups, decide, choices):
            moved.append(group._replace(state=model.advance(group.state, group.choices, mode)))
        groups = _merge(model, moved)
    groups = _split(model, groups, decide, choices)
    logits = []
    for group in groups if answer else ():
        logits.append(model.finish(group.state, group.choices, mode))
    if not logits:
        return GatedOutput(x.new_empty(0), choices)
    order, joined = torch.cat([group.rows for group in groups]), torch.cat(logits)
    return GatedOutput(torch.empty_like(joined).index_copy(0, order, joined), choices)


def _split(model: Supernet, groups: list[_Group], decide: Decide, choices: Tensor) -> list[_Group]:
    """Asks the gate at which the groups stand, notes its decisions and divides the groups by them."""
    stage = len(groups[0].choices)
    options = model.gate(stage).choices
    strange = sorted(set(options) - set(model.space.choices[stage]))
    if strange:
        raise DsnetError(
            f"gate {stage} decides between choices that {model.spec.name} does not have: {strange}"
        )
    taken = []
    for group in groups:
        scores = model.score(group.state)
        taken.append(decide(scores, stage, group.choices[-1] if group.choices else None))
        _check_positions(taken[-1], len(scores))
    positions = torch.cat(taken).tolist()  # the one time per gate that the host waits
    if min(positions) < 0 or max(positions) >= len(options):
        strange = next(p for p in positions if not 0 <= p < len(options))
        raise DsnetError(f"decide gave position {strange}; gate {stage} has 0 to {len(options) - 1}")
    decisions = [options[p] for p in positions]
    rows = torch.cat([group.rows for group in groups])
    choices[rows, stage] = torch.tensor(decisions, device=choices.device)

    parts, start = [], 0
    for group in groups:
        count = len(group.rows)
        own = decisions[start : start + count]
        start += count
        for choice in sorted(set(own)):
            part = group._replace(choices=(*group.choices, choice))
            if own.count(choice) < count:
                part = _take(part, [i for i, c in enumerate(own) if c == choice])
            parts.append(part)
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


def _take(group: _Group, positions: list[int]) -> _Group:
    at = torch.tensor(positions, device=group.rows.device)
    return group._replace(rows=group.rows[at], state=group.state.take(at))


def _merge(model: Supernet, groups: list[_Group]) -> list[_Group]:
    """Joins groups for which all that follows is the same.

    With norm keys by stage only the last choice matters, so one history may stand for all of them.
    """
    alike: dict[tuple[int, ...], list[_Group]] = {}
    for group in groups:
        alike.setdefault(group.choices if model.bn_key == "prefix" else group.choices[-1:], []).append(group)
    return [members[0] if len(members) == 1 else _join(members) for members in alike.values()]


def _join(groups: list[_Group]) -> _Group:
    first = groups[0]
    code = first.state.code._replace(
        pooled=torch.cat([g.state.code.pooled for g in groups]),
        hidden=torch.cat([g.state.code.hidden for g in groups]),
    )
    state = first.state._replace(x=torch.cat([g.state.x for g in groups]), code=code)
    return _Group(torch.cat([g.rows for g in groups]), first.choices, state)
