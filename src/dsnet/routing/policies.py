"""Policies: frozen values that choose a route for every image of a batch, called with a network and images.

`GatePolicy` lets the gates decide, by score − λ · cost. `CascadePolicy` runs a cheap route first and goes on
to a larger one where the prediction is not confident. A policy draws no random numbers, keeps no state and
does not change the network. `register_router` makes a policy of your own available by name.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.errors import DsnetError, shorten
from dsnet.models import run_gated
from dsnet.models.group_by_route import Decide, GatedOutput, Routable, greedy
from dsnet.routes import RouteSpace
from dsnet.routing.budget import best_within
from dsnet.routing.cost_table import CostPenalties, CostTable

if TYPE_CHECKING:
    from dsnet.routing.route_outputs import Array, RouteOutputs

__all__ = [
    "CascadePolicy",
    "GatePolicy",
    "OperatingPoint",
    "Policy",
    "RoutedOutput",
    "SingleRoutePolicy",
    "gate_decision",
    "list_routers",
    "margin",
    "penalised_decision",
    "policy_class",
    "register_router",
    "routed_output",
    "run_cascade",
    "run_gated_routes",
    "unsure",
]

A = TypeVar("A", Tensor, np.ndarray[Any, np.dtype[Any]])
P = TypeVar("P", bound="type[Policy]")


class RoutedOutput(NamedTuple):
    """Logits [B, classes] and the number [B] of the route that gave them, in the order of the batch."""

    logits: Tensor
    routes: Tensor

    @property
    def finite(self) -> Tensor:
        """Whether all logits of an image are finite, [B]."""
        return self.logits.isfinite().all(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """Settings of a policy, and the cost and accuracy that they reached on the calibration images."""

    cost: float  # mean of an image
    accuracy: float
    parameters: tuple[float, ...] = ()  # a gate's weight of cost; a cascade's thresholds
    routes: tuple[int, ...] = ()  # the routes that a cascade runs; the route of a single-route policy
    route_counts: tuple[tuple[int, int], ...] = ()  # (route, images that it answered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(ABC):
    """How a batch is routed. Derive a frozen dataclass from it and register that by `register_router`.

    `docs/routing.md` has an example.
    """

    costs: CostTable
    name: ClassVar[str]  # set by register_router
    uses_whole_budget: ClassVar[bool] = True  # else settings far below a budget may be chosen for it

    @classmethod
    @abstractmethod
    def from_settings(cls, costs: CostTable, parameters: tuple[float, ...], routes: tuple[int, ...]) -> Self:
        """Return the policy with the settings of an operating point."""

    @classmethod
    def without_budget(cls, costs: CostTable) -> Self | None:
        """Return the policy to use where no budget is given; None (the default) if it needs one."""
        return None

    @classmethod
    def candidates(cls, outputs: RouteOutputs) -> Iterable[tuple[tuple[float, ...], tuple[int, ...]]]:
        """Return the settings, parameters and routes, that `dsnet calibrate` tries (default: none)."""
        return ()

    @abstractmethod
    def __call__(self, model: Routable[Any], x: Tensor, allowance: float | None = None) -> RoutedOutput:
        """Run every image at its route.

        Args:
            model: A network in eval mode, or the executor of a plan.
            x: Images [B, C, H, W].
            allowance: What all images together may cost (default: no limit).
        """

    @abstractmethod
    def replay(self, outputs: RouteOutputs) -> Array:
        """Return the column [N] of the route that would answer each image of recorded outputs."""

    def needed_routes(self) -> tuple[int, ...]:
        """Return the routes that a plan needs (default: none in particular, but all choices of the gates)."""
        return ()

    def min_cost(self, model: Routable[Any]) -> float:
        """Return the lowest cost that an image can have."""
        return min(self.costs.of(route.choices) for route in model.space)

    def path(self, route: int) -> tuple[int, ...]:
        """Return the routes that run for an image that ``route`` answers, in order."""
        return (route,)

    def cost(self, space: RouteSpace, route: int) -> float:
        """Return the cost of an image that ``route`` answers, with everything that runs for it."""
        return self.costs.of(space.resolve(route).choices)


_POLICIES: dict[str, type[Policy]] = {}


def register_router(name: str) -> Callable[[P], P]:
    """Register a policy class under the name that calibrations and ``--router`` use.

    Examples:
        >>> @register_router("mine")  # doctest: +SKIP
        ... @dataclass(frozen=True, slots=True, kw_only=True)
        ... class Mine(Policy): ...

    Raises:
        DsnetError: If the name is taken, or the class is no `Policy`.
    """

    def add(cls: P) -> P:
        if not (isinstance(cls, type) and issubclass(cls, Policy)):
            raise DsnetError(f"register_router takes a class derived from Policy, not {shorten(cls)}")
        if not name.isidentifier() or name == "auto" or name in _POLICIES:
            reason = "registered already" if name in _POLICIES else "not a possible name"
            raise DsnetError(f"router {shorten(name)} is {reason}; registered: {', '.join(_POLICIES)}")
        cls.name = name
        _POLICIES[name] = cls
        return cls

    return add


def list_routers() -> list[str]:
    """Return the names of all registered routers."""
    return list(_POLICIES)


def policy_class(name: object) -> type[Policy]:
    """Return the policy class that is registered under a name.

    Raises:
        DsnetError: If there is none; the message lists those that are registered.
    """
    if not isinstance(name, str) or name not in _POLICIES:
        raise DsnetError(
            f"unknown router {shorten(name)}; registered: {', '.join(_POLICIES)} (a router of your own is "
            "registered by the module that defines it: --import MODULE)"
        )
    return _POLICIES[name]


def margin(logits: Tensor) -> Tensor:
    """Return the confidence [B] of predictions: the difference of the two largest probabilities."""
    best = F.softmax(logits.float() if logits.dtype != torch.float64 else logits, dim=-1).topk(2, dim=-1)[0]
    return best[..., 0] - best[..., 1]


def unsure(margins: A, threshold: float | A) -> A:
    """Return where a cascade goes on: margins [B] (a tensor or an array) below the threshold, or NaN."""
    return ~(margins >= threshold)


def gate_decision(costs: CostTable, weight: float, options: Sequence[Sequence[int]]) -> Decide:
    """Return a decision by score − ``weight`` · cost / cost of the largest route; the cheaper one of equals.

    ``options`` are every gate's choices. Softmax is left out: it shifts all scores of an image alike.
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
    """Run `run_gated` and return routes by their number."""
    return routed_output(model, run_gated(model, x, decide))


