"""Passes of the frozen network for Stage II: signals of one gate, or draws at several gates."""

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
    """Signals of B images at R routes of a network with one gate."""

    encoding: GateEncoding  # the input of the routing head
    losses: Tensor  # [B, R]: cross-entropy of each route
    pull: Tensor  # [B, R, R]: see `dsnet.training.stage2.losses.mixed_loss`
    right: Tensor  # [B, R]: whether each route's best class is right

    def take(self, index: Tensor) -> Signals:
        """Select images by index [n]."""
        return Signals(self.encoding.select(index), *(part[index] for part in self[1:]))

    @classmethod
    def join(cls, parts: Sequence[Signals]) -> Signals:
        """Concatenate the images of several parts."""
        encodings, *others = zip(*parts, strict=True)
        return cls(GateEncoding.cat(encodings), *(torch.cat(columns) for columns in others))


@torch.no_grad()
def one_gate(
    model: Supernet, x: Tensor, labels: Tensor, space: RouteSpace, precision: torch.dtype | None = None
) -> Signals:
    """Compute the signals of images: all routes of a space after one prefix.

    Args:
        model: A network with one gate, in eval mode.
        x: Images [B, C, H, W].
        labels: Class indices [B].
        space: Routes that the gate decides between.
        precision: Precision of the network's passes; None: that of its weights.
    """
    with torch.autocast(x.device.type, precision, enabled=precision is not None):
        state = model.run_prefix(x)
        encoding = model.gate_encoding(state)
        outputs = [model.run_last_segment(state, route.choices) for route in space]
    logits = torch.stack([output.float() for output in outputs], 1)  # [B, R, C]
    by_class = logits.transpose(1, 2)
    errors = F.softmax(logits, 2)  # p − y
    errors[torch.arange(len(labels), device=labels.device), :, labels] -= 1
    return Signals(
        encoding=encoding,
        losses=F.cross_entropy(by_class, labels[:, None].expand(-1, len(space)), reduction="none"),
        pull=errors @ by_class,
        right=logits.argmax(2) == labels[:, None],
    )


class Walk(NamedTuple):
    """A pass with drawn choices at several gates; gradients reach each draw."""

    logits: Tensor
    scores: list[Tensor]  # of each gate
    draws: list[Tensor]  # one-hot, of each gate
    ends: tuple[Tensor, Tensor]  # logits at the smallest and at the largest route, without gradient


def several_gates(model: Supernet, x: Tensor, space: RouteSpace, noise: torch.Generator) -> Walk:
    """Run images with drawn choices: at each gate all candidates, mixed by one-hot draws.

    Narrower candidates are padded with zeros. Each candidate runs all images at once, whatever choices led
    them there: norms use the statistics of each image's own history. A candidate's backward pass runs only
    for the images that drew it; for others its share is 0.

    Args:
        model: The network, in eval mode.
        x: Images [B, C, H, W].
        space: Routes that the gates decide between.
        noise: Source of the draws.
    """
    with torch.no_grad():
        state = model.run_prefix(x)
    history: tuple[int, ...] = ()  # of the chains; norm keys are those of each image
    image_choices = torch.empty(len(x), 0, dtype=torch.long, device=x.device)  # choices of each image
    norms = ImageStatistics(image_choices.new_empty(0))  # of no image yet: all candidates share its tables
    ends: list[Tensor] = []
    scores, draws = [], []
    for gate in range(len(model.gates)):
        options, last = model.gate(gate).choices, gate + 1 == len(model.gates)
        scores.append(model.gate_scores(state))
        draws.append(gumbel_one_hot(scores[-1], noise))
        groups = _Groups(draws[-1])
        features, before = groups.sort(state.x), groups.sort(image_choices)
        candidates = [
            _candidate(model, features, (*history, choice), before, window, norms)
            for choice, window in zip(options, groups.windows, strict=True)
        ]
        mixed: Tensor = _Mix.apply(draws[-1], groups, *itertools.chain(*candidates))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for i, end in enumerate((space.smallest.choices, space.largest.choices)):
                if gate == 0:  # all images are at the same state
                    ends.append(groups.restore(torch.cat(candidates[options.index(end[0])])))
                else:
                    ends[i] = model.segment_output(ends[i], end[: gate + 1])
                if not last:
                    ends[i] = model.apply_gate(gate + 1, ends[i]).x
        if last:
            break
        state = model.apply_gate(gate + 1, mixed)
        chosen = torch.tensor(options, device=x.device)[draws[-1].argmax(1)]
        image_choices = torch.cat([image_choices, chosen[:, None]], 1)
        history = (*history, options[-1])
    return Walk(mixed, scores, draws, (ends[0], ends[1]))


