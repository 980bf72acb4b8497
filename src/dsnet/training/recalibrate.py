"""Exact statistics for the split batch norms, from one pass over the data (Re-SBN).

While a key is calibrated its norms normalise by the current batch's own statistics, and count, sum and sum of
squares of their input are added up in float64; what was stored before is neither used nor mixed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.supernet import State
from dsnet.routes import Route
from dsnet.slicing import Mode, SplitBatchNorm2d, batch_statistics

__all__ = ["recalibrate"]


class _Sums:
    """Count, Σx and Σx² of what every (norm, key) got; a `Statistics` of the pass."""

    def __init__(self) -> None:
        self.sums: dict[tuple[SplitBatchNorm2d, int], tuple[int, Tensor, Tensor]] = {}

    def __call__(self, norm: SplitBatchNorm2d, x: Tensor, key: int) -> tuple[Tensor, Tensor]:
        wide = x.double()
        new = (x.numel() // x.shape[1], wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3)))
        old = self.sums.get((norm, key))
        self.sums[norm, key] = new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])
        return batch_statistics(norm, x, key)

    def apply(self) -> None:
        for (norm, key), (count, total, squares) in self.sums.items():
            mean = total / count
            norm.set_statistics(key, mean, (squares / count - mean.square()).clamp(min=0), count)


@torch.no_grad()
def recalibrate(
    model: Supernet,
    batches: Iterable[Tensor],
    routes: Iterable[Route | int] | None = None,
    *,
    generator: torch.Generator | None = None,
) -> int:
    """Sets the statistics of every key that the routes use (all of the space by default); counts the images.

    The prefix runs once a batch, whatever the number of routes. Where several gates decide and a key stands
    for many histories, every batch goes on from a choice drawn uniformly; keys by prefix see all of them.
    Use images as Stage I saw them, without augmentation, in batches of at least 128.
    """
    wanted = {model.space.resolve(r).choices for r in routes} if routes is not None else None
    reach = sorted(wanted if wanted is not None else (route.choices for route in model.space))
    training = model.training
    model.eval()
    sums, seen = _Sums(), 0
    mode = Mode(statistics=sums)
    try:
        for images in batches:
            model.check_images(images)
            _walk(model, model.enter(images, mode), (), reach, mode, generator)
            seen += len(images)
    finally:
        model.train(training)
    if seen == 0:
        raise DsnetError("no images to re-calibrate with: the data gave no batch")
    sums.apply()
    return seen


def _walk(
    model: Supernet,
    state: State,
    history: tuple[int, ...],
    reach: list[tuple[int, ...]],
    mode: Mode,
    generator: torch.Generator | None,
) -> None:
    """Runs every choice that can follow ``history``, and goes on from one of them, or from all."""
    gate = len(history)
    choices = [choice for choice, _ in itertools.groupby(sorted(r[gate] for r in reach))]
    if gate == len(model.gates) - 1:
        for choice in choices:
            model.finish(state, (*history, choice), mode)
        return
    onward = set(choices)
    if model.bn_key == "stage":
        onward = {choices[int(torch.randint(len(choices), (), generator=generator))]}
    for choice in choices:
        after = model.advance(state, (*history, choice), mode)
        if choice in onward:
            # With keys by stage the last choice alone matters, so all routes remain within reach.
            rest = reach if model.bn_key == "stage" else [r for r in reach if r[gate] == choice]
            _walk(model, after, (*history, choice), rest, mode, generator)