def routed_output(model: Routable[Any], output: GatedOutput) -> RoutedOutput:
    """Replace choices by route numbers."""
    if len(model.gates) == 1:
        return RoutedOutput(output.logits, output.choices[:, 0])
    numbers = [model.space.of_choices(choices).number for choices in output.choices.tolist()]
    routes = torch.tensor(numbers, dtype=torch.long, device=output.choices.device)
    return RoutedOutput(output.logits, routes)


class _AllowanceDecision:
    """Decide as `gate_decision`, within what all images of a batch may cost together.

    Every image keeps the cost of the cheapest continuation. Choices that cost more share the rest.
    """

    def __init__(
        self, costs: CostTable, weight: float, options: Sequence[Sequence[int]], allowance: float, images: int
    ) -> None:
        self.costs, self.options = costs, options
        self.penalties = costs.penalties(weight, options)
        self.left = allowance - images * (costs.prefix + self._cheapest(0, None))

    def _cheapest(self, gate: int, previous: int | None) -> float:
        """Return the cost of the cheapest continuation from a gate to the logits."""
        if gate == len(self.options):
            return 0.0
        return min(self._through(gate, previous, choice) for choice in self.options[gate])

    def _through(self, gate: int, previous: int | None, choice: int) -> float:
        return self.costs.segment(gate, previous, choice) + self._cheapest(gate + 1, choice)

    def __call__(self, scores: Tensor, gate: int, previous: int | None) -> Tensor:
        reserved = self._cheapest(gate, previous)
        extra = [self._through(gate, previous, choice) - reserved for choice in self.options[gate]]
        costs = torch.tensor(extra, dtype=torch.float64)
        penalties = torch.tensor(self.penalties[gate][previous or 0], dtype=torch.float64)
        values = scores.double() - penalties.to(scores.device)
        finite = values.isfinite().all(1, keepdim=True)
        values = torch.where(finite, values, 0.0)  # without finite scores: the cheapest choice
        positions = best_within(values, costs, self.left)
        self.left -= float(costs.to(positions.device)[positions].sum())
        return positions