class _Groups:
    """Images sorted by their choice. The sizes of the groups are read from the device once."""

    def __init__(self, draw: Tensor) -> None:
        chosen = draw.argmax(1)
        self.order = chosen.argsort(stable=True)
        self.inverse = self.order.argsort()
        stops = list(itertools.accumulate(torch.bincount(chosen, minlength=draw.shape[1]).tolist()))
        self.bounds = list(zip([0, *stops[:-1]], stops, strict=True))
        self.windows = [_window(bounds, len(draw)) for bounds in self.bounds]

    def sort(self, rows: Tensor) -> Tensor:
        """Sort by group."""
        return rows.index_select(0, self.order)

    def restore(self, rows: Tensor) -> Tensor:
        """Undo `sort`."""
        return rows.index_select(0, self.inverse)


def _window(bounds: tuple[int, int], images: int) -> tuple[int, int]:
    """Return a range around a group in eighths of a batch, since GPU libraries search kernels by size."""
    start, stop = bounds
    step = -(-images // 8)
    size = min(images, step * -(-(stop - start) // step))
    first = min(start, images - size)
    return first, first + size


class _Candidate(NamedTuple):
    """The output of a choice for all images, sorted; only those of a window have a backward pass."""

    before: Tensor
    window: Tensor
    after: Tensor


def _candidate(
    model: Supernet,
    x: Tensor,
    choices: tuple[int, ...],
    image_choices: Tensor,
    window: tuple[int, int],
    norms: ImageStatistics,
) -> _Candidate:
    start, stop = window
    if not image_choices.shape[1]:
        with torch.no_grad():  # nothing before the first gate is trained
            y = model.segment_output(x, choices)
        return _Candidate(y[:start], y[start:stop], y[stop:])
    keys = model.image_keys(torch.cat([image_choices, torch.full_like(image_choices[:, :1], choices[-1])], 1))
    inside = model.segment_output(x[start:stop], choices, Mode(images=norms.of(keys[start:stop])))
    with torch.no_grad():
        outside, their_keys = (torch.cat([rows[:start], rows[stop:]]) for rows in (x, keys))
        y = model.segment_output(outside, choices, Mode(images=norms.of(their_keys)))
    return _Candidate(y[:start], inside, y[start:])


class _Mix(torch.autograd.Function):
    """Σ over choices of draw × candidate, narrower candidates padded with zeros.

    For one-hot draws the output is a copy of what each image drew. The gradient of a draw needs all of them.
    """

    @staticmethod
    def forward(ctx: Any, draw: Tensor, groups: _Groups, *parts: Tensor) -> Tensor:  # noqa: ANN401
        windows = parts[1::3]
        shape = (len(draw), max(y.shape[1] for y in windows), *windows[0].shape[2:])
        total = windows[0].new_zeros(shape)
        if total.ndim == 4 and any(y.is_contiguous(memory_format=torch.channels_last) for y in windows):
            total = total.contiguous(memory_format=torch.channels_last)
        for y, (start, stop), (first, _) in zip(windows, groups.bounds, groups.windows, strict=True):
            total[start:stop, : y.shape[1]] = y[start - first : stop - first]
        ctx.groups, ctx.dtype = groups, draw.dtype
        ctx.save_for_backward(*parts)
        return groups.restore(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradient = ctx.groups.sort(gradients[0])
        columns, candidate_gradients = [], []
        parts = ctx.saved_tensors
        groups = zip(ctx.groups.bounds, ctx.groups.windows, strict=True)
        for i, ((start, stop), (first, end)) in zip(range(0, len(parts), 3), groups, strict=True):
            part = gradient[:, : parts[i].shape[1]]
            pieces = zip(
                (part[:first], part[first:end], part[end:]),
                parts[i : i + 3],
                strict=True,
            )
            columns.append(torch.cat([(g * y).flatten(1).sum(1, dtype=ctx.dtype) for g, y in pieces]))
            back = None
            if ctx.needs_input_grad[2 + i + 1]:
                back = torch.zeros_like(part[first:end])
                back[start - first : stop - first] = part[start:stop]
            candidate_gradients += [None, back, None]
        return ctx.groups.restore(torch.stack(columns, 1)), None, *candidate_gradients
