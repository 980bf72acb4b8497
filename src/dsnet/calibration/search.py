"""Search for operating points on recorded outputs, and for trade-off curves to compare routers with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from dsnet.routes import evenly_spaced
from dsnet.routing.budget import cheaper_switches
from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import GatePolicy, OperatingPoint, policy_class, unsure
from dsnet.routing.route_outputs import Array, RouteOutputs, Simulation, simulate
from dsnet.routing.router import Router

__all__ = [
    "calibrate_candidates",
    "calibrate_cascade",
    "calibrate_gate",
    "calibrate_single",
    "interpolate",
    "oracle",
    "random_router",
    "static_points",
]

LEVELS = 513  # maximum number of operating points of a router, evenly spaced in cost
CANDIDATES = 16  # maximum number of routes that cascades are made of
GRID = 33  # thresholds tried for each step of a cascade of three routes


def static_points(outputs: RouteOutputs, costs: CostTable) -> list[OperatingPoint]:
    """Return cost and accuracy of every route for all images, by cost."""
    right = outputs.correct.double().mean(0).tolist()
    points = [
        OperatingPoint(cost=costs.of(route.choices), accuracy=accuracy, routes=(route.number,))
        for route, accuracy in zip(outputs.routes, right, strict=True)
    ]
    return sorted(points, key=lambda point: (point.cost, point.accuracy))


def interpolate(
    points: list[OperatingPoint], cost: float, judged: Mapping[int, float] | None = None
) -> float:
    """Return the accuracy of a random mix of two routes at a mean cost: the upper hull of the points.

    Args:
        points: Single routes.
        cost: Mean cost of the mix.
        judged: Accuracies by route number on other images, by which the hull is chosen (default: those of
            the points). A hull chosen by the same images overstates its accuracy.
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
    """Simulate the cheapest route with a correct prediction; the cheapest of all where there is none."""
    table = torch.tensor([costs.of(route.choices) for route in outputs.routes], dtype=torch.float64)
    cheapest = int(table.argmin())
    correct_costs = table.expand(len(outputs), -1).masked_fill(~outputs.correct, float("inf"))
    columns = torch.where(outputs.correct.any(1), correct_costs.argmin(1), torch.tensor(cheapest))
    correct = outputs.correct.gather(1, columns[:, None])[:, 0]
    return Simulation(columns=columns, costs=table[columns], correct=correct)


def random_router(outputs: RouteOutputs, like: Simulation) -> float:
    """Return the expected accuracy of routes drawn at random with the same histogram."""
    shares = torch.bincount(like.columns, minlength=len(outputs.routes)).double() / len(outputs)
    return float(outputs.correct.double().mean(0) @ shares)


def calibrate_single(outputs: RouteOutputs, costs: CostTable) -> Router:
    """Return the router of one route for all images: every route is an operating point."""
    return Router(kind="single", costs=costs, curve=tuple(static_points(outputs, costs)))


def calibrate_candidates(name: str, outputs: RouteOutputs, costs: CostTable) -> Router:
    """Return a router whose operating points are the candidates of its policy, as simulated."""
    policy = policy_class(name)
    points: dict[float, OperatingPoint] = {}
    for parameters, routes in policy.candidates(outputs):
        seen = simulate(policy.from_settings(costs, parameters, routes), outputs)
        point = OperatingPoint(cost=seen.cost, accuracy=seen.accuracy, parameters=parameters, routes=routes)
        if point.cost not in points or point.accuracy > points[point.cost].accuracy:
            points[point.cost] = point
    curve = [points[cost] for cost in sorted(points)]
    return Router(kind=name, costs=costs, curve=tuple(curve[i] for i in evenly_spaced(len(curve), LEVELS)))


# --- gates ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Curve:
    """Operating points of policies with the same routes, in order of rising cost."""

    costs: Array
    accuracies: Array
    parameters: Array  # [points, parameters]
    routes: tuple[int, ...] = ()

    def point(self, index: int) -> OperatingPoint:
        return OperatingPoint(
            cost=float(self.costs[index]),
            accuracy=float(self.accuracies[index]),
            parameters=tuple(self.parameters[index].tolist()),
            routes=self.routes,
        )


def calibrate_gate(outputs: RouteOutputs, costs: CostTable) -> Router:
    """Return operating points for all weights of cost, from all cheapest to all most expensive choices."""
    curve = _one_gate(outputs, costs) if len(outputs.options) == 1 else _several_gates(outputs, costs)
    return Router(kind="gate", costs=costs, curve=tuple(_spaced_points(curve)))


