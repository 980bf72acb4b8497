"""Accuracy against cost from known outputs: the settings of a router, and what they are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from dsnet.calibration.route_outputs import Array, RouteOutputs, Simulation, walk
from dsnet.routes import evenly
from dsnet.routing.budget import cheaper_moves
from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import unsure
from dsnet.routing.router import OperatingPoint, Router

__all__ = [
    "calibrate_cascade",
    "calibrate_gate",
    "calibrate_single",
    "interpolate",
    "oracle",
    "random_router",
    "static_points",
]

LEVELS = 513  # settings that a router keeps, evenly spaced in cost
CANDIDATES = 16  # routes at most that cascades are made of
GRID = 33  # thresholds of each step that cascades of three routes try


def static_points(outputs: RouteOutputs, costs: CostTable) -> list[OperatingPoint]:
    """Every route by itself."""
    right = outputs.correct.double().mean(0).tolist()
    points = [
        OperatingPoint(cost=costs.of(route.choices), accuracy=accuracy, routes=(route.number,))
        for route, accuracy in zip(outputs.routes, right, strict=True)
    ]
    return sorted(points, key=lambda point: (point.cost, point.accuracy))


def interpolate(
    points: list[OperatingPoint], cost: float, judged: Mapping[int, float] | None = None
) -> float:
    """Accuracy of a mix of the two best single routes around a mean cost: the upper hull of the points.

    Which routes are best is said by ``judged`` (accuracies by number, on other images), where it is given:
    who picks routes by the images that they are judged on reports luck.
    """

    def merit(point: OperatingPoint) -> float:
        return point.accuracy if judged is None else judged[point.routes[0]]

    def slope(low: OperatingPoint, high: OperatingPoint) -> float:
        return (merit(high) - merit(low)) / (high.cost - low.cost)

    known = [p for p in points if judged is None or p.routes[0] in judged]
    hull: list[OperatingPoint] = []
    for point in sorted(known, key=lambda p: (p.cost, -merit(p))):
        if hull and merit(point) <= merit(hull[-1]):
            continue
        while len(hull) > 1 and slope(hull[-2], point) >= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    if cost <= hull[0].cost:
        return hull[0].accuracy
    for low, high in itertools.pairwise(hull):
        if cost <= high.cost:
            share = (cost - low.cost) / (high.cost - low.cost)
            return low.accuracy + share * (high.accuracy - low.accuracy)
    return hull[-1].accuracy


def oracle(outputs: RouteOutputs, costs: CostTable) -> Simulation:
    """The cheapest route that is right; the cheapest of all where none is."""
    table = torch.tensor([costs.of(route.choices) for route in outputs.routes], dtype=torch.float64)
    cheapest = int(table.argmin())
    price = table.expand(len(outputs), -1).masked_fill(~outputs.correct, float("inf"))
    columns = torch.where(outputs.correct.any(1), price.argmin(1), torch.tensor(cheapest))
    right = outputs.correct.gather(1, columns[:, None])[:, 0]
    return Simulation(columns=columns, costs=table[columns], correct=right)


def random_router(outputs: RouteOutputs, like: Simulation) -> float:
    """Accuracy to expect of routes drawn with the same histogram, whatever the image."""
    shares = torch.bincount(like.columns, minlength=len(outputs.routes)).double() / len(outputs)
    return float(outputs.correct.double().mean(0) @ shares)


def calibrate_single(outputs: RouteOutputs, costs: CostTable) -> Router:
    """One route for all images: every route is a setting."""
    return Router(kind="single", costs=costs, curve=tuple(static_points(outputs, costs)))


# --- gates ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings in order of rising cost."""

    costs: Array
    accuracies: Array
    parameters: Array  # [settings, numbers]
    routes: tuple[int, ...] = ()

    def point(self, at: int) -> OperatingPoint:
        return OperatingPoint(
            cost=float(self.costs[at]),
            accuracy=float(self.accuracies[at]),
            parameters=tuple(self.parameters[at].tolist()),
            routes=self.routes,
        )


def calibrate_gate(outputs: RouteOutputs, costs: CostTable) -> Router:
    """All weights of cost, from everyone at the cheapest choices to everyone at the dearest."""
    found = _one_gate(outputs, costs) if len(outputs.options) == 1 else _several_gates(outputs, costs)
    return Router(kind="gate", costs=costs, curve=tuple(_levels(found)))


