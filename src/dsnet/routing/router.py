"""A router with a knob: which policy meets a budget, as calibration found it; and a network routed by it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from dsnet.counts import human
from dsnet.errors import DsnetError, shorten
from dsnet.models.group_by_route import Routable
from dsnet.routing.cost_table import CostTable, Unit
from dsnet.routing.policies import CascadePolicy, GatePolicy, RoutedOutput

__all__ = ["OperatingPoint", "Routed", "Router", "RouterKind", "parse_budget", "format_cost"]

RouterKind = Literal["gate", "cascade", "single"]
NEAR = 0.02  # of the budget: so much less a setting may cost to be more accurate


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """A setting of a router, and what it came to on the calibration images."""

    cost: float  # mean of an image
    accuracy: float
    parameters: tuple[float, ...] = ()  # a gate's weight of cost; a cascade's thresholds
    routes: tuple[int, ...] = ()  # of a cascade; the one route of a single one
    route_counts: tuple[tuple[int, int], ...] = ()  # (route, images that it answered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A way of deciding, with the settings that calibration found, from the cheapest to the dearest.

    ``gate`` and ``cascade`` decide for every image; ``single`` runs all images at one route, the most
    accurate one within the budget. Its settings are the routes.
    """

    kind: RouterKind
    costs: CostTable
    curve: tuple[OperatingPoint, ...] = ()

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        costs = [point.cost for point in self.curve]
        if not all(isinstance(cost, int | float) and math.isfinite(cost) for cost in costs):
            raise DsnetError("the settings of a router must have finite costs")
        if costs != sorted(costs):
            raise DsnetError("the settings of a router must be in order of their cost")
        for point in self.curve:
            if not isinstance(point.accuracy, int | float) or not math.isfinite(point.accuracy):
                raise DsnetError(f"a setting of a router has an accuracy, not {shorten(point.accuracy)}")
            if not all(isinstance(n, int | float) and not math.isnan(n) for n in point.parameters):
                raise DsnetError(f"a setting of a router has numbers, not {point.parameters}")

    def keeps(self, budget: float) -> bool:
        """Whether a mean cost is within reach."""
        if not self.curve:
            return False
        # An end that was written with three digits is still reached.
        return 0.995 * self.curve[0].cost <= budget <= 1.005 * self.curve[-1].cost

    def point(self, budget: float) -> OperatingPoint:
        """The most accurate setting whose mean cost was at most the budget, and at most 2 % below it.

        Where there is none so near, the dearest one below the budget. Of single routes, the most accurate of
        all within the budget.
        """
        if not self.curve:
            raise DsnetError(
                f"this {self.kind} is not calibrated, so it cannot keep a budget; run `dsnet calibrate RUN`"
            )
        if not self.keeps(budget):
            low, high, unit = self.curve[0].cost, self.curve[-1].cost, self.costs.unit
            raise DsnetError(
                f"a mean cost of {format_cost(budget, unit)} is out of reach: this {self.kind} goes from "
                f"{format_cost(low, unit)} to {format_cost(high, unit)}"
            )
        below = [point for point in self.curve if point.cost <= budget * (1 + 1e-9)] or [self.curve[0]]
        near = [point for point in below if point.cost >= (1 - NEAR) * budget] or below[-1:]
        return max(below if self.kind == "single" else near, key=lambda point: (point.accuracy, -point.cost))

    def policy(self, budget: float | None = None) -> GatePolicy | CascadePolicy:
        """The policy for a budget, in the unit of the costs; without one, the gates' own decision."""
        if budget is None:
            if self.kind != "gate":
                raise DsnetError(f"a {self.kind} router has no setting of its own: give it a budget")
            return GatePolicy(costs=self.costs)
        return self.policy_at(self.point(budget))

    def policy_at(self, point: OperatingPoint) -> GatePolicy | CascadePolicy:
        """The policy of a setting."""
        if self.kind == "gate":
            return GatePolicy(costs=self.costs, weight=point.parameters[0])
        return CascadePolicy(costs=self.costs, routes=point.routes, thresholds=point.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types); of a class of your own it names the class, which alone can read it."""
        own = {} if type(self) is Router else {"class": _class_name(type(self))}
        return {
            "kind": self.kind,
            **own,
            "costs": asdict(self.costs),
            "curve": [
                [
                    p.cost,
                    p.accuracy,
                    list(p.parameters),
                    list(p.routes),
                    [list(pair) for pair in p.route_counts],
                ]
                for p in self.curve
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Router:
        """The router that `to_dict` wrote."""
        try:
            _check_kind(data["kind"])
            written_by = data.get("class", _class_name(Router))
            if written_by != _class_name(cls):
                raise DsnetError(
                    f"unknown router of the class {shorten(written_by)}; {cls.__name__} reads the kinds "
                    f"{', '.join(get_args(RouterKind))}. Read it by from_dict of the class that wrote it"
                )
            costs = data["costs"]
            table = CostTable(
                unit=costs["unit"],
                prefix=costs["prefix"],
                segments=tuple(tuple(tuple(row) for row in gate) for gate in costs["segments"]),
                network=costs.get("network", ""),
            )
            curve = tuple(
                OperatingPoint(
                    cost=cost,
                    accuracy=accuracy,
                    parameters=tuple(numbers),
                    routes=tuple(routes),
                    route_counts=tuple((int(route), int(count)) for route, count in taken),
                )
                for cost, accuracy, numbers, routes, taken in data["curve"]
            )
            return cls(kind=data["kind"], costs=table, curve=curve)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, DsnetError):
                raise
            raise DsnetError(f"the router is damaged ({error!r})") from error


def _check_kind(kind: object) -> None:
    if kind not in get_args(RouterKind):
        raise DsnetError(f"unknown router {shorten(kind)}; known kinds: {', '.join(get_args(RouterKind))}")


def _class_name(kind: type[Router]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Routed:
    """A network whose images find their own routes within a budget; called like the network.

    Nothing is stored on the network, so two of these with different budgets can share it between threads.
    ``budget`` is a mean cost in the unit of the router, or text: ``"300M"``, ``"45%"`` of the largest route.
    """

    model: Routable[Any]
    router: Router
    budget: float | str | None = None
    policy: GatePolicy | CascadePolicy = field(init=False)

    def __post_init__(self) -> None:
        if not self.router.costs.fits(self.model):
            whose = self.router.costs.network or "another network"
            raise DsnetError(f"this router is one of {whose}, not of {self.model.name}")
        budget = None if self.budget is None else parse_budget(self.budget, self.router.costs)
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "policy", self.router.policy(budget))

    def __call__(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] → logits [B, classes]."""
        return self.policy(self.model, x).logits

    def run(self, x: Tensor) -> RoutedOutput:
        """Logits, and the number of the route that gave each."""
        return self.policy(self.model, x)

    def path(self, route: int) -> tuple[int, ...]:
        """The routes that ran for an image that ``route`` answered."""
        return self.policy.path(route)

    def cost(self, route: int) -> float:
        """What an image cost that ``route`` answered, in the unit of the router."""
        return self.policy.cost(self.model, route)

    def __repr__(self) -> str:
        return f"Routed({self.model.name}, {self.router.kind}, budget={self.budget})"

    def at(self, budget: float | str | None) -> Routed:
        """The same network and router at another budget."""
        return Routed(self.model, self.router, budget)


