"""Accuracy against cost from known outputs: the settings of a router, and what they are compared with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsnet.routes import evenly
from dsnet.routing.costs import CostTable
from dsnet.routing.moves import cheaper_moves
from dsnet.routing.outputs import Outputs, Simulated, walk
from dsnet.routing.router import Point, Router

__all__ = ["calibrate_cascade", "calibrate_gate", "interpolate", "oracle", "random_router", "static_points"]

LEVELS = 513  # settings that a router keeps, evenly spaced in cost
CANDIDATES = 16  # routes at most that cascades are made of
GRID = 33  # thresholds of each step that cascades of three routes try


def static_points(outputs: Outputs, costs: CostTable) -> list[Point]:
    """Every route by itself."""
    right = outputs.correct.double().mean(0).tolist()
    points = [
        Point(cost=costs.of(route.choices), accuracy=accuracy, numbers=(), routes=(route.number,))
        for route, accuracy in zip(outputs.routes, right, strict=True)
    ]
    return sorted(points, key=lambda point: (point.cost, point.accuracy))


def interpolate(points: list[Point], cost: float) -> float:
    """Accuracy of a mix of the two best single routes around a mean cost: the upper hull of the points."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.accuracy)):
        if hull and point.accuracy <= hull[-1].accuracy:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    if cost <= hull[0].cost:
        return hull[0].accuracy
    for low, high in itertools.pairwise(hull):
        if cost <= high.cost:
            return low.accuracy + (cost - low.cost) * _slope(low, high)
    return hull[-1].accuracy


def _slope(low: Point, high: Point) -> float:
    return (high.accuracy - low.accuracy) / (high.cost - low.cost)


def oracle(outputs: Outputs, costs: CostTable) -> Simulated:
    """The cheapest route that is right; the cheapest of all where none is."""
    table = torch.tensor([costs.of(route.choices) for route in outputs.routes], dtype=torch.float64)
    cheapest = int(table.argmin())
    price = table.expand(len(outputs), -1).masked_fill(~outputs.correct, float("inf"))
    columns = torch.where(outputs.correct.any(1), price.argmin(1), torch.tensor(cheapest))
    right = outputs.correct.gather(1, columns[:, None])[:, 0]
    return Simulated(columns=columns, costs=table[columns], correct=right)


def random_router(outputs: Outputs, like: Simulated) -> float:
    """Accuracy to expect of routes drawn with the same histogram, whatever the image."""
    shares = torch.bincount(like.columns, minlength=len(outputs.routes)).double() / len(outputs)
    return float(outputs.correct.double().mean(0) @ shares)


