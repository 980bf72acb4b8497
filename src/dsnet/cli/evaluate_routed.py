"""``dsnet evaluate --routed``: gate and cascade on the test split, beside what they must beat."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dsnet.calibration.calibration import Calibration
from dsnet.calibration.compare import Comparison, Row, compare, needed_routes
from dsnet.calibration.route_outputs import collect
from dsnet.cli.progress import progress
from dsnet.cli.threads import settle_for
from dsnet.core.files import write_output
from dsnet.core.formats import RESULTS
from dsnet.core.schema import check
from dsnet.errors import DsnetError, printable
from dsnet.models.loading import load_checkpoint
from dsnet.report.page import bar_chart, escape, html_table, page
from dsnet.report.plot import Point as Dot
from dsnet.report.plot import accuracy_plot
from dsnet.report.routing import router_curves
from dsnet.report.text import bar, csv_text, table
from dsnet.routes import RouteSpace, evenly
from dsnet.routing.cost_table import CostTable
from dsnet.routing.router import OperatingPoint, format_cost, parse_budget
from dsnet.training.stage2.api import open_trained

__all__ = ["run_routed"]

SHARES = (0.3, 0.4, 0.5, 0.65, 0.8)  # of the way from the least to the largest cost, where no budget is given


def run_routed(args: argparse.Namespace) -> int:
    """Evaluates the routers of a calibrated run and prints."""
    if args.data is not None or args.root is not None:
        raise DsnetError("--routed uses the run's own test split; --data and --root are not for it")
    opened = open_trained(args.run, args.name, device=args.device)
    settle_for(args, opened.model, opened.test.size, batch=args.batch)
    where = f"{args.run} --name {args.name}" if args.name else str(args.run)
    calibration = Calibration.of(opened.saved, where)
    costs = calibration.costs
    low, high = calibration.budget_range()
    budgets = [parse_budget(text, costs) for text in args.budget or ()]
    budgets = list(dict.fromkeys(budgets)) or [low + share * (high - low) for share in SHARES]
    for budget in budgets:
        calibration.pick(budget)  # an error that says what can be reached
    alone = [_stand_alone(path, costs, opened.model.spec.name) for path in args.alone or ()]
    many = [] if args.plot is None else [low + i / 24 * (high - low) for i in range(25)]
    routes = [opened.model.space[i].number for i in evenly(len(opened.model.space), args.routes)]
    routes += needed_routes(calibration, [*budgets, *many])
    total = -(-len(opened.test) // args.batch)
    batches = progress(opened.seen(opened.test, args.batch), total, "batch")
    outputs = collect(opened.model, batches, routes)
    found = compare(outputs, calibration, budgets, alone)
    title = f"{opened.model.spec.name} on {opened.config.data.name}: {found.images} test images"
    if args.csv is not None:
        _write_csv(args.csv, found)
    if args.plot is not None:
        curves = router_curves(compare(outputs, calibration, many, alone))
        if args.plot.suffix == ".svg":
            write_output(args.plot, accuracy_plot(curves, unit=costs.unit).svg(title))
        else:
            write_output(args.plot, _page(title, curves, found, costs, opened.model.space))
    if args.json:
        about = {
            "model": opened.model.spec.name,
            "data": opened.config.data.name,
            "images": found.images,
            "unit": costs.unit,
            "shares": found.shares,
            "rows": [row.to_dict() for row in found.rows],
            "verdict": None if found.verdict is None else found.verdict.to_dict(),
            "single_routes": [
                {"route": p.routes[0], "cost": p.cost, "accuracy": p.accuracy} for p in found.singles
            ],
            "alone": [[p.cost, p.accuracy] for p in found.alone],
            "oracle": [found.oracle.cost, found.oracle.accuracy],
        }
        print(json.dumps(about, indent=2, allow_nan=False))
        return 0
    print(f"{printable(title)}\n")
    print(_shown(found, costs, opened.model.space))
    return 0


def _stand_alone(folder: Path, costs: CostTable, name: str) -> OperatingPoint:
    """A network trained alone at one route, from its run."""
    saved = load_checkpoint(folder)
    route, network = saved.data.get("route"), saved.data["network"]["name"]
    if route is None or network != name:
        what = f"is a {network}" if network != name else "was not trained at one route (scheme.route)"
        raise DsnetError(f"--alone {folder}: {what}; it takes runs of {name} trained with scheme.route=N")
    results: Any = saved.data.get("results")
    check(RESULTS, results, f"{folder}: results")
    result = results["test"][0]
    space = saved.data["network"]["space"]["routes"]
    choices = next((tuple(r["choices"]) for r in space if r["number"] == route), None)
    if choices is None:
        raise DsnetError(f"--alone {folder}: it has no route {route}, at which it says it was trained")
    return OperatingPoint(cost=costs.of(choices), accuracy=result["accuracy"], routes=(route,))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _shown(found: Comparison, costs: CostTable, space: RouteSpace) -> str:
    header = ["router", "budget", "mean cost", "of largest", "accuracy", "best single route", "difference"]
    header += ["static mix", "random"]
    header += ["stand-alone"] * bool(found.alone) + ["easy", "dependent", "hard"]
    rows = []
    for row in found.rows:
        if row.router == "single":  # beside every other router in a column
            continue
        cells = [
            row.router,
            format_cost(row.budget, costs.unit),
            f"{format_cost(row.cost, costs.unit)} ± {row.cost_error / row.cost:.1%}",
            f"{row.cost / costs.largest:.0%}",
            f"{100 * row.accuracy:.2f} ± {100 * row.error:.2f} %",
            f"{row.single}: {_percent(row.single_accuracy)}",
            f"{100 * row.gain:+.2f} ± {100 * row.gain_error:.2f}",
            _percent(row.static_mix),
            _percent(row.random),
        ]
        cells += [_percent(row.alone)] if found.alone else []
        rows.append(cells + [_percent(value) for value in row.by_difficulty.values()])
    lines = [table(header, rows, left=("router",)), ""]
    shares = ", ".join(f"{share:.0%} {name}" for name, share in found.shares.items())
    lines.append(
        f"Images: {shares}. Oracle (the cheapest route that is right): {_percent(found.oracle.accuracy)} at "
        f"{format_cost(found.oracle.cost, costs.unit)}.\n"
        "Best single route: all images at the route that was most accurate within the budget on held-out\n"
        "images; difference: points above it, image by image, ± standard error. Static mix, stand-alone:\n"
        "two routes or networks mixed at random to the same mean cost. Random: drawn with the same\n"
        "histogram (for a cascade that is cheaper: it pays for every route that it tries)."
    )
    if found.verdict is not None:
        lines.append(f"\n{found.verdict}")
    for row in _middle(found):
        lines.append(
            f"\nRoutes that answered, {row.router} at {format_cost(row.budget, costs.unit)} "
            f"({row.information:.3f} bits about how hard an image is):"
        )
        for name, counts in _histograms(row, space).items():
            total, most = sum(counts.values()), max(counts.values())
            body = [
                [str(c), str(n), f"{n / total:.0%}", bar(n, most) if n else ""] for c, n in counts.items()
            ]
            lines.append("\n" + table([name, "images", "share", ""], body, left=("",)))
    return "\n".join(lines)


def _histograms(row: Row, space: RouteSpace) -> dict[str, dict[int, int]]:
    """Images by route or, where several gates decide, by the choice of each."""
    if space.gates == 1:
        return {"route": row.route_counts}
    found: dict[str, dict[int, int]] = {}
    for gate, options in enumerate(space.choices):
        chosen = found[f"gate {gate}"] = dict.fromkeys(options, 0)
        for route, count in row.route_counts.items():
            chosen[space.resolve(route).choices[gate]] += count
    return found


def _middle(found: Comparison) -> list[Row]:
    """Of every router the row at the middle one of the budgets, or the next one that it keeps."""
    budgets = sorted({row.budget for row in found.rows})
    middle = budgets[len(budgets) // 2]
    kinds = dict.fromkeys(row.router for row in found.rows if row.router != "single")
    return [min(found.curve(kind), key=lambda row: abs(row.budget - middle)) for kind in kinds]


def _page(
    title: str, curves: dict[str, list[Dot]], found: Comparison, costs: CostTable, space: RouteSpace
) -> str:
    parts = [] if found.verdict is None else [f"<p><strong>{escape(str(found.verdict))}</strong></p>"]
    parts.append(accuracy_plot(curves, unit=costs.unit).html())
    parts.append(
        "<p>Single routes: all images at one route, as measured. Gate and cascade: each image at a route of "
        "its own. Oracle: the cheapest route that is right, which nobody can know beforehand.</p>"
    )
    parts.append(_routers_table(found, costs))
    for row in _middle(found):
        parts.append(f"<h2>{escape(f'Routes that answered: {row.router}')}</h2>")
        parts.append(
            f"<p>At a mean of {escape(format_cost(row.cost, costs.unit))}, "
            f"{_percent(row.accuracy)} right.</p>"
        )
        for name, counts in _histograms(row, space).items():
            labels = [f"{name}: {choice}" if space.gates > 1 else f"route {choice}" for choice in counts]
            parts.append(bar_chart(labels, list(counts.values()), [f"{n} images" for n in counts.values()]))
    return page(title, *parts)


def _routers_table(found: Comparison, costs: CostTable) -> str:
    header = ("router", "budget", "mean cost", "accuracy", "best single route", "difference")
    rows = [
        (
            row.router,
            format_cost(row.budget, costs.unit),
            f"{row.cost / costs.largest:.0%}",
            _percent(row.accuracy),
            f"{row.single}: {_percent(row.single_accuracy)}",
            f"{100 * row.gain:+.2f} ± {100 * row.gain_error:.2f}",
        )
        for row in found.rows
        if row.router != "single"
    ]
    explained = (
        "<p>Mean cost as a share of the largest route's. Best single route: the most accurate one within the "
        "budget on held-out images, with its accuracy here; difference in points, image by image, ± standard "
        "error.</p>"
    )
    return html_table(header, rows) + explained


def _write_csv(path: Path, found: Comparison) -> None:
    plain = [{k: v for k, v in row.to_dict().items() if not isinstance(v, dict)} for row in found.rows]
    write_output(path, csv_text(plain))
