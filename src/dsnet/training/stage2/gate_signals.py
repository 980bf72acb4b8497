"""What frozen weights tell a gate about images: all that Stage II learns from, small enough to be kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsnet.gate import GateEncoding
from dsnet.models import Supernet
from dsnet.routes import RouteSpace
from dsnet.slicing import ImageStatistics, Mode
from dsnet.training.stage1.joint import gumbel_one_hot

__all__ = ["Signals", "Walk", "one_gate", "several_gates"]


class Signals(NamedTuple):
    """Of B images and R routes of a network with one gate."""

    encoding: GateEncoding  # what the routing head reads
    losses: Tensor  # [B, R]: cross-entropy of every route
    pull: Tensor  # [B, R, R]: see `dsnet.training.stage2.losses.mixed_loss`
    right: Tensor  # [B, R]: whether every route is

    def take(self, at: Tensor) -> Signals:
        """Some of the images."""
        encoding = GateEncoding(self.encoding.pooled[at], self.encoding.hidden[at])
        return Signals(encoding, *(part[at] for part in self[1:]))

    @staticmethod
    def join(parts: Sequence[Signals]) -> Signals:
        """The images of all parts, in order."""
        encoding = GateEncoding(
            *(torch.cat(columns) for columns in zip(*(part.encoding for part in parts), strict=True))
        )
        return Signals(
            encoding, *(torch.cat(columns) for columns in zip(*(p[1:] for p in parts), strict=True))
        )


@torch.no_grad()
def one_gate(
    model: Supernet, x: Tensor, labels: Tensor, space: RouteSpace, precision: torch.dtype | None = None
) -> Signals:
    """Runs every route of ``space`` behind one prefix; the network alone under ``precision``, if any."""
    with torch.autocast(x.device.type, precision, enabled=precision is not None):
        state = model.run_prefix(x)
        answers = [model.run_last_segment(state, route.choices) for route in space]
    logits = torch.stack([answer.float() for answer in answers], 1)  # [B, R, C]
    off = F.softmax(logits, 2)
    every = torch.arange(len(labels), device=labels.device)
    off[every, :, labels] -= 1
    return Signals(
        encoding=state.encoding,
        losses=F.cross_entropy(
            logits.transpose(1, 2), labels[:, None].expand(-1, len(space)), reduction="none"
        ),
        pull=off @ logits.transpose(1, 2),
        right=logits.argmax(2) == labels[:, None],
    )


class Walk(NamedTuple):
    """A pass with drawn choices at several gates; gradients reach every draw."""

    logits: Tensor
    scores: list[Tensor]  # of every gate
    draws: list[Tensor]  # one-hot, of every gate
    ends: tuple[Tensor, Tensor]  # logits at the smallest and at the largest route, without gradient


def several_gates(model: Supernet, x: Tensor, space: RouteSpace, noise: torch.Generator) -> Walk:
    """Candidates of every stage, zero-padded to the widest, mixed at its end by one-hot draws.

    Every choice runs all images at once, whatever led them there: norms take the statistics of each image's
    own history. A way back is made through the candidate that an image took: others have a share of 0.
    """
    with torch.no_grad():
        state = model.run_prefix(x)
    history: tuple[int, ...] = ()  # that chains are taken from; which one changes their norm keys alone
    taken = torch.empty(len(x), 0, dtype=torch.long, device=x.device)
    norms = ImageStatistics(taken.new_empty(0))  # of no image yet: its tables serve all candidates
    ends: list[Tensor] = []
    scores, draws = [], []
    for gate in range(len(model.gates)):
        options, last = model.gate(gate).choices, gate + 1 == len(model.gates)
        scores.append(model.gate_scores(state))
        draws.append(gumbel_one_hot(scores[-1], noise))
        groups = _Groups(draws[-1])
        features, before = groups.sort(state.x), groups.sort(taken)
        candidates = [
            _candidate(model, features, (*history, choice), before, groups.windows[position], norms)
            for position, choice in enumerate(options)
        ]
        mixed = _mix(candidates, draws[-1], groups)
        with torch.no_grad():
            for i, end in enumerate((space.smallest.choices, space.largest.choices)):
                if gate == 0:  # the candidate that all images have
                    ends.append(groups.restore(torch.cat(candidates[options.index(end[0])])))
                else:
                    ends[i] = model.segment_output(ends[i], end[: gate + 1])
                if not last:
                    ends[i] = model.apply_gate(gate + 1, ends[i]).x
        if last:
            return Walk(mixed, scores, draws, (ends[0], ends[1]))
        state = model.apply_gate(gate + 1, mixed)
        chosen = torch.tensor(options, device=x.device)[draws[-1].argmax(1)]
        taken = torch.cat([taken, chosen[:, None]], 1)
        history = (*history, options[-1])
    raise AssertionError("a network has at least one gate")


Bounds = tuple[int, int]


class _Groups:
    """Images sorted by what they took. The device is asked once, for the sizes of the groups."""

    def __init__(self, draw: Tensor) -> None:
        drawn = draw.argmax(1)
        self.order = drawn.argsort(stable=True)
        self.inverse = self.order.argsort()
        stops = list(itertools.accumulate(torch.bincount(drawn, minlength=draw.shape[1]).tolist()))
        self.bounds = list(zip([0, *stops[:-1]], stops, strict=True))
        self.windows = [_window(bounds, len(draw)) for bounds in self.bounds]

    def sort(self, rows: Tensor) -> Tensor:
        """By group."""
        return rows.index_select(0, self.order)

    def restore(self, rows: Tensor) -> Tensor:
        """As the images were."""
        return rows.index_select(0, self.inverse)


def _window(bounds: Bounds, images: int) -> Bounds:
    """Around a group, in eighths of a batch: for every new size a GPU's library looks for kernels anew."""
    start, stop = bounds
    step = -(-images // 8)
    size = min(images, step * -(-(stop - start) // step))
    first = min(start, images - size)
    return first, first + size


class _Candidate(NamedTuple):
    """What a choice makes of all images, sorted; there is a way back through a window of them alone."""

    before: Tensor
    own: Tensor
    after: Tensor


def _candidate(
    model: Supernet,
    x: Tensor,
    choices: tuple[int, ...],
    taken: Tensor,
    window: Bounds,
    norms: ImageStatistics,
) -> _Candidate:
    start, stop = window
    if not taken.shape[1]:
        with torch.no_grad():  # nothing in front of the first gate learns
            y = model.segment_output(x, choices)
        return _Candidate(y[:start], y[start:stop], y[stop:])
    keys = model.image_keys(torch.cat([taken, torch.full_like(taken[:, :1], choices[-1])], 1))
    own = model.segment_output(x[start:stop], choices, Mode(images=norms.of(keys[start:stop])))
    with torch.no_grad():
        others, theirs = (torch.cat([rows[:start], rows[stop:]]) for rows in (x, keys))
        y = model.segment_output(others, choices, Mode(images=norms.of(theirs)))
    return _Candidate(y[:start], own, y[start:])


def _mix(candidates: Sequence[_Candidate], draw: Tensor, groups: _Groups) -> Tensor:
    """Σ over choices of draw × candidate, the narrower ones padded with zeros."""
    mixed: Tensor = _Mix.apply(draw, groups, *itertools.chain(*candidates))  # type: ignore[no-untyped-call]
    return mixed


class _Mix(torch.autograd.Function):
    """The sum for one-hot draws: a copy of what was taken; a draw's gradient asks every candidate."""

    @staticmethod
    def forward(ctx: Any, draw: Tensor, groups: _Groups, *parts: Tensor) -> Tensor:  # noqa: ANN401
        owns = parts[1::3]
        shape = (len(draw), max(own.shape[1] for own in owns), *owns[0].shape[2:])
        total = owns[0].new_zeros(shape)
        if total.ndim == 4 and any(p.is_contiguous(memory_format=torch.channels_last) for p in owns):
            total = total.contiguous(memory_format=torch.channels_last)
        for own, (start, stop), (first, _) in zip(owns, groups.bounds, groups.windows, strict=True):
            total[start:stop, : own.shape[1]] = own[start - first : stop - first]
        ctx.groups, ctx.dtype = groups, draw.dtype
        ctx.save_for_backward(*parts)
        return groups.restore(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradient = ctx.groups.sort(gradients[0])
        columns, passed = [], []
        parts = ctx.saved_tensors
        groups = zip(ctx.groups.bounds, ctx.groups.windows, strict=True)
        for at, ((start, stop), (first, end)) in zip(range(0, len(parts), 3), groups, strict=True):
            mine = gradient[:, : parts[at].shape[1]]
            pieces = mine[:first], mine[first:end], mine[end:]
            columns.append(
                torch.cat(
                    [
                        (piece * part).flatten(1).sum(1, dtype=ctx.dtype)
                        for piece, part in zip(pieces, parts[at : at + 3], strict=True)
                    ]
                )
            )
            back = None
            if ctx.needs_input_grad[2 + at + 1]:
                back = torch.zeros_like(pieces[1])
                back[start - first : stop - first] = mine[start:stop]
            passed += [None, back, None]
        return ctx.groups.restore(torch.stack(columns, 1)), None, *passed