def _one_gate(outputs: RouteOutputs, costs: CostTable) -> _Curve:
    """Compute exactly at which weights images switch to cheaper choices."""
    options = outputs.options[0]
    columns = [next(i for i, r in enumerate(outputs.routes) if r.choices == (c,)) for c in options]
    table = np.array([costs.gated((choice,)) for choice in options])
    correct = outputs.correct.numpy()[:, columns].astype(np.float64)
    start = torch.full((len(outputs),), int(table.argmax()))
    shares = torch.from_numpy(table / costs.largest)
    weights, image, before, after = (
        part.numpy() for part in cheaper_switches(outputs.scores[0][0].double(), shares, start)
    )
    order = np.argsort(-weights, kind="stable")
    weights = weights[order]
    saved = (table[before] - table[after])[order]
    gained = (correct[image, after] - correct[image, before])[order]
    # Starting with all images at the cheapest choice: below each weight one more takes a larger one.
    cheapest, count = int(table.argmin()), len(outputs)
    total_cost = count * table[cheapest] + np.concatenate([[0.0], saved.cumsum()])
    total_correct = correct[:, cheapest].sum() - np.concatenate([[0.0], gained.cumsum()])
    between = np.concatenate([weights[:1] + 1, (weights[1:] + weights[:-1]) / 2, weights[-1:] - 1])
    if not len(weights):  # one choice, or choices that all cost the same
        between = np.zeros(1)
    # Images that switch at the same weight, up to rounding, switch together.
    distinct = weights[:-1] - weights[1:] > 1e-9 * (1 + np.abs(weights[1:]))
    kept = np.ones(len(between), dtype=bool)
    kept[1:-1] = distinct
    return _Curve(total_cost[kept] / count, total_correct[kept] / count, between[kept][:, None])


def _several_gates(outputs: RouteOutputs, costs: CostTable) -> _Curve:
    """Simulate weights between those at which a gate decides differently for some image."""
    switches = []
    for gate, (options, scores) in enumerate(zip(outputs.options, outputs.scores, strict=True)):
        for history, values in zip(outputs.histories(gate), scores.double().numpy(), strict=True):
            previous = history[-1] if history else None
            share = [costs.segment(gate, previous, choice) / costs.largest for choice in options]
            for i, j in itertools.combinations(range(len(options)), 2):
                if share[i] != share[j]:
                    switches.append((values[:, j] - values[:, i]) / (share[j] - share[i]))
    weights = np.unique(np.concatenate([*switches, [0.0]]))
    weights = weights[evenly_spaced(len(weights), 2 * LEVELS)]
    between = np.concatenate([weights[:1] - 1, (weights[1:] + weights[:-1]) / 2, weights[-1:] + 1])
    table = np.array([costs.of(route.choices) for route in outputs.routes])
    correct, every = outputs.correct.numpy(), np.arange(len(outputs))
    points: list[tuple[float, float, float]] = []
    for weight in between.tolist():
        columns = GatePolicy(costs=costs, weight=weight).replay(outputs)
        cost = float(table[columns].mean())
        if not points or cost < points[-1][0]:  # with several gates cost can rise with the weight: left out
            points.append((cost, float(correct[every, columns].mean()), weight))
    curve = np.array(points[::-1])
    return _Curve(curve[:, 0], curve[:, 1], curve[:, 2:])


# --- cascades ------------------------------------------------------------------------------------------
def calibrate_cascade(outputs: RouteOutputs, costs: CostTable) -> Router:
    """Return the most accurate cascade of one, two or three routes at every level of cost."""
    columns = evenly_spaced(len(outputs.routes), CANDIDATES)
    few = [columns[i] for i in evenly_spaced(len(columns), 4)]
    search = _CascadeSearch(
        outputs, costs, outputs.margins.double().numpy(), outputs.correct.numpy().astype(np.float64)
    )
    curves = [search.single(column) for column in columns]
    curves += [search.pair(*pair) for pair in itertools.combinations(columns, 2)]
    curves += [search.triple(*triple) for triple in itertools.combinations(few, 3)]
    single = [costs.of(route.choices) for route in outputs.routes]
    return Router(kind="cascade", costs=costs, curve=tuple(_best_points(curves, min(single), max(single))))


