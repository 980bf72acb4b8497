"""Reports on routers compared with single routes at equal cost, as text and as a page."""

from __future__ import annotations

from collections.abc import Mapping

from dsnet.calibration.compare import Comparison, ComparisonRow
from dsnet.report.page import bar_chart, escape, html_table, page
from dsnet.report.plot import Point, accuracy_plot, by_image_size
from dsnet.report.text import counts_table, table
from dsnet.routes import RouteSpace
from dsnet.routing.cost_table import CostTable
from dsnet.routing.router import format_cost

__all__ = [
    "answered_section",
    "comparison_page",
    "comparison_text",
    "gated_rows",
    "router_curves",
    "router_section",
    "router_table",
    "row_at",
]


def router_curves(comparison: Comparison, space: RouteSpace) -> dict[str, list[Point]]:
    """Return the curves of an accuracy plot: single routes, stand-alone networks, routers and oracle.

    Single routes have a curve for each image size.
    """
    curves: dict[str, list[Point]] = {}
    for name, of_name in {"single routes": comparison.singles, "stand-alone": comparison.alone}.items():
        routes = [space.resolve(p.routes[0]) for p in of_name]
        points = (Point(p.cost, p.accuracy, f"route {p.routes[0]}") for p in of_name)
        sizes = (route.image_size for route in routes)
        curves |= by_image_size(name, list(zip(sizes, points, strict=True)))
    for kind in dict.fromkeys(row.router for row in gated_rows(comparison)):
        curves[kind] = [Point(row.cost, row.accuracy) for row in comparison.curve(kind)]
    curves["oracle"] = [Point(comparison.oracle.cost, comparison.oracle.accuracy)]
    return curves


def gated_rows(comparison: Comparison) -> list[ComparisonRow]:
    """Return the rows of the routers that decide for each image: all but single routes."""
    return [row for row in comparison.rows if row.router != "single"]


def row_at(comparison: Comparison, kind: str, budget: float) -> ComparisonRow:
    """Return a router's row with the budget closest to ``budget``."""
    return min(comparison.curve(kind), key=lambda row: abs(row.budget - budget))