def parse_budget(text: str | float, costs: CostTable) -> float:
    """``300M``, ``1.2B``, ``45%`` (of the largest route), ``5ms`` → a mean cost in the table's unit.

    A number is one already.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not 0 < text < math.inf:
            raise DsnetError(f"a budget must be above 0 and finite, not {text}")
        _check_percent(float(text), costs)
        return float(text)
    if not isinstance(text, str):
        raise DsnetError(f"a budget is a number, or written as 300M, 1.2B, 5ms or 45%, not {shorten(text)}")
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(%|ms|[kKMBG]?)\s*", text)
    if found is None:
        raise DsnetError(f"a budget is written as 300M, 1.2B, 5ms or 45%, not {shorten(text)}")
    number, suffix = float(found[1]), found[2]
    if not 0 < number < math.inf:
        raise DsnetError(f"a budget must be above 0 and finite, not {shorten(text)}")
    if suffix == "%":
        return number / 100 * costs.largest
    unit: Unit = "ms" if suffix == "ms" else "madds"
    if unit != costs.unit and not (suffix == "" and costs.unit == "ms"):
        has = "milliseconds (5ms, 45%)" if costs.unit == "ms" else "multiply-adds (300M, 45%)"
        raise DsnetError(f"this router counts {has}; {shorten(text)} is in another unit")
    if suffix == "":
        _check_percent(number, costs)
    return number * {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}.get(suffix, 1.0)


def _check_percent(number: float, costs: CostTable) -> None:
    """Raises where a number can only have been meant as a percentage."""
    if costs.unit == "madds" and number <= 100 and number < costs.prefix:
        share = number if number > 1 else 100 * number
        raise DsnetError(
            f"a budget of {number:g} is {number:g} multiply-adds an image, less than any route takes; for a "
            f"share of the largest route's cost write {share:g}%"
        )


def format_cost(cost: float, unit: Unit) -> str:
    """A cost as people write it."""
    return f"{cost:.3g} ms" if unit == "ms" else f"{human(cost)} MAdds"
