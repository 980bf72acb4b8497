"""Routers: a policy with calibrated operating points, which keeps any budget; and a network routed by one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from dsnet.counts import human
from dsnet.errors import DsnetError, shorten
from dsnet.models.group_by_route import Routable
from dsnet.routing.cost_table import CostTable, Unit
from dsnet.routing.policies import OperatingPoint, Policy, RoutedOutput, policy_class

__all__ = ["Routed", "Router", "format_cost", "parse_budget"]

NEAR = 0.02  # share of the budget that a more accurate operating point may stay below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A registered policy and its operating points, in order of cost.

    ``gate`` and ``cascade`` decide for every image. ``single`` runs all images at one route, the most
    accurate one within the budget; its operating points are the routes.
    """

    kind: str  # the name of the policy, see `register_router`
    costs: CostTable
    curve: tuple[OperatingPoint, ...] = ()

    def __post_init__(self) -> None:
        policy_class(self.kind)
        costs = [point.cost for point in self.curve]
        if not all(isinstance(cost, int | float) and math.isfinite(cost) for cost in costs):
            raise DsnetError(f"operating points of a router need finite costs, got {shorten(costs)}")
        if costs != sorted(costs):
            raise DsnetError(f"operating points of a router must be in order of cost, got {shorten(costs)}")
        for point in self.curve:
            if not isinstance(point.accuracy, int | float) or not math.isfinite(point.accuracy):
                raise DsnetError(
                    f"an operating point of a router needs a finite accuracy, got {shorten(point.accuracy)}"
                )
            if not all(isinstance(n, int | float) and not math.isnan(n) for n in point.parameters):
                raise DsnetError(
                    f"parameters of a router's operating point must be numbers, got {point.parameters}"
                )

    def keeps(self, budget: float) -> bool:
        """Whether a mean cost lies within the range of the operating points."""
        if not self.curve:
            return False
        # With a tolerance: an end of the range that was printed with three digits is still within it.
        return 0.995 * self.curve[0].cost <= budget <= 1.005 * self.curve[-1].cost

    def point(self, budget: float) -> OperatingPoint:
        """Return the most accurate operating point that costs at most the budget and at most 2 % less.

        Where none is that near, return the most expensive one within the budget. Of single routes, return the
        most accurate of all within the budget.

        Raises:
            DsnetError: If the router is not calibrated or the budget is out of its range.
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
        within = [point for point in self.curve if point.cost <= budget * (1 + 1e-9)] or [self.curve[0]]
        if policy_class(self.kind).uses_whole_budget:
            within = [point for point in within if point.cost >= (1 - NEAR) * budget] or within[-1:]
        return max(within, key=lambda point: (point.accuracy, -point.cost))

    def policy(self, budget: float | None = None) -> Policy:
        """Return the policy for a budget in the unit of the costs.

        Without a budget a gate decides by itself.

        Raises:
            DsnetError: If the budget is out of range, or there is none and the policy needs one.
        """
        if budget is not None:
            return self.policy_at(self.point(budget))
        policy = policy_class(self.kind).without_budget(self.costs)
        if policy is None:
            raise DsnetError(f"a {self.kind} router has no setting of its own: give it a budget")
        return policy

    def policy_at(self, point: OperatingPoint) -> Policy:
        """Return the policy of an operating point."""
        return policy_class(self.kind).from_settings(self.costs, point.parameters, point.routes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types)."""
        return {
            "kind": self.kind,
            "costs": {key: value for key, value in asdict(self.costs).items() if value != ()},
            "curve": [
                [p.cost, p.accuracy, list(p.parameters), list(p.routes), list(map(list, p.route_counts))]
                for p in self.curve
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Router:
        """Return the router that `to_dict` wrote.

        Raises:
            DsnetError: If no router is registered under its kind, or the data is damaged.
        """
        policy_class(data["kind"])
        if "class" in data:  # a subclass of an earlier version, with a meaning of its own
            raise DsnetError(
                f"this {shorten(data['kind'])} was written by the class {shorten(data['class'])}, which "
                "an earlier version allowed; register its policy by register_router and calibrate again"
            )
        try:
            costs = data["costs"]
            segments = tuple(tuple(tuple(row) for row in gate) for gate in costs["segments"])
            members = {key: tuple(costs[key]) for key in ("members", "prefixes") if key in costs}
            curve = tuple(
                OperatingPoint(
                    cost=cost,
                    accuracy=accuracy,
                    parameters=tuple(parameters),
                    routes=tuple(routes),
                    route_counts=tuple((int(route), int(count)) for route, count in counts),
                )
                for cost, accuracy, parameters, routes, counts in data["curve"]
            )
            return cls(
                kind=data["kind"], costs=CostTable(**{**costs, "segments": segments, **members}), curve=curve
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DsnetError(f"the router is damaged ({error!r})") from error


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Routed:
    """A network whose images are routed within a budget; called like the network.

    Nothing is stored on the network, so two of these with different budgets can share it between threads.

    Args:
        model: A supernet in eval mode, or the executor of a plan.
        router: A router for this network.
        budget: Mean cost of an image in the unit of the router, or text: ``"300M"``, ``"45%"`` of the largest
            route.

    Examples:
        >>> routed = Routed(model, router, "45%")  # doctest: +SKIP
        >>> logits = routed(images)  # doctest: +SKIP
    """

    model: Routable[Any]
    router: Router
    budget: float | str | None = None
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        if not self.router.costs.fits(self.model):
            network = self.router.costs.network or "another network"
            raise DsnetError(f"this router is one of {network}, not of {self.model.name}")
        budget = None if self.budget is None else parse_budget(self.budget, self.router.costs)
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "policy", self.router.policy(budget))

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of images [B, C, H, W]."""
        return self.policy(self.model, x).logits

    def run(self, x: Tensor) -> RoutedOutput:
        """Return logits, and the number of the route that gave each."""
        return self.policy(self.model, x)

    def path(self, route: int) -> tuple[int, ...]:
        """Return the routes that ran for an image that ``route`` answered, in order."""
        return self.policy.path(route)

    def cost(self, route: int) -> float:
        """Return the cost of an image that ``route`` answered, in the unit of the router."""
        return self.policy.cost(self.model.space, route)

    def __repr__(self) -> str:
        return f"Routed({self.model.name}, {self.router.kind}, budget={self.budget})"

    def at(self, budget: float | str | None) -> Routed:
        """Return the same network and router at another budget."""
        return Routed(self.model, self.router, budget)


def parse_budget(text: str | float, costs: CostTable) -> float:
    """Parse a budget into a mean cost in the table's unit.

    Args:
        text: ``300M``, ``1.2B``, ``45%`` (of the largest route), ``5ms``, or a number in the unit.
        costs: The table that the budget counts.

    Raises:
        DsnetError: If the text cannot be read, or is in another unit than the table.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not 0 < text < math.inf:
            raise DsnetError(f"a budget must be above 0 and finite, not {text}")
        _check_percent(float(text), costs)
        return float(text)
    if not isinstance(text, str):
        raise DsnetError(f"a budget is a number, or written as 300M, 1.2B, 5ms or 45%, not {shorten(text)}")
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(%|ms|[kKMBG]?)\s*", text)
    if match is None:
        raise DsnetError(f"a budget is written as 300M, 1.2B, 5ms or 45%, not {shorten(text)}")
    number, suffix = float(match[1]), match[2]
    if not 0 < number < math.inf:
        raise DsnetError(f"a budget must be above 0 and finite, not {shorten(text)}")
    if suffix == "%":
        return number / 100 * costs.largest
    unit: Unit = "ms" if suffix == "ms" else "madds"
    if unit != costs.unit and not (suffix == "" and costs.unit == "ms"):
        expected = "milliseconds (5ms, 45%)" if costs.unit == "ms" else "multiply-adds (300M, 45%)"
        raise DsnetError(f"this router counts {expected}; {shorten(text)} is in another unit")
    if suffix == "":
        _check_percent(number, costs)
    return number * {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}.get(suffix, 1.0)


def _check_percent(number: float, costs: CostTable) -> None:
    """Raise an error if a number can only have been meant as a percentage."""
    if costs.unit == "madds" and number <= 100 and number < costs.prefix:
        share = number if number > 1 else 100 * number
        raise DsnetError(
            f"a budget of {number:g} is {number:g} multiply-adds an image, less than any route takes; for a "
            f"share of the largest route's cost write {share:g}%"
        )


def format_cost(cost: float, unit: Unit) -> str:
    """Format a cost with its unit."""
    return f"{cost:.3g} ms" if unit == "ms" else f"{human(cost)} MAdds"
