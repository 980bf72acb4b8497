"""What frozen weights tell a gate about images: all that Stage II learns from, small enough to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.gate import Code
from dsnet.models import State, Supernet
from dsnet.routes import RouteSpace
from dsnet.training.joint import gumbel_one_hot

__all__ = ["Signals", "Walk", "difficulty", "one_gate", "several_gates"]


class Signals(NamedTuple):
    """Of B images and R routes of a network with one gate."""

    code: Code  # what the routing head reads
    losses: Tensor  # [B, R]: cross-entropy of every route
    pull: Tensor  # [B, R, R]: see `dsnet.routing.losses.mixed_loss`
    right: Tensor  # [B, R]: whether every route is

    def take(self, at: Tensor) -> Signals:
        """Some of the images."""
        code = Code(self.code.pooled[at], self.code.hidden[at])
        return Signals(code, *(part[at] for part in self[1:]))

    @staticmethod
    def join(parts: Sequence[Signals]) -> Signals:
        """The images of all parts, in order."""
        code = Code(*(torch.cat(columns) for columns in zip(*(part.code for part in parts), strict=True)))
        return Signals(code, *(torch.cat(columns) for columns in zip(*(p[1:] for p in parts), strict=True)))


@torch.no_grad()
def one_gate(
    model: Supernet, x: Tensor, labels: Tensor, space: RouteSpace, precision: torch.dtype | None = None
) -> Signals:
    """Runs every route of ``space`` behind one prefix; the network alone under ``precision``, if any."""
    with torch.autocast(x.device.type, precision, enabled=precision is not None):
        state = model.enter(x)
        answers = [model.finish(state, route.choices) for route in space]
    logits = torch.stack([answer.float() for answer in answers], 1)  # [B, R, C]
    off = F.softmax(logits, 2)
    every = torch.arange(len(labels), device=labels.device)
    off[every, :, labels] -= 1
    return Signals(
        code=state.code,
        losses=F.cross_entropy(
            logits.transpose(1, 2), labels[:, None].expand(-1, len(space)), reduction="none"
        ),
        pull=off @ logits.transpose(1, 2),
        right=logits.argmax(2) == labels[:, None],
    )


@torch.no_grad()
def difficulty(model: Supernet, x: Tensor, labels: Tensor, space: RouteSpace) -> tuple[Tensor, Tensor]:
    """(easy, solved): whether the smallest and the largest route are right."""
    states: dict[tuple[int, ...], State] = {(): model.enter(x)}
    ends = [model.finish_from(states, route.choices).argmax(1) for route in (space.smallest, space.largest)]
    return ends[0] == labels, ends[1] == labels


class Walk(NamedTuple):
    """A pass with drawn choices at several gates; gradients reach every draw."""

    logits: Tensor
    scores: list[Tensor]  # of every gate
    draws: list[Tensor]  # one-hot, of every gate


def several_gates(model: Supernet, x: Tensor, noise: torch.Generator) -> Walk:
    """Candidates of every stage, zero-padded to the widest, mixed at its end by one-hot draws.

    Only images with the same history share norm keys, so every group of them runs its own candidates.
    """
    with torch.no_grad():
        state = model.enter(x)
    groups: list[tuple[tuple[int, ...], Tensor]] = [((), torch.arange(len(x), device=x.device))]
    scores, draws = [], []
    for gate in range(len(model.gates)):
        options = model.gate(gate).choices
        scores.append(model.score(state))
        draws.append(gumbel_one_hot(scores[-1], noise))
        mixed = [_mix(model, state.x[rows], history, options, draws[-1][rows]) for history, rows in groups]
        order = torch.cat([rows for _, rows in groups])
        joined = torch.cat(mixed)
        joined = torch.empty_like(joined).index_copy(0, order, joined)
        if gate + 1 == len(model.gates):
            return Walk(joined, scores, draws)
        state = model.stand_at(gate + 1, joined)
        drawn = draws[-1].argmax(1)
        groups = [
            ((*history, choice), rows[drawn[rows] == position])
            for history, rows in groups
            for position, choice in enumerate(options)
        ]
        groups = [(history, rows) for history, rows in groups if len(rows)]
    raise AssertionError("a network has at least one gate")


def _mix(
    model: Supernet, x: Tensor, history: tuple[int, ...], options: tuple[int, ...], draw: Tensor
) -> Tensor:
    """Σ over choices of draw × candidate, the narrower ones padded with zeros."""
    candidates = [model.run_segment(x, (*history, choice)) for choice in options]
    widest = max(y.shape[1] for y in candidates)
    total: Tensor | None = None
    for position, y in enumerate(candidates):
        share = draw[:, position].to(y.dtype).view(-1, *[1] * (y.ndim - 1))
        part = F.pad(share * y, (*(0, 0) * (y.ndim - 2), 0, widest - y.shape[1]))
        total = part if total is None else total + part
    assert total is not None
    return total
