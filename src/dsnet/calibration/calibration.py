"""Routers calibrated on held-out images: saved with a checkpoint, they keep any budget afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsnet.calibration.search import (
    calibrate_candidates,
    calibrate_cascade,
    calibrate_gate,
    calibrate_single,
)
from dsnet.core.checkpoint import Checkpoint
from dsnet.core.formats import ROUTING
from dsnet.core.schema import check
from dsnet.errors import DsnetError, shorten
from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import OperatingPoint, list_routers, policy_class
from dsnet.routing.route_outputs import RouteOutputs, simulate
from dsnet.routing.router import Router, format_cost

__all__ = ["Calibration", "RouterPick", "calibrate", "has_trained_gates"]

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPick:
    """The most accurate router for a budget."""

    kind: str
    gain: float | None  # accuracy on the calibration images above the next best router's, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Routers whose operating points were found on the same images."""

    images: int
    digest: str  # of the images and labels
    routers: Mapping[str, Router]  # by kind
    singles: Mapping[int, float]  # accuracy of every route for all images, by number

    @property
    def costs(self) -> CostTable:
        """The cost table of all routers."""
        return next(iter(self.routers.values())).costs

    def budget_range(self, name: str = "auto") -> tuple[float, float]:
        """Return the lowest and the highest mean cost of a router's operating points, or of all routers'."""
        curves = [r.curve for r in self.only(name).routers.values()]
        return min(c[0].cost for c in curves), max(c[-1].cost for c in curves)

    def pick(self, budget: float, kinds: Collection[str] | None = None) -> RouterPick:
        """Return the router, of all or of some kinds, that was most accurate at a budget.

        Where several are equally accurate, prefer one route for all images, which needs no router.
        """
        accuracies = {
            kind: router.point(budget).accuracy
            for kind, router in sorted(self.routers.items(), key=lambda item: item[0] != "single")
            if router.keeps(budget) and (kinds is None or kind in kinds)
        }
        if not accuracies:
            low, high = self.budget_range()
            unit = self.costs.unit
            raise DsnetError(
                f"a mean cost of {format_cost(budget, unit)} is out of reach: the routers go from "
                f"{format_cost(low, unit)} to {format_cost(high, unit)}"
            )
        best = max(accuracies, key=lambda kind: round(self.images * accuracies[kind]))  # the first of equals
        others = [accuracy for kind, accuracy in accuracies.items() if kind != best]
        return RouterPick(kind=best, gain=accuracies[best] - max(others) if others else None)

    def router(self, name: str, budget: float | None = None) -> Router:
        """Return the router of a name; for ``auto`` the most accurate one at the budget.

        Raises:
            DsnetError: If no router is registered under the name, or it is not calibrated here.
        """
        if name == "auto":
            if budget is None:
                raise DsnetError("router auto needs a budget: it picks the most accurate router there")
            name = self.pick(budget).kind
        policy_class(name)
        if name not in self.routers:
            raise DsnetError(f"there is no {name} here; calibrated: {', '.join(self.routers)}")
        return self.routers[name]

    def only(self, name: str) -> Calibration:
        """Return the calibration with one of its routers; with ``auto``, with all."""
        return self if name == "auto" else replace(self, routers={name: self.router(name)})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types)."""
        return {
            "format": FORMAT,
            "images": self.images,
            "digest": self.digest,
            "routers": {kind: router.to_dict() for kind, router in self.routers.items()},
            "singles": {str(number): accuracy for number, accuracy in self.singles.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Return the calibration that `to_dict` wrote."""
        if isinstance(data, Mapping) and data.get("format", FORMAT) != FORMAT:
            given = shorten(data["format"])
            raise DsnetError(f"calibration format {given}; this version reads {FORMAT}")
        check(ROUTING, data, "the calibration")
        routers = {kind: Router.from_dict(router) for kind, router in data["routers"].items()}
        if any(kind != router.kind for kind, router in routers.items()):
            kinds = {name: router.kind for name, router in routers.items()}
            raise DsnetError(f"a calibration names every router by its kind, not {kinds}")
        singles = {int(number): float(accuracy) for number, accuracy in data["singles"].items()}
        return cls(images=data["images"], digest=data["digest"], routers=routers, singles=singles)

    @classmethod
    def of(cls, saved: Checkpoint, where: str | Path) -> Calibration:
        """Return the calibration in a checkpoint.

        Args:
            saved: The checkpoint.
            where: The run, as `dsnet calibrate` takes it, for error messages.
        """
        route = saved.data.get("route")
        if route is not None:
            raise DsnetError(f"{where} was trained at route {route} alone: there is nothing to choose")
        data = saved.data.get("routing")
        if data is None:
            raise DsnetError(f"{where} is not calibrated; run `dsnet calibrate {where}` first")
        try:
            calibration = cls.from_dict(data)
            _check_choices(calibration, saved)
            return calibration._with_single(saved.data["network"]["space"]["routes"])
        except (DsnetError, KeyError, TypeError) as error:
            raise DsnetError(f"{where}: {error}; `dsnet calibrate {where}` makes it anew") from error

    def _with_single(self, routes: Sequence[Mapping[str, Any]]) -> Calibration:
        """Add the router of single routes, which calibrations of earlier versions lack."""
        if "single" in self.routers:
            return self
        choices = {route["number"]: tuple(route["choices"]) for route in routes}
        points = [
            OperatingPoint(
                cost=self.costs.of(choices[number]),
                accuracy=accuracy,
                routes=(number,),
                route_counts=((number, self.images),),
            )
            for number, accuracy in self.singles.items()
        ]
        points.sort(key=lambda point: (point.cost, point.accuracy))
        single = Router(kind="single", costs=self.costs, curve=tuple(points))
        return replace(self, routers={**self.routers, "single": single}) if points else self


