"""The moving average of a supernet's weights, the teacher of in-place bootstrapping."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.slicing import Mode, batch_statistics

__all__ = ["TEACHER", "Average"]

TEACHER = Mode(statistics=batch_statistics)


class Average:
    """W′ ← α W′ + (1 − α) W of the parameters of a network (Eq. 29).

    ``average.model`` is the averaged network, to be run in ``average.mode``: its norms use the statistics of
    the batch and update nothing, so that it needs no norm keys of its own.

    Args:
        model: The network; the average starts with its weights.
        alpha: Momentum of an update.
        warmup: Use min(α, (1 + t) / (10 + t)) in update t, so that the average follows quickly at first.
        mode: How the average runs, for example with statistics over all ranks.
    """

    def __init__(
        self, model: Supernet, alpha: float = 0.997, *, warmup: bool = False, mode: Mode = TEACHER
    ) -> None:
        if not 0 <= alpha < 1:
            raise DsnetError(f"alpha must be at least 0 and below 1, not {alpha}")
        self.alpha, self.warmup, self.mode, self.steps = alpha, warmup, mode, 0
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    def alpha_at(self, step: int) -> float:
        """Return the momentum of an update, counted from 0."""
        return min(self.alpha, (1 + step) / (10 + step)) if self.warmup else self.alpha

    @torch.no_grad()
    def update(self, model: Supernet) -> None:
        """Update the average with the weights of ``model``."""
        averages: list[Tensor] = list(self.model.parameters())
        weights: list[Tensor] = list(model.parameters())
        torch._foreach_lerp_(averages, weights, 1 - self.alpha_at(self.steps))
        self.steps += 1
