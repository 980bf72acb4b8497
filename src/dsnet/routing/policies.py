"""Policies: frozen values that choose a route for every image of a batch, called with a network and images.

`GatePolicy` lets the gates decide, by score − λ · cost. `CascadePolicy` runs a cheap route first and goes on
to a larger one where the prediction is not confident. A policy draws no random numbers, keeps no state and
does not change the network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models import run_gated
from dsnet.models.group_by_route import Decide, Routable, greedy
from dsnet.routing.budget import within
from dsnet.routing.cost_table import CostPenalties, CostTable

__all__ = [
    "CascadePolicy",
    "GatePolicy",
    "RoutedOutput",
    "Rule",
    "gate_decision",
    "margin",
    "penalised_decision",
    "run_cascade",
    "run_gated_routes",
    "unsure",
]


A = TypeVar("A", Tensor, np.ndarray[Any, np.dtype[Any]])


class RoutedOutput(NamedTuple):
    """Logits [B, classes] and the number [B] of the route that gave them, in the order of the batch."""

    logits: Tensor
    routes: Tensor

    @property
    def finite(self) -> Tensor:
        """Whether an image has an answer [B]: none of its logits is NaN or infinite."""
        return self.logits.isfinite().all(1)


class Rule(Protocol):
    """How a batch is routed."""

    costs: CostTable

    def __call__(self, model: Routable[Any], x: Tensor, allowance: float | None = None) -> RoutedOutput:
        """Runs every image at its route; all of them together for no more than ``allowance``."""

    def min_cost(self, model: Routable[Any]) -> float:
        """What an image costs at least."""

    def path(self, route: int) -> tuple[int, ...]:
        """The routes that ran for an image that ``route`` answered, in order."""

    def cost(self, model: Routable[Any], route: int) -> float:
        """What such an image cost, everything that ran included."""


def margin(logits: Tensor) -> Tensor:
    """How sure an answer is: the difference between the two largest probabilities, [B]."""
    best = F.softmax(logits.float() if logits.dtype != torch.float64 else logits, dim=-1).topk(2, dim=-1)[0]
    return best[..., 0] - best[..., 1]


def unsure(margins: A, threshold: float | A) -> A:
    """Return where a cascade goes on: margins [B] (a tensor or an array) below the threshold, or NaN."""
    return ~(margins >= threshold)


def gate_decision(costs: CostTable, weight: float, options: Sequence[Sequence[int]]) -> Decide:
    """Return a decision by score − ``weight`` · cost / cost of the largest route; the cheaper one of equals.

    ``options`` are every gate's choices. Softmax is left out: it moves all scores of an image alike.
    """
    penalties = costs.penalties(weight, options)
    return greedy if weight == 0 else penalised_decision(penalties)


def penalised_decision(penalties: CostPenalties) -> Decide:
    """Return a decision by score − penalty, for penalties behind all choices before, by number."""
    rows: dict[tuple[int, int, torch.device], Tensor] = {}

    def decide(scores: Tensor, gate: int, previous: int | None) -> Tensor:
        key = gate, previous or 0, scores.device
        if key not in rows:
            rows[key] = torch.tensor(penalties[key[0]][key[1]], dtype=torch.float64).to(scores.device)
        return (scores.double() - rows[key]).argmax(1)

    return decide


def run_gated_routes(model: Routable[Any], x: Tensor, decide: Decide = greedy) -> RoutedOutput:
    """`run_gated`, with routes by their number."""
    output = run_gated(model, x, decide)
    if len(model.gates) == 1:
        return RoutedOutput(output.logits, output.choices[:, 0])
    numbers = [model.space.of_choices(choices).number for choices in output.choices.tolist()]
    return RoutedOutput(output.logits, torch.tensor(numbers, dtype=torch.long, device=x.device))


def run_cascade(
    model: Routable[Any], x: Tensor, routes: Sequence[int], proceed: Callable[[int, Tensor], Tensor]
) -> RoutedOutput:
    """Run routes one after the other, each on the images that go on from the one before.

    What two routes share (the prefix; with several gates also common segments) runs once.

    Args:
        model: A network in eval mode, or a plan's executor.
        x: Images [B, C, H, W].
        routes: Route numbers, in the order in which they run.
        proceed: ``(step, logits [n, classes])`` → positions [m] of the images that also run the next route.
    """
    model.check_images(x)
    if model.training:
        raise DsnetError("a cascade needs the network in eval mode: call .eval(), or give a route")
    rows = torch.arange(len(x), device=x.device)
    numbers = torch.full((len(x),), routes[0], dtype=torch.long, device=x.device)
    states: dict[tuple[int, ...], Any] = {(): model.run_prefix(x)}
    answers = logits = model.run_from_states(states, model.space.resolve(routes[0]).choices)
    for step, number in enumerate(routes[1:]):
        kept = proceed(step, answers)
        if len(kept) == 0:
            break
        if len(kept) < len(rows):
            rows = rows[kept]
            states = {history: state.take(kept) for history, state in states.items()}
        answers = model.run_from_states(states, model.space.resolve(number).choices)
        logits = logits.index_copy(0, rows, answers)
        numbers[rows] = number
    return RoutedOutput(logits, numbers)


class _Capped:
    """Decides as `gate_decision` does, within what all images of a batch may cost together.

    Every image keeps what the cheapest way on would cost; choices that cost more share what is left over.
    """

    def __init__(
        self, costs: CostTable, weight: float, options: Sequence[Sequence[int]], allowance: float, images: int
    ) -> None:
        self.costs, self.options = costs, options
        self.penalties = costs.penalties(weight, options)
        self.left = allowance - images * (costs.prefix + self._onward(0, None))

    def _onward(self, gate: int, previous: int | None) -> float:
        """Cost of the cheapest way from a gate to the end."""
        if gate == len(self.options):
            return 0.0
        return min(self._through(gate, previous, choice) for choice in self.options[gate])

    def _through(self, gate: int, previous: int | None, choice: int) -> float:
        return self.costs.segment(gate, previous, choice) + self._onward(gate + 1, choice)

    def __call__(self, scores: Tensor, gate: int, previous: int | None) -> Tensor:
        own = self.options[gate]
        kept = self._onward(gate, previous)
        more = torch.tensor([self._through(gate, previous, c) - kept for c in own], dtype=torch.float64)
        penalties = torch.tensor(self.penalties[gate][previous or 0], dtype=torch.float64)
        values = scores.double() - penalties.to(scores.device)
        known = values.isfinite().all(1, keepdim=True)
        values = torch.where(known, values, 0.0)  # scores that are no numbers: the cheapest choice
        taken = within(values, more, self.left)
        self.left -= float(more.to(taken.device)[taken].sum())
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePolicy:
    """The gates decide; ``weight`` (λ) above 0 saves, below 0 spends, 0 is the gates' own decision."""

    costs: CostTable
    weight: float = 0.0

    def __call__(self, model: Routable[Any], x: Tensor, allowance: float | None = None) -> RoutedOutput:
        """Runs every image at the route that its gates take."""
        options = _options(model)
        decide = gate_decision(self.costs, self.weight, options)
        if allowance is not None:
            decide = _Capped(self.costs, self.weight, options, allowance, len(x))
        return run_gated_routes(model, x, decide)

    def min_cost(self, model: Routable[Any]) -> float:
        """The cheapest route that the gates can take."""
        return min(self.costs.of(choices) for choices in itertools.product(*_options(model)))

    def path(self, route: int) -> tuple[int, ...]:
        """The one route that ran."""
        return (route,)

    def cost(self, model: Routable[Any], route: int) -> float:
        """The route's own cost, gates included."""
        return self.costs.of(model.space.resolve(route).choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadePolicy:
    """Runs ``routes`` one after the other; an image whose margin is under the threshold goes on to the next.

    So does one whose margin is no number. One threshold fewer than routes. What two routes share (the prefix;
    with several gates also the segments that both begin with) runs once.
    """

    costs: CostTable
    routes: tuple[int, ...]
    thresholds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.routes or list(self.routes) != sorted(set(self.routes)):
            raise DsnetError(f"a cascade needs routes from the smallest to the largest, not {self.routes}")
        if len(self.thresholds) != len(self.routes) - 1 or any(map(math.isnan, self.thresholds)):
            raise DsnetError(
                f"a cascade of {len(self.routes)} routes needs {len(self.routes) - 1} thresholds, "
                f"not {self.thresholds}"
            )

    def __call__(self, model: Routable[Any], x: Tensor, allowance: float | None = None) -> RoutedOutput:
        """Runs every image until an answer is sure, or at the last route.

        Within an ``allowance`` the least sure go on first.
        """
        left = math.inf if allowance is None else allowance - len(x) * self.min_cost(model)

        def proceed(step: int, logits: Tensor) -> Tensor:
            nonlocal left
            margins = margin(logits)
            rows = unsure(margins, self.thresholds[step]).nonzero()[:, 0]
            if allowance is not None:
                more = self.cost(model, self.routes[step + 1]) - self.cost(model, self.routes[step])
                room = len(x) if more <= 0 or left == math.inf else max(0, math.floor(left / more))
                order = margins[rows].nan_to_num(nan=-1.0).argsort(stable=True)
                rows = rows[order[:room]].sort()[0]
                left -= len(rows) * more
            return rows

        return run_cascade(model, x, self.routes, proceed)

    def min_cost(self, model: Routable[Any]) -> float:
        """The first route."""
        return self.costs.of(model.space.resolve(self.routes[0]).choices)

    def path(self, route: int) -> tuple[int, ...]:
        """All routes up to the one that answered."""
        if route not in self.routes:
            raise DsnetError(f"this cascade has no route {route}; it has {', '.join(map(str, self.routes))}")
        return self.routes[: self.routes.index(route) + 1]

    def cost(self, model: Routable[Any], route: int) -> float:
        """Prefix and every segment that ran, each once."""
        return self.costs.of_several(model.space.resolve(number).choices for number in self.path(route))


def _options(model: Routable[Any]) -> list[tuple[int, ...]]:
    return [model.gate(stage).choices for stage in range(len(model.gates))]