@dataclass(frozen=True, slots=True)
class _CascadeSearch:
    """Curves of cascades with given routes, over their thresholds. Routes are given by their columns."""

    outputs: RouteOutputs
    costs: CostTable
    margins: Array  # [N, R]
    correct: Array  # [N, R]

    def cumulative_costs(self, *columns: int) -> list[float]:
        """Return the cost of an image after each of the routes."""
        choices = [self.outputs.routes[column].choices for column in columns]
        return [self.costs.of_several(choices[: step + 1]) for step in range(len(choices))]

    def numbers(self, *columns: int) -> tuple[int, ...]:
        return tuple(self.outputs.routes[column].number for column in columns)

    def single(self, column: int) -> _Curve:
        accuracy = self.correct[:, column].mean(keepdims=True)
        cost = np.array(self.cumulative_costs(column))
        return _Curve(cost, accuracy, np.empty((1, 0)), self.numbers(column))

    def pair(self, first: int, second: int) -> _Curve:
        """Every threshold that separates two images."""
        order = np.argsort(self.margins[:, first], kind="stable")
        margins, correct = self.margins[order, first], self.correct[order]
        gained = np.concatenate([[0.0], (correct[:, second] - correct[:, first]).cumsum()])
        count = len(order)
        share = np.arange(count + 1) / count  # of images that go on
        alone, both = self.cumulative_costs(first, second)
        thresholds = np.concatenate([[0.0], (margins[1:] + margins[:-1]) / 2, [2.0]])
        distinct = np.concatenate([[margins[0] > 0], margins[1:] > margins[:-1], [True]])
        return _Curve(
            (alone + (both - alone) * share)[distinct],
            ((correct[:, first].sum() + gained) / count)[distinct],
            thresholds[distinct][:, None],
            self.numbers(first, second),
        )

    def triple(self, *columns: int) -> _Curve:
        """A grid of thresholds for both steps."""
        costs = self.cumulative_costs(*columns)
        share = np.linspace(0, 1, GRID)
        thresholds = [np.quantile(self.margins[:, column], share) for column in columns[:2]]
        first, second = (
            unsure(self.margins[:, column, None], threshold).astype(np.float64)  # [N, GRID]
            for column, threshold in zip(columns, thresholds, strict=False)
        )
        correct, count = self.correct[:, list(columns)], len(self.correct)
        both = first.T @ second / count  # [first threshold, second threshold]: share that reaches the third
        gain = first.T @ (correct[:, 1] - correct[:, 0]) / count
        more = first.T @ (second * (correct[:, 2] - correct[:, 1])[:, None]) / count
        cost = costs[0] + first.mean(0)[:, None] * (costs[1] - costs[0]) + both * (costs[2] - costs[1])
        accuracy = correct[:, 0].mean() + gain[:, None] + more
        grid = np.stack(np.meshgrid(*thresholds, indexing="ij"), -1).reshape(-1, 2)
        order = np.argsort(cost.ravel(), kind="stable")
        return _Curve(cost.ravel()[order], accuracy.ravel()[order], grid[order], self.numbers(*columns))


# --- selection of operating points ---------------------------------------------------------------------
def _spaced_points(curve: _Curve) -> list[OperatingPoint]:
    """Return at most LEVELS operating points, evenly spaced in cost."""
    if len(curve.costs) <= LEVELS:
        return [curve.point(index) for index in range(len(curve.costs))]
    levels = np.linspace(curve.costs[0], curve.costs[-1], LEVELS)
    return [curve.point(index) for index in dict.fromkeys(_nearest(curve.costs, levels).tolist())]


def _best_points(curves: list[_Curve], low: float, high: float) -> list[OperatingPoint]:
    """Return the most accurate point near each of LEVELS costs; of equals the one of the first curve."""
    levels = np.linspace(low, high, LEVELS)
    near = (high - low) / (LEVELS - 1) / 2
    best = np.full(LEVELS, -1.0)
    chosen: list[tuple[_Curve, int] | None] = [None] * LEVELS
    for curve in curves:
        indices = _nearest(curve.costs, levels)
        is_near = np.abs(curve.costs[indices] - levels) <= near * (1 + 1e-9)
        accuracies = np.where(is_near, curve.accuracies[indices], -1.0)
        for level in np.flatnonzero(accuracies > best + 1e-12).tolist():
            best[level], chosen[level] = accuracies[level], (curve, int(indices[level]))
    points = {point.cost: point for point in (curve.point(index) for curve, index in filter(None, chosen))}
    return [points[cost] for cost in sorted(points)]


def _nearest(sorted_values: Array, targets: Array) -> Array:
    """Return the indices of the values that are nearest to the targets."""
    after = np.searchsorted(sorted_values, targets).clip(max=len(sorted_values) - 1)
    before = (after - 1).clip(min=0)
    closer = np.abs(targets - sorted_values[before]) <= np.abs(sorted_values[after] - targets)
    return np.where(closer, before, after)