def _one_gate(outputs: RouteOutputs, costs: CostTable) -> _Settings:
    """Exactly: as the weight rises every image moves to cheaper choices, at weights that can be computed."""
    columns = [_column(outputs, (choice,)) for choice in outputs.options[0]]
    price = np.array([costs.of((choice,)) for choice in outputs.options[0]])
    right = outputs.correct.numpy()[:, columns].astype(np.float64)
    start = torch.full((len(outputs),), int(price.argmax()))
    unit = torch.from_numpy(price / costs.largest)
    weights, image, before, after = (
        part.numpy() for part in cheaper_moves(outputs.scores[0][0].double(), unit, start)
    )
    order = np.argsort(-weights, kind="stable")
    weights = weights[order]
    saved = (price[before] - price[after])[order]
    gained = (right[image, after] - right[image, before])[order]
    # From everyone at the cheapest choice on: below each weight one more image is at a dearer one.
    cheapest, count = int(price.argmin()), len(outputs)
    total = count * price[cheapest] + np.concatenate([[0.0], saved.cumsum()])
    correct = right[:, cheapest].sum() - np.concatenate([[0.0], gained.cumsum()])
    between = np.concatenate([weights[:1] + 1, (weights[1:] + weights[:-1]) / 2, weights[-1:] - 1])
    if not len(weights):  # one choice, or choices that all cost the same
        between = np.zeros(1)
    # Images that move at the same weight, but for rounding, move together.
    apart = weights[:-1] - weights[1:] > 1e-9 * (1 + np.abs(weights[1:]))
    kept = np.ones(len(between), dtype=bool)
    kept[1:-1] = apart
    return _Settings(total[kept] / count, correct[kept] / count, between[kept][:, None])


def _several_gates(outputs: RouteOutputs, costs: CostTable) -> _Settings:
    """By trying: the weights at which any gate would change its mind, and what the whole comes to there."""
    weights = []
    for gate, (options, scores) in enumerate(zip(outputs.options, outputs.scores, strict=True)):
        for history, seen in zip(outputs.histories(gate), scores.double().numpy(), strict=True):
            previous = history[-1] if history else None
            unit = [costs.segment(gate, previous, choice) / costs.largest for choice in options]
            for i, j in itertools.combinations(range(len(options)), 2):
                if unit[i] != unit[j]:
                    weights.append((seen[:, j] - seen[:, i]) / (unit[j] - unit[i]))
    tried = np.unique(np.concatenate([*weights, [0.0]]))
    tried = tried[evenly(len(tried), 2 * LEVELS)]
    between = np.concatenate([tried[:1] - 1, (tried[1:] + tried[:-1]) / 2, tried[-1:] + 1])
    table = np.array([costs.of(route.choices) for route in outputs.routes])
    right, every = outputs.correct.numpy(), np.arange(len(outputs))
    kept: list[tuple[float, float, float]] = []
    for weight in between.tolist():
        columns = walk(outputs, costs, weight)
        cost = float(table[columns].mean())
        if not kept or cost < kept[-1][0]:  # with several gates cost may rise with the weight: not so here
            kept.append((cost, float(right[every, columns].mean()), weight))
    found = np.array(kept[::-1])
    return _Settings(found[:, 0], found[:, 1], found[:, 2:])


# --- cascades ------------------------------------------------------------------------------------------
def calibrate_cascade(outputs: RouteOutputs, costs: CostTable) -> Router:
    """At every level of cost the most accurate cascade of one, two or three routes."""
    places = evenly(len(outputs.routes), CANDIDATES)
    few = [places[i] for i in evenly(len(places), 4)]
    margins, right = outputs.margins.double().numpy(), outputs.correct.numpy().astype(np.float64)
    known = _Known(outputs, costs, margins, right)
    families = [known.single(place) for place in places]
    families += [known.pair(*pair) for pair in itertools.combinations(places, 2)]
    families += [known.triple(*three) for three in itertools.combinations(few, 3)]
    alone = [costs.of(route.choices) for route in outputs.routes]
    curve = _best_levels(families, min(alone), max(alone))
    return Router(kind="cascade", costs=costs, curve=tuple(curve))


