"""Routers compared at equal mean cost, with each other and with baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsnet.calibration._verdict import PairedTest, RouterComparison, Verdict, verdict
from dsnet.calibration.calibration import Calibration
from dsnet.calibration.difficulty import DIFFICULTIES, difficulties, mutual_information
from dsnet.calibration.search import interpolate, oracle, random_router, static_points
from dsnet.errors import DsnetError
from dsnet.routing.policies import OperatingPoint
from dsnet.routing.route_outputs import RouteOutputs, simulate

__all__ = ["Comparison", "ComparisonRow", "compare", "needed_routes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow(RouterComparison):
    """A router at a budget, on images that neither training nor calibration used."""

    cost_error: float  # standard error of the mean cost
    error: float  # standard error of the accuracy
    static_mix: float  # the best two routes by calibration, mixed at random to the same mean cost
    random: float  # routes drawn with the same histogram
    alone: float | None  # stand-alone networks, mixed to the same mean cost
    by_difficulty: dict[str, float | None]  # accuracy on easy, dependent and hard images
    route_counts: dict[int, int]  # route → images that it answered
    information: float  # mutual information of route and difficulty, in bits

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types)."""
        same = ("router", "budget", "cost", "cost_error", "accuracy", "error", "static_mix", "random")
        return {
            **{name: getattr(self, name) for name in (*same, "alone", "by_difficulty")},
            "taken": self.route_counts,
            "information": self.information,
            "single": self.route,
            "single_cost": self.route_cost,
            "single_accuracy": self.route_accuracy,
            "gain": self.paired.difference,
            "gain_error": self.paired.standard_error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Routers at several budgets, with baselines."""

    images: int
    rows: tuple[ComparisonRow, ...]
    singles: tuple[OperatingPoint, ...]  # every route for all images
    alone: tuple[OperatingPoint, ...]  # stand-alone networks
    oracle: OperatingPoint
    shares: dict[str, float]  # of easy, dependent and hard images
    verdict: Verdict | None  # whether routing pays; None if there are single routes only

    def curve(self, router: str) -> list[ComparisonRow]:
        """Return a router's rows in order of cost."""
        return sorted((row for row in self.rows if row.router == router), key=lambda row: row.cost)


def compare(
    outputs: RouteOutputs,
    calibration: Calibration,
    budgets: Sequence[float],
    alone: Sequence[OperatingPoint] = (),
    *,
    images: str = "test images",
) -> Comparison:
    """Compare every calibrated router at every budget that it keeps.

    Args:
        outputs: Recorded outputs on the images to compare on.
        calibration: The routers.
        budgets: Mean costs in the unit of the calibration.
        alone: Stand-alone networks.
        images: Describes the images, for the verdict.
    """
    costs, difficulty = calibration.costs, difficulties(outputs)
    static, rows = static_points(outputs, costs), []
    for kind, router in calibration.routers.items():
        for budget in budgets:
            if not router.keeps(budget):
                continue
            simulation = simulate(router.policy(budget), outputs)
            cost, accuracy, correct = simulation.cost, simulation.accuracy, simulation.correct
            groups = {name: correct[difficulty == i] for i, name in enumerate(DIFFICULTIES)}
            counts = torch.bincount(simulation.columns, minlength=len(outputs.routes)).tolist()
            route, route_cost = _best_single_route(outputs, calibration, budget)
            route_correct = outputs.correct[:, outputs.column(route)]
            rows.append(
                ComparisonRow(
                    router=kind,
                    budget=budget,
                    cost=cost,
                    cost_error=simulation.cost_error,
                    accuracy=accuracy,
                    error=(accuracy * (1 - accuracy) / len(outputs)) ** 0.5,
                    expected_gain=router.point(budget).accuracy - calibration.singles[route],
                    route=route,
                    route_cost=route_cost,
                    route_accuracy=float(route_correct.double().mean()),
                    paired=PairedTest.of(correct, route_correct),
                    static_mix=interpolate(static, cost, calibration.singles),
                    random=random_router(outputs, simulation),
                    alone=interpolate(list(alone), cost) if alone else None,
                    by_difficulty={
                        n: float(g.double().mean()) if len(g) else None for n, g in groups.items()
                    },
                    route_counts={r.number: n for r, n in zip(outputs.routes, counts, strict=True) if n},
                    information=mutual_information(simulation.columns, difficulty),
                )
            )
    if not rows:
        calibration.pick(budgets[0])  # raises an error with the range of the routers
        raise DsnetError("no router keeps any of these budgets")
    best = oracle(outputs, costs)
    return Comparison(
        images=len(outputs),
        rows=tuple(rows),
        singles=tuple(static),
        alone=tuple(alone),
        oracle=OperatingPoint(cost=best.cost, accuracy=best.accuracy),
        shares={name: float((difficulty == i).double().mean()) for i, name in enumerate(DIFFICULTIES)},
        verdict=verdict([row for row in rows if row.router != "single"], costs.unit, images),
    )


def needed_routes(calibration: Calibration, budgets: Sequence[float]) -> list[int]:
    """Return the routes that outputs must have for these budgets: those of cascades and of single routes."""
    points = [r.point(budget) for r in calibration.routers.values() for budget in budgets if r.keeps(budget)]
    return sorted({number for point in points for number in point.routes})


def _best_single_route(outputs: RouteOutputs, calibration: Calibration, budget: float) -> tuple[int, float]:
    """Return number and cost of the route that was most accurate within the budget at calibration."""
    accuracies = calibration.singles
    costs = {r.number: calibration.costs.of(r.choices) for r in outputs.routes if r.number in accuracies}
    within = [number for number, cost in costs.items() if cost <= budget * (1 + 1e-9)]
    within = within or [min(costs, key=lambda number: costs[number])]
    best = max(within, key=lambda number: (accuracies[number], -costs[number]))
    return best, costs[best]