@register_router("gate")
@dataclass(frozen=True, slots=True, kw_only=True)
class GatePolicy(Policy):
    """The gates decide by score − λ · cost; ``weight`` (λ) above 0 saves cost, below 0 spends more."""

    weight: float = 0.0

    @classmethod
    def from_settings(cls, costs: CostTable, parameters: tuple[float, ...], routes: tuple[int, ...]) -> Self:
        """Take λ from the only parameter."""
        return cls(costs=costs, weight=parameters[0])

    @classmethod
    def without_budget(cls, costs: CostTable) -> Self:
        """Return the gates' own decision: λ = 0."""
        return cls(costs=costs)

    def __call__(self, model: Routable[Any], x: Tensor, allowance: float | None = None) -> RoutedOutput:
        """Run every image at the route that its gates choose."""
        options = _options(model)
        decide = gate_decision(self.costs, self.weight, options)
        if allowance is not None:
            decide = _AllowanceDecision(self.costs, self.weight, options, allowance, len(x))
        return run_gated_routes(model, x, decide)

    def replay(self, outputs: RouteOutputs) -> Array:
        """Decide by the recorded scores of the gates."""
        every, node = np.arange(len(outputs)), np.zeros(len(outputs), dtype=np.int64)
        penalties = self.costs.penalties(self.weight, outputs.options)
        for gate, (options, scores) in enumerate(zip(outputs.options, outputs.scores, strict=True)):
            values = scores.numpy()[node, every]
            if self.weight != 0:
                rows = [penalties[gate][history[-1] if history else 0] for history in outputs.histories(gate)]
                values = values.astype(np.float64) - np.array(rows)[node]
            node = node * len(options) + values.argmax(1)
        column_of = {route.choices: column for column, route in enumerate(outputs.routes)}
        return np.array([column_of[leaf] for leaf in itertools.product(*outputs.options)])[node]

    def min_cost(self, model: Routable[Any]) -> float:
        """Return the cost of the cheapest route that the gates can choose."""
        return min(self.costs.gated(choices) for choices in itertools.product(*_options(model)))

    def cost(self, space: RouteSpace, route: int) -> float:
        """Return the cost of a route with that of the gates."""
        return self.costs.gated(space.resolve(route).choices)


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
    step_logits = logits = model.run_from_states(states, model.space.resolve(routes[0]).choices)
    for step, number in enumerate(routes[1:]):
        positions = proceed(step, step_logits)
        if len(positions) == 0:
            break
        if len(positions) < len(rows):
            rows = rows[positions]
            states = {history: state.take(positions) for history, state in states.items()}
        step_logits = model.run_from_states(states, model.space.resolve(number).choices)
        logits = logits.index_copy(0, rows, step_logits)
        numbers[rows] = number
    return RoutedOutput(logits, numbers)


@register_router("cascade")
@dataclass(frozen=True, slots=True, kw_only=True)
class CascadePolicy(Policy):
    """Run ``routes`` one after the other; an image goes on where its margin is under the threshold, or NaN.

    There is one threshold fewer than routes.
    """

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

    @classmethod
    def from_settings(cls, costs: CostTable, parameters: tuple[float, ...], routes: tuple[int, ...]) -> Self:
        """Take the parameters as thresholds."""
        return cls(costs=costs, routes=routes, thresholds=parameters)

    def __call__(self, model: Routable[Any], x: Tensor, allowance: float | None = None) -> RoutedOutput:
        """Run every image until a prediction is confident; within an allowance the least confident go on."""
        left = math.inf if allowance is None else allowance - len(x) * self.min_cost(model)

        def proceed(step: int, logits: Tensor) -> Tensor:
            nonlocal left
            margins = margin(logits)
            positions = unsure(margins, self.thresholds[step]).nonzero()[:, 0]
            if allowance is not None:
                this, following = (self.cost(model.space, route) for route in self.routes[step : step + 2])
                extra = following - this
                room = len(x) if extra <= 0 or left == math.inf else max(0, math.floor(left / extra))
                order = margins[positions].nan_to_num(nan=-1.0).argsort(stable=True)
                positions = positions[order[:room]].sort()[0]
                left -= len(positions) * extra
            return positions

        return run_cascade(model, x, self.routes, proceed)

    def replay(self, outputs: RouteOutputs) -> Array:
        """Decide by the recorded margins."""
        columns = [outputs.column(number) for number in self.routes]
        margins = outputs.margins.numpy()
        answered, running = np.full(len(outputs), columns[0]), np.ones(len(outputs), dtype=bool)
        for step, threshold in enumerate(self.thresholds):
            running &= unsure(margins[:, columns[step]], threshold)
            answered[running] = columns[step + 1]
        return answered

    def needed_routes(self) -> tuple[int, ...]:
        """Return the routes of the cascade."""
        return self.routes

    def min_cost(self, model: Routable[Any]) -> float:
        """Return the cost of the first route."""
        return self.costs.of(model.space.resolve(self.routes[0]).choices)

    def path(self, route: int) -> tuple[int, ...]:
        """Return all routes up to the one that answers."""
        if route not in self.routes:
            raise DsnetError(f"this cascade has no route {route}; it has {', '.join(map(str, self.routes))}")
        return self.routes[: self.routes.index(route) + 1]

    def cost(self, space: RouteSpace, route: int) -> float:
        """Return the cost of the prefix and of every segment that runs, each counted once."""
        return self.costs.of_several(space.resolve(number).choices for number in self.path(route))


@register_router("single")
class SingleRoutePolicy(CascadePolicy):
    """Run all images at one route."""

    __slots__ = ()
    uses_whole_budget = False


def _options(model: Routable[Any]) -> list[tuple[int, ...]]:
    return [model.gate(stage).choices for stage in range(len(model.gates))]