# --- gates ---------------------------------------------------------------------------------------------
def calibrate_gate(outputs: Outputs, costs: CostTable) -> Router:
    """All weights of cost, from everyone at the cheapest choices to everyone at the dearest."""
    found = _one_gate(outputs, costs) if len(outputs.options) == 1 else _several_gates(outputs, costs)
    return Router(kind="gate", costs=costs, curve=tuple(_levels(found)))


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings in order of rising cost."""

    costs: Tensor
    accuracies: Tensor
    numbers: Tensor  # [settings, numbers]
    routes: tuple[int, ...] = ()

    def point(self, at: int) -> Point:
        numbers = tuple(self.numbers[at].tolist())
        return Point(
            cost=float(self.costs[at]),
            accuracy=float(self.accuracies[at]),
            numbers=numbers,
            routes=self.routes,
        )


def _one_gate(outputs: Outputs, costs: CostTable) -> _Settings:
    """Exactly: as the weight rises every image moves to cheaper choices, at weights that can be computed."""
    columns = [_column(outputs, (choice,)) for choice in outputs.options[0]]
    price = torch.tensor([costs.of((choice,)) for choice in outputs.options[0]], dtype=torch.float64)
    unit, scores = price / costs.largest, outputs.scores[0][0].double()
    right = outputs.correct[:, columns].double()
    moves = cheaper_moves(scores, unit, price.argmax().expand(len(outputs)))
    weights, order = moves.price.sort(descending=True, stable=True)
    saved = (price[moves.before] - price[moves.after])[order]
    gained = (right[moves.image, moves.after] - right[moves.image, moves.before])[order]
    cheapest = int(price.argmin())
    # From everyone at the cheapest choice on: below each weight one more image is at a dearer one.
    total = len(outputs) * price[cheapest] + torch.cat([torch.zeros(1), saved.cumsum(0)])
    correct = right[:, cheapest].sum() - torch.cat([torch.zeros(1), gained.cumsum(0)])
    between = torch.cat([weights[:1] + 1, (weights[1:] + weights[:-1]) / 2, weights[-1:] - 1])
    # Images that move at the same weight, but for rounding, move together.
    apart = weights[:-1] - weights[1:] > 1e-9 * (1 + weights[1:].abs())
    kept = torch.cat([torch.ones(1, dtype=torch.bool), apart, torch.ones(1, dtype=torch.bool)])
    count = len(outputs)
    return _Settings(total[kept] / count, correct[kept] / count, between[kept][:, None])


def _several_gates(outputs: Outputs, costs: CostTable) -> _Settings:
    """By trying: the weights at which any gate would change its mind, and what the whole comes to there."""
    weights = []
    for gate, (options, scores) in enumerate(zip(outputs.options, outputs.scores, strict=True)):
        for history, seen in zip(outputs.histories(gate), scores.double(), strict=True):
            previous = history[-1] if history else None
            unit = [costs.segment(gate, previous, choice) / costs.largest for choice in options]
            for i, j in itertools.combinations(range(len(options)), 2):
                if unit[i] != unit[j]:
                    weights.append((seen[:, j] - seen[:, i]) / (unit[j] - unit[i]))
    tried = torch.unique(torch.cat(weights))
    tried = tried[evenly(len(tried), 2 * LEVELS)]
    between = torch.cat([tried[:1] - 1, (tried[1:] + tried[:-1]) / 2, tried[-1:] + 1])
    table = torch.tensor([costs.of(route.choices) for route in outputs.routes], dtype=torch.float64)
    right = outputs.correct.double()
    kept: list[tuple[float, float, float]] = []
    for weight in between.tolist():
        columns = walk(outputs, costs, weight)
        cost = float(table[columns].mean())
        if not kept or cost < kept[-1][0]:  # with several gates cost may rise with the weight: not so here
            kept.append((cost, float(right.gather(1, columns[:, None]).mean()), weight))
    found = torch.tensor(kept[::-1], dtype=torch.float64)
    return _Settings(found[:, 0], found[:, 1], found[:, 2:])


# --- cascades ------------------------------------------------------------------------------------------
def calibrate_cascade(outputs: Outputs, costs: CostTable) -> Router:
    """At every level of cost the most accurate cascade of one, two or three routes."""
    places = evenly(len(outputs.routes), CANDIDATES)
    few = [places[i] for i in evenly(len(places), 4)]
    families = [_single(outputs, costs, place) for place in places]
    families += [_pair(outputs, costs, pair) for pair in itertools.combinations(places, 2)]
    families += [_triple(outputs, costs, three) for three in itertools.combinations(few, 3)]
    alone = [costs.of(route.choices) for route in outputs.routes]
    return Router(kind="cascade", costs=costs, curve=tuple(_best_levels(families, min(alone), max(alone))))


def _single(outputs: Outputs, costs: CostTable, place: int) -> _Settings:
    route = outputs.routes[place]
    accuracy = outputs.correct[:, place].double().mean()
    cost = torch.tensor([costs.of(route.choices)], dtype=torch.float64)
    return _Settings(cost, accuracy[None], torch.empty(1, 0), (route.number,))


def _pair(outputs: Outputs, costs: CostTable, places: tuple[int, int]) -> _Settings:
    """Every threshold that tells two images apart."""
    first, second = (outputs.routes[place] for place in places)
    sure, order = outputs.margins[:, places[0]].double().sort()
    right = outputs.correct[order].double()
    gained = torch.cat([torch.zeros(1), (right[:, places[1]] - right[:, places[0]]).cumsum(0)])
    on = torch.arange(len(outputs) + 1)  # how many go on
    alone = costs.of(first.choices)
    more = costs.of_several([first.choices, second.choices]) - alone
    thresholds = torch.cat([torch.zeros(1), (sure[1:] + sure[:-1]) / 2, torch.tensor([2.0])])
    apart = torch.cat([torch.tensor([True]), sure[1:] > sure[:-1], torch.tensor([True])])
    apart[0] = bool(sure[0] > 0)  # none goes on at 0
    count = len(outputs)
    return _Settings(
        alone + more * on[apart].double() / count,
        (right[:, places[0]].sum() + gained[apart]) / count,
        thresholds[apart][:, None],
        (first.number, second.number),
    )


def _triple(outputs: Outputs, costs: CostTable, places: tuple[int, int, int]) -> _Settings:
    """A grid of thresholds for both steps."""
    routes = [outputs.routes[place] for place in places]
    ways = [route.choices for route in routes]
    price = [costs.of_several(ways[: step + 1]) for step in range(3)]
    quantiles = torch.linspace(0, 1, GRID, dtype=torch.float64)
    margins = outputs.margins.double()
    steps = [torch.quantile(margins[:, place], quantiles) for place in places[:2]]
    first = (margins[:, places[0], None] < steps[0]).double()  # [N, GRID]: goes on
    second = (margins[:, places[1], None] < steps[1]).double()
    right = outputs.correct[:, list(places)].double()
    count = len(outputs)
    on = first.mean(0)
    further = first.T @ second / count  # [first threshold, second threshold]
    gain = (first.T @ (right[:, 1] - right[:, 0])) / count
    more = first.T @ (second * (right[:, 2] - right[:, 1])[:, None]) / count
    cost = price[0] + on[:, None] * (price[1] - price[0]) + further * (price[2] - price[1])
    accuracy = right[:, 0].mean() + gain[:, None] + more
    numbers = torch.cartesian_prod(*steps)
    flat, order = cost.flatten().sort()
    return _Settings(flat, accuracy.flatten()[order], numbers[order], tuple(route.number for route in routes))


# --- what is kept --------------------------------------------------------------------------------------
def _levels(found: _Settings) -> list[Point]:
    """Settings at evenly spaced costs, as many as a router keeps."""
    if len(found.costs) <= LEVELS:
        return [found.point(at) for at in range(len(found.costs))]
    wanted = torch.linspace(float(found.costs[0]), float(found.costs[-1]), LEVELS, dtype=torch.float64)
    return [found.point(at) for at in dict.fromkeys(_nearest(found.costs, wanted).tolist())]


def _best_levels(families: list[_Settings], low: float, high: float) -> list[Point]:
    """At evenly spaced costs the most accurate of what the families have near it; fewer routes if equal."""
    wanted = torch.linspace(low, high, LEVELS, dtype=torch.float64)
    near = (high - low) / (LEVELS - 1) / 2
    best: list[Point | None] = [None] * LEVELS
    for family in families:
        places = _nearest(family.costs, wanted)
        off = (family.costs[places] - wanted).abs() <= near * (1 + 1e-9)
        accuracies = family.accuracies[places]
        for level in off.nonzero()[:, 0].tolist():
            held = best[level]
            if held is None or float(accuracies[level]) > held.accuracy + 1e-12:
                best[level] = family.point(int(places[level]))
    kept = {point.cost: point for point in best if point is not None}
    return [kept[cost] for cost in sorted(kept)]


def _nearest(sorted_values: Tensor, wanted: Tensor) -> Tensor:
    """Places of the values that lie nearest to the wanted ones."""
    after = torch.searchsorted(sorted_values.contiguous(), wanted).clamp(max=len(sorted_values) - 1)
    before = (after - 1).clamp(min=0)
    closer = (wanted - sorted_values[before]).abs() <= (sorted_values[after] - wanted).abs()
    return torch.where(closer, before, after)


def _column(outputs: Outputs, choices: tuple[int, ...]) -> int:
    return next(i for i, route in enumerate(outputs.routes) if route.choices == choices)
