"""The moving average of a supernet's weights that teaches in in-place bootstrapping."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models import GateState, Supernet
from dsnet.routes import Route
from dsnet.slicing import Mode, batch_statistics

__all__ = ["Average", "TEACHER"]

TEACHER = Mode(statistics=batch_statistics)


class Average:
    """W′ ← α W′ + (1 − α) W, parameters only (Eq. 29).

    Its norms use the statistics of the batch at hand and update nothing, so it needs no norm keys of its
    own; ``mode`` says so, or where several ranks see the batch, takes the statistics of all. With ``warmup``
    the average follows quickly at first: α is min(α, (1 + t) / (10 + t)).
    """

    def __init__(
        self, model: Supernet, alpha: float = 0.997, *, warmup: bool = False, mode: Mode = TEACHER
    ) -> None:
        if not 0 <= alpha < 1:
            raise DsnetError(f"alpha must be at least 0 and below 1, not {alpha}")
        self.alpha, self.warmup, self.mode, self.steps = alpha, warmup, mode, 0
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    def alpha_at(self, step: int) -> float:
        """The momentum of the step-th update, counted from 0."""
        return min(self.alpha, (1 + step) / (10 + step)) if self.warmup else self.alpha

    @torch.no_grad()
    def update(self, model: Supernet) -> None:
        """Takes the weights of ``model`` in."""
        ours: list[Tensor] = list(self.model.parameters())
        theirs: list[Tensor] = list(model.parameters())
        torch._foreach_lerp_(ours, theirs, 1 - self.alpha_at(self.steps))
        self.steps += 1

    @torch.no_grad()
    def logits(self, x: Tensor, route: Route) -> Tensor:
        """The average's output at a route."""
        return self.run_last_segment(self.run_prefix(x), route)

    @torch.no_grad()
    def run_prefix(self, x: Tensor) -> GateState:
        """What stands at the first gate; the same for all routes."""
        return self.model.run_prefix(x, self.mode)

    @torch.no_grad()
    def run_last_segment(self, state: GateState, route: Route) -> Tensor:
        """From the first gate to the output at a route."""
        for gates in range(1, len(route.choices)):
            state = self.model.run_segment(state, route.choices[:gates], self.mode)
        return self.model.run_last_segment(state, route.choices, self.mode)

    @torch.no_grad()
    def stages(self, x: Tensor, route: Route) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The average's output and its stages' features at a route."""
        return self.model.run_stages(x, route, self.mode)