def _check_choices(calibration: Calibration, saved: Checkpoint) -> None:
    """Raise an error if a router's costs are for other choices than the checkpoint's network has."""
    choices = zip(*(route["choices"] for route in saved.data["network"]["space"]["routes"]), strict=True)
    expected = [len(set(gate)) for gate in choices]
    for kind, router in calibration.routers.items():
        given = [len(gate[0]) for gate in router.costs.segments]
        if given != expected:
            raise DsnetError(f"routers.{kind}.costs has {given} choices at the gates, expected {expected}")


def has_trained_gates(saved: Checkpoint) -> bool:
    """Return whether a checkpoint's gates are trained: in Stage II, or together with the weights."""
    recipe = saved.data.get("recipe")
    scheme = recipe.get("scheme", {}) if isinstance(recipe, dict) else {}
    return "gate" in saved.data or scheme.get("joint") is not None


def calibrate(outputs: RouteOutputs, costs: CostTable, *, gate: bool = True) -> Calibration:
    """Find the operating points of all routers, with the routes that images take at each.

    Args:
        outputs: Recorded outputs on held-out images.
        costs: The cost table that budgets count.
        gate: Whether the gates are trained; else there is no gate router.
    """
    single = calibrate_single(outputs, costs)
    routers = [calibrate_gate(outputs, costs)] if gate else []
    routers += [calibrate_cascade(outputs, costs), single]
    added = (calibrate_candidates(name, outputs, costs) for name in list_routers())
    routers += [router for router in added if router.curve]
    return Calibration(
        images=len(outputs),
        digest=outputs.digest,
        routers={router.kind: _with_route_counts(router, outputs) for router in routers},
        singles={point.routes[0]: point.accuracy for point in single.curve},
    )


def _with_route_counts(router: Router, outputs: RouteOutputs) -> Router:
    points = []
    for point in router.curve:
        counts = np.bincount(simulate(router.policy_at(point), outputs).columns.numpy()).tolist()
        route_counts = tuple((outputs.routes[c].number, n) for c, n in enumerate(counts) if n)
        points.append(replace(point, route_counts=route_counts))
    return replace(router, curve=tuple(points))