def router_table(
    comparison: Comparison, costs: CostTable, space: RouteSpace
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of a table of routers at their budgets."""
    alone = bool(comparison.alone)
    header = ["router", "budget", "mean cost", "accuracy", "best single route", "difference"]
    rows = [
        [
            row.router,
            f"{row.budget / costs.largest:.0%} ({format_cost(row.budget, costs.unit)})",
            f"{row.cost / costs.largest:.0%}",
            f"{100 * row.accuracy:.2f} %",
            f"{space.resolve(row.route).label}: {_percent(row.route_accuracy)}",
            _gain(row),
            *([_percent(row.alone)] if alone else []),
        ]
        for row in gated_rows(comparison)
    ]
    return header + ["stand-alone"] * alone, rows


def router_section(comparison: Comparison, costs: CostTable, space: RouteSpace) -> str:
    """Build `router_table` for a page, with an explanation."""
    text = (
        "<p>Budget and mean cost as shares of the largest route's; the budget was kept on held-out images. "
        "Best single route: the most accurate one within the budget on held-out images, with its accuracy "
        "here; difference in points, image by image, ± standard error."
    )
    if comparison.alone:
        text += " Stand-alone: networks trained by themselves, mixed to the same mean cost."
    return html_table(*router_table(comparison, costs, space)) + text + "</p>"


def comparison_text(comparison: Comparison, costs: CostTable, space: RouteSpace) -> str:
    """Format all routers with their baselines, and the routes that they took."""
    header = ["router", "budget", "mean cost", "of largest", "accuracy", "best single route", "difference"]
    header += ["static mix", "random"]
    header += ["stand-alone"] * bool(comparison.alone) + ["easy", "dependent", "hard"]
    rows = []
    for row in gated_rows(comparison):
        cells = [
            row.router,
            format_cost(row.budget, costs.unit),
            f"{format_cost(row.cost, costs.unit)} ± {row.cost_error / row.cost:.1%}",
            f"{row.cost / costs.largest:.0%}",
            f"{100 * row.accuracy:.2f} ± {100 * row.error:.2f} %",
            f"{space.resolve(row.route).label}: {_percent(row.route_accuracy)}",
            _gain(row),
            _percent(row.static_mix),
            _percent(row.random),
        ]
        cells += [_percent(row.alone)] if comparison.alone else []
        rows.append(cells + [_percent(value) for value in row.by_difficulty.values()])
    shares = ", ".join(f"{share:.0%} {name}" for name, share in comparison.shares.items())
    best = comparison.oracle
    lines = [
        table(header, rows, left=("router",)),
        f"\nImages: {shares}. Oracle (the cheapest route that is right): {_percent(best.accuracy)} at "
        f"{format_cost(best.cost, costs.unit)}.\n"
        "Best single route: all images at the route that was most accurate within the budget on held-out\n"
        "images; difference: points above it, image by image, ± standard error. Static mix, stand-alone:\n"
        "two routes or networks mixed at random to the same mean cost. Random: routes drawn with the\n"
        "same histogram (cheaper than a cascade, which also runs the routes before the last one).",
    ]
    if comparison.verdict is not None:
        lines.append(f"\n{comparison.verdict}")
    for row in _middle(comparison):
        lines.append(
            f"\nRoutes that answered, {row.router} at {format_cost(row.budget, costs.unit)} "
            f"({row.information:.3f} bits about how hard an image is):"
        )
        lines += [f"\n{counts_table(name, counts)}" for name, counts in _counts(row, space).items()]
    return "\n".join(lines)


def comparison_page(
    title: str, comparison: Comparison, curve: Comparison, costs: CostTable, space: RouteSpace
) -> str:
    """Build a page: verdict, accuracy against cost, a table of routers and the routes that they took.

    Args:
        title: Heading of the page.
        comparison: Routers at the budgets of the table.
        curve: Routers at many budgets, for the chart.
        costs: Costs of the routes.
        space: Routes of the network.
    """
    verdict = comparison.verdict
    parts = [
        "" if verdict is None else f"<p><strong>{escape(str(verdict))}</strong></p>",
        accuracy_plot(router_curves(curve, space), unit=costs.unit).html(),
        "<p>Single routes: all images at one route, as measured. Gate and cascade: each image at its own "
        "route. Oracle: the cheapest route that is right, which nobody can know beforehand.</p>",
        router_section(comparison, costs, space),
    ]
    parts += [answered_section(row, costs, space) for row in _middle(comparison)]
    return page(title, *parts)


def answered_section(row: ComparisonRow, costs: CostTable, space: RouteSpace) -> str:
    """Build a section on the routes that answered, with accuracies by difficulty."""
    groups = ", ".join(f"{_percent(accuracy)} of {name} ones" for name, accuracy in row.by_difficulty.items())
    parts = [
        f"<h2>Routes that answered: {row.router}</h2>",
        f"<p>At a mean of {escape(format_cost(row.cost, costs.unit))}, {_percent(row.accuracy)} right "
        f"({groups}).</p>",
    ]
    for name, counts in _counts(row, space).items():
        labels = [f"{name} {choice}" for choice in counts]
        captions = [f"{count} images, {count / sum(counts.values()):.0%}" for count in counts.values()]
        parts.append(bar_chart(labels, list(counts.values()), captions))
    return "\n".join(parts)


def _gain(row: ComparisonRow) -> str:
    return f"{100 * row.paired.difference:+.2f} ± {100 * row.paired.standard_error:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _counts(row: ComparisonRow, space: RouteSpace) -> Mapping[str, Mapping[int | str, int]]:
    """Images by route or, with several gates, by the choice of each."""
    if space.gates == 1:
        return {"route": {space.resolve(n).label: count for n, count in row.route_counts.items()}}
    counts: dict[str, dict[int | str, int]] = {}
    for gate, options in enumerate(space.choices):
        of_gate: dict[int | str, int] = dict.fromkeys(options, 0)
        counts[f"gate {gate}"] = of_gate
        for route, count in row.route_counts.items():
            of_gate[space.resolve(route).choices[gate]] += count
    return counts


def _middle(comparison: Comparison) -> list[ComparisonRow]:
    """Each router's row at the middle budget, or at the closest one that it keeps."""
    budgets = sorted({row.budget for row in comparison.rows})
    kinds = dict.fromkeys(row.router for row in gated_rows(comparison))
    return [row_at(comparison, kind, budgets[len(budgets) // 2]) for kind in kinds]
