"""Routers compared at equal mean cost, with each other and with baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsnet.calibration.calibration import Calibration
from dsnet.calibration.difficulty import DIFFICULTIES, difficulties, mutual_information
from dsnet.calibration.search import interpolate, oracle, random_router, static_points
from dsnet.calibration.verdict import PairedTest, RouterComparison, Verdict, verdict
from dsnet.errors import DsnetError
from dsnet.routing.policies import OperatingPoint
from dsnet.routing.route_outputs import RouteOutputs, Simulation, simulate

__all__ = ["Comparison", "ComparisonRow", "compare", "needed_routes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """A router at a budget, on images that neither training nor calibration used."""

    router: str
    budget: float
    cost: float  # mean of an image
    cost_error: float  # standard error of that mean
    accuracy: float
    error: float  # standard error of the accuracy
    static_mix: float  # the best two routes by calibration, mixed at random to the same mean cost
    random: float  # routes drawn with the same histogram
    alone: float | None  # stand-alone networks, mixed to the same mean cost
    by_difficulty: dict[str, float | None]  # accuracy on easy, dependent and hard images
    route_counts: dict[int, int]  # route → images that it answered
    information: float  # mutual information of route and difficulty, in bits
    single: int  # the single route that was most accurate within the budget on the calibration images
    single_cost: float
    single_accuracy: float
    gain: float  # accuracy above that route's, image by image
    gain_error: float  # standard error of that difference

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types)."""
        keys = {"route_counts": "taken"}
        return {keys.get(name, name): getattr(self, name) for name in self.__slots__}


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
    static, rows, comparisons = static_points(outputs, costs), [], []
    for kind, router in calibration.routers.items():
        for budget in budgets:
            if not router.keeps(budget):
                continue
            seen = simulate(router.policy(budget), outputs)
            row = _against_single_route(outputs, calibration, kind, budget, seen)
            comparisons += [row] if kind != "single" else []
            groups = {name: seen.correct[difficulty == i] for i, name in enumerate(DIFFICULTIES)}
            counts = torch.bincount(seen.columns, minlength=len(outputs.routes)).tolist()
            accuracy = seen.accuracy
            rows.append(
                ComparisonRow(
                    router=kind,
                    budget=budget,
                    cost=seen.cost,
                    cost_error=seen.cost_error,
                    accuracy=accuracy,
                    error=(accuracy * (1 - accuracy) / len(outputs)) ** 0.5,
                    static_mix=interpolate(static, seen.cost, calibration.singles),
                    random=random_router(outputs, seen),
                    alone=interpolate(list(alone), seen.cost) if alone else None,
                    by_difficulty={
                        n: float(g.double().mean()) if len(g) else None for n, g in groups.items()
                    },
                    route_counts={r.number: n for r, n in zip(outputs.routes, counts, strict=True) if n},
                    information=mutual_information(seen.columns, difficulty),
                    single=row.route,
                    single_cost=row.route_cost,
                    single_accuracy=row.route_accuracy,
                    gain=row.paired.difference,
                    gain_error=row.paired.standard_error,
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
        verdict=verdict(comparisons, costs.unit, images),
    )


def needed_routes(calibration: Calibration, budgets: Sequence[float]) -> list[int]:
    """Return the routes that outputs must have for these budgets: those of cascades and of single routes."""
    points = [r.point(budget) for r in calibration.routers.values() for budget in budgets if r.keeps(budget)]
    return sorted({number for point in points for number in point.routes})


def _against_single_route(
    outputs: RouteOutputs, calibration: Calibration, kind: str, budget: float, seen: Simulation
) -> RouterComparison:
    costs, singles = calibration.costs, calibration.singles
    table = {route.number: costs.of(route.choices) for route in outputs.routes if route.number in singles}
    within = [number for number, cost in table.items() if cost <= budget * (1 + 1e-9)]
    within = within or [min(table, key=lambda number: table[number])]
    best = max(within, key=lambda number: (singles[number], -table[number]))
    correct = outputs.correct[:, outputs.column(best)]
    return RouterComparison(
        router=kind,
        budget=budget,
        cost=seen.cost,
        accuracy=seen.accuracy,
        expected_gain=calibration.routers[kind].point(budget).accuracy - singles[best],
        route=best,
        route_cost=table[best],
        route_accuracy=float(correct.double().mean()),
        paired=PairedTest.of(seen.correct, correct),
    )