@dataclass(frozen=True, slots=True)
class _Known:
    """RouteOutputs as cascades need them."""

    outputs: RouteOutputs
    costs: CostTable
    margins: Array  # [N, R]
    right: Array  # [N, R]

    def prices(self, *places: int) -> list[float]:
        """What an image has cost when each of these routes has answered, one after the other."""
        ways = [self.outputs.routes[place].choices for place in places]
        return [self.costs.of_several(ways[: step + 1]) for step in range(len(ways))]

    def numbers(self, *places: int) -> tuple[int, ...]:
        return tuple(self.outputs.routes[place].number for place in places)

    def single(self, place: int) -> _Settings:
        accuracy = self.right[:, place].mean(keepdims=True)
        return _Settings(np.array(self.prices(place)), accuracy, np.empty((1, 0)), self.numbers(place))

    def pair(self, first: int, second: int) -> _Settings:
        """Every threshold that tells two images apart."""
        order = np.argsort(self.margins[:, first], kind="stable")
        sure, right = self.margins[order, first], self.right[order]
        gained = np.concatenate([[0.0], (right[:, second] - right[:, first]).cumsum()])
        count = len(order)
        on = np.arange(count + 1) / count  # share that goes on
        alone, both = self.prices(first, second)
        thresholds = np.concatenate([[0.0], (sure[1:] + sure[:-1]) / 2, [2.0]])
        apart = np.concatenate([[sure[0] > 0], sure[1:] > sure[:-1], [True]])
        return _Settings(
            (alone + (both - alone) * on)[apart],
            ((right[:, first].sum() + gained) / count)[apart],
            thresholds[apart][:, None],
            self.numbers(first, second),
        )

    def triple(self, *places: int) -> _Settings:
        """A grid of thresholds for both steps."""
        price = self.prices(*places)
        share = np.linspace(0, 1, GRID)
        steps = [np.quantile(self.margins[:, place], share) for place in places[:2]]
        first, second = (
            unsure(self.margins[:, place, None], step).astype(np.float64)  # [N, GRID]: goes on
            for place, step in zip(places, steps, strict=False)
        )
        right, count = self.right[:, list(places)], len(self.right)
        further = first.T @ second / count  # [first threshold, second threshold]
        gain = first.T @ (right[:, 1] - right[:, 0]) / count
        more = first.T @ (second * (right[:, 2] - right[:, 1])[:, None]) / count
        on = first.mean(0)
        cost = price[0] + on[:, None] * (price[1] - price[0]) + further * (price[2] - price[1])
        accuracy = right[:, 0].mean() + gain[:, None] + more
        numbers = np.stack(np.meshgrid(*steps, indexing="ij"), -1).reshape(-1, 2)
        order = np.argsort(cost.ravel(), kind="stable")
        return _Settings(cost.ravel()[order], accuracy.ravel()[order], numbers[order], self.numbers(*places))


# --- what is kept --------------------------------------------------------------------------------------
def _levels(found: _Settings) -> list[OperatingPoint]:
    """Settings at evenly spaced costs, as many as a router keeps."""
    if len(found.costs) <= LEVELS:
        return [found.point(at) for at in range(len(found.costs))]
    wanted = np.linspace(found.costs[0], found.costs[-1], LEVELS)
    return [found.point(at) for at in dict.fromkeys(_nearest(found.costs, wanted).tolist())]


def _best_levels(families: list[_Settings], low: float, high: float) -> list[OperatingPoint]:
    """At evenly spaced costs the most accurate of what the families have near it; fewer routes if equal."""
    wanted = np.linspace(low, high, LEVELS)
    near = (high - low) / (LEVELS - 1) / 2
    best = np.full(LEVELS, -1.0)
    chosen: list[tuple[_Settings, int] | None] = [None] * LEVELS
    for family in families:
        places = _nearest(family.costs, wanted)
        reached = np.where(
            np.abs(family.costs[places] - wanted) <= near * (1 + 1e-9), family.accuracies[places], -1.0
        )
        for level in np.flatnonzero(reached > best + 1e-12).tolist():
            best[level], chosen[level] = reached[level], (family, int(places[level]))
    points = [family.point(at) for family, at in filter(None, chosen)]
    kept = {point.cost: point for point in points}
    return [kept[cost] for cost in sorted(kept)]


def _nearest(sorted_values: Array, wanted: Array) -> Array:
    """Places of the values that lie nearest to the wanted ones."""
    after = np.searchsorted(sorted_values, wanted).clip(max=len(sorted_values) - 1)
    before = (after - 1).clip(min=0)
    closer = np.abs(wanted - sorted_values[before]) <= np.abs(sorted_values[after] - wanted)
    return np.where(closer, before, after)


def _column(outputs: RouteOutputs, choices: tuple[int, ...]) -> int:
    return next(i for i, route in enumerate(outputs.routes) if route.choices == choices)
