"""Routers side by side at equal mean cost, with what they must be measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.routing.calibration import Calibration
from dsnet.routing.curves import interpolate, oracle, random_router, static_points
from dsnet.routing.monitor import DIFFICULTIES, difficulties, mutual_information
from dsnet.routing.outputs import Outputs, Simulated, simulate
from dsnet.routing.router import Point, RouterKind

__all__ = ["Comparison", "Row", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A router at a budget, on images that neither training nor calibration saw."""

    router: RouterKind
    budget: float
    cost: float  # mean of an image
    cost_error: float  # standard error of that mean
    accuracy: float
    error: float  # standard error of the accuracy
    static: float  # single routes that calibration found best, mixed to the same mean cost
    random: float  # routes drawn with the same histogram
    alone: float | None  # stand-alone networks, mixed to the same mean cost
    by_difficulty: dict[str, float | None]  # accuracy on easy, dependent and hard images
    taken: dict[int, int]  # route → images that it answered
    information: float  # bits that the route tells about the difficulty of its image

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All of it."""

    images: int
    rows: tuple[Row, ...]
    static: tuple[Point, ...]
    alone: tuple[Point, ...]
    oracle: Point
    shares: dict[str, float]  # of easy, dependent and hard images

    def curve(self, router: RouterKind) -> list[Row]:
        """A router's rows, by cost."""
        return sorted((row for row in self.rows if row.router == router), key=lambda row: row.cost)


def compare(
    outputs: Outputs, calibration: Calibration, budgets: Sequence[float], alone: Sequence[Point] = ()
) -> Comparison:
    """Every calibrated router at every budget that it keeps."""
    costs, hard = calibration.costs, difficulties(outputs)
    static = static_points(outputs, costs)
    rows = []
    for kind, router in calibration.routers.items():
        for budget in budgets:
            if router.keeps(budget):
                seen = simulate(router.rule(budget), outputs)
                rows.append(_row(outputs, calibration, kind, budget, seen, static, alone, hard))
    if not rows:
        calibration.pick(budgets[0])  # says what can be reached
        raise DsnetError("no router keeps any of these budgets")
    best = oracle(outputs, costs)
    return Comparison(
        images=len(outputs),
        rows=tuple(rows),
        static=tuple(static),
        alone=tuple(alone),
        oracle=Point(cost=best.cost, accuracy=best.accuracy, numbers=()),
        shares={name: float((hard == i).double().mean()) for i, name in enumerate(DIFFICULTIES)},
    )


def _row(
    outputs: Outputs,
    calibration: Calibration,
    kind: RouterKind,
    budget: float,
    seen: Simulated,
    static: list[Point],
    alone: Sequence[Point],
    hard: Tensor,
) -> Row:
    groups = {name: seen.correct[hard == i] for i, name in enumerate(DIFFICULTIES)}
    counts = torch.bincount(seen.columns, minlength=len(outputs.routes)).tolist()
    accuracy = seen.accuracy
    return Row(
        router=kind,
        budget=budget,
        cost=seen.cost,
        cost_error=seen.cost_error,
        accuracy=accuracy,
        error=(accuracy * (1 - accuracy) / len(outputs)) ** 0.5,
        static=interpolate(static, seen.cost, calibration.singles),
        random=random_router(outputs, seen),
        alone=interpolate(list(alone), seen.cost) if alone else None,
        by_difficulty={n: float(g.double().mean()) if len(g) else None for n, g in groups.items()},
        taken={route.number: n for route, n in zip(outputs.routes, counts, strict=True) if n},
        information=mutual_information(seen.columns, hard),
    )
