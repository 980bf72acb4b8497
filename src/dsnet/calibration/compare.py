"""Routers side by side at equal mean cost, with what they must be measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsnet.calibration.calibration import Calibration
from dsnet.calibration.difficulty import DIFFICULTIES, difficulties, mutual_information
from dsnet.calibration.route_outputs import RouteOutputs, Simulation, simulate
from dsnet.calibration.search import interpolate, oracle, random_router, static_points
from dsnet.calibration.verdict import Contest, Paired, Verdict, verdict
from dsnet.errors import DsnetError
from dsnet.routing.router import OperatingPoint, RouterKind

__all__ = ["Comparison", "Row", "compare", "needed_routes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A router at a budget, on images that neither training nor calibration saw."""

    router: RouterKind
    budget: float
    cost: float  # mean of an image
    cost_error: float  # standard error of that mean
    accuracy: float
    error: float  # standard error of the accuracy
    static_mix: float  # two routes that calibration found best, mixed at random to the same mean cost
    random: float  # routes drawn with the same histogram
    alone: float | None  # stand-alone networks, mixed to the same mean cost
    by_difficulty: dict[str, float | None]  # accuracy on easy, dependent and hard images
    route_counts: dict[int, int]  # route → images that it answered
    information: float  # bits that the route tells about the difficulty of its image
    single: int  # the single route that was most accurate within the budget on the calibration images
    single_cost: float
    single_accuracy: float
    gain: float  # accuracy above that route's, image by image
    gain_error: float  # standard error of that difference

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        keys = {"route_counts": "taken"}
        return {keys.get(name, name): getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All of it."""

    images: int
    rows: tuple[Row, ...]
    singles: tuple[OperatingPoint, ...]  # the accuracy of every route by itself
    alone: tuple[OperatingPoint, ...]
    oracle: OperatingPoint
    shares: dict[str, float]  # of easy, dependent and hard images
    verdict: Verdict | None  # whether routing pays; none where there are single routes only

    def curve(self, router: RouterKind) -> list[Row]:
        """A router's rows, by cost."""
        return sorted((row for row in self.rows if row.router == router), key=lambda row: row.cost)


def compare(
    outputs: RouteOutputs,
    calibration: Calibration,
    budgets: Sequence[float],
    alone: Sequence[OperatingPoint] = (),
    *,
    images: str = "test images",
) -> Comparison:
    """Every calibrated router at every budget that it keeps; ``images`` says what the outputs are of."""
    costs, hard = calibration.costs, difficulties(outputs)
    static = static_points(outputs, costs)
    rows, contests = [], []
    for kind, router in calibration.routers.items():
        for budget in budgets:
            if router.keeps(budget):
                seen = simulate(router.policy(budget), outputs)
                contest = _contest(outputs, calibration, kind, budget, seen)
                rows.append(_row(outputs, calibration, contest, seen, static, alone, hard))
                contests += [contest] if kind != "single" else []
    if not rows:
        calibration.pick(budgets[0])  # says what can be reached
        raise DsnetError("no router keeps any of these budgets")
    best = oracle(outputs, costs)
    return Comparison(
        images=len(outputs),
        rows=tuple(rows),
        singles=tuple(static),
        alone=tuple(alone),
        oracle=OperatingPoint(cost=best.cost, accuracy=best.accuracy),
        shares={name: float((hard == i).double().mean()) for i, name in enumerate(DIFFICULTIES)},
        verdict=verdict(contests, costs.unit, images),
    )


def needed_routes(calibration: Calibration, budgets: Sequence[float]) -> list[int]:
    """The routes that outputs must have for these budgets: those of cascades and of single routes."""
    points = [r.point(budget) for r in calibration.routers.values() for budget in budgets if r.keeps(budget)]
    return sorted({number for point in points for number in point.routes})


def _contest(
    outputs: RouteOutputs, calibration: Calibration, kind: RouterKind, budget: float, seen: Simulation
) -> Contest:
    """A router beside the best single route within its budget; the calibration chose both."""
    costs, singles = calibration.costs, calibration.singles
    priced = {route.number: costs.of(route.choices) for route in outputs.routes if route.number in singles}
    within = [number for number, cost in priced.items() if cost <= budget * (1 + 1e-9)]
    within = within or [min(priced, key=lambda number: priced[number])]
    best = max(within, key=lambda number: (singles[number], -priced[number]))
    right = outputs.correct[:, outputs.column(best)]
    return Contest(
        router=kind,
        budget=budget,
        cost=seen.cost,
        accuracy=seen.accuracy,
        expected=calibration.routers[kind].point(budget).accuracy - singles[best],
        route=best,
        route_cost=priced[best],
        route_accuracy=float(right.double().mean()),
        paired=Paired.of(seen.correct, right),
    )


def _row(
    outputs: RouteOutputs,
    calibration: Calibration,
    contest: Contest,
    seen: Simulation,
    static: list[OperatingPoint],
    alone: Sequence[OperatingPoint],
    hard: Tensor,
) -> Row:
    groups = {name: seen.correct[hard == i] for i, name in enumerate(DIFFICULTIES)}
    counts = torch.bincount(seen.columns, minlength=len(outputs.routes)).tolist()
    accuracy = seen.accuracy
    return Row(
        router=contest.router,
        budget=contest.budget,
        cost=seen.cost,
        cost_error=seen.cost_error,
        accuracy=accuracy,
        error=(accuracy * (1 - accuracy) / len(outputs)) ** 0.5,
        static_mix=interpolate(static, seen.cost, calibration.singles),
        random=random_router(outputs, seen),
        alone=interpolate(list(alone), seen.cost) if alone else None,
        by_difficulty={n: float(g.double().mean()) if len(g) else None for n, g in groups.items()},
        route_counts={route.number: n for route, n in zip(outputs.routes, counts, strict=True) if n},
        information=mutual_information(seen.columns, hard),
        single=contest.route,
        single_cost=contest.route_cost,
        single_accuracy=contest.route_accuracy,
        gain=contest.paired.difference,
        gain_error=contest.paired.error,
    )
