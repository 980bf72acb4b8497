"""``dsnet evaluate``: accuracy of every route of a checkpoint, or of the routers of a calibrated run."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from dsnet.calibration.calibration import Calibration
from dsnet.calibration.compare import compare, needed_routes
from dsnet.cli.options import open_run, run_text
from dsnet.cli.output import print_json, write_chart, writes_files
from dsnet.cli.progress import progress
from dsnet.cli.threads import set_threads_for
from dsnet.core.checkpoint import load_checkpoint
from dsnet.core.files import write_output
from dsnet.core.formats import RESULTS
from dsnet.core.schema import check
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError, printable
from dsnet.report.comparison import comparison_page, comparison_text, router_curves
from dsnet.report.plot import accuracy_plot
from dsnet.report.text import bar, csv_text, human, table
from dsnet.report.training import result_curves
from dsnet.routes import RouteSpace, evenly_spaced
from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import OperatingPoint
from dsnet.routing.route_outputs import collect
from dsnet.routing.router import parse_budget
from dsnet.training.evaluation import evaluate
from dsnet.training.stage2.trained_run import open_trained

__all__ = ["run"]

SHARES = (0.3, 0.4, 0.5, 0.65, 0.8)  # default budgets, from the lowest to the highest cost


@writes_files("csv", "plot")
def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    if args.routed:
        return _run_routed(args)
    if args.budget or args.alone or args.router:
        raise DsnetError("--budget, --router and --alone are for --routed")
    saved, model, images, data = open_run(args, "test")
    set_threads_for(args, model, images.size, batch=args.batch)
    normalisation = saved.data.get("input")
    if normalisation is None:
        raise DsnetError(
            f"{args.run} does not say how its images were normalised; `dsnet recalibrate` notes it, or "
            'save it with save_checkpoint(..., data={"input": {"mean": [...], "std": [...]}})'
        )
    routes = [model.space[i] for i in evenly_spaced(len(model.space), args.routes)]
    if saved.data.get("route") is not None:  # trained alone
        routes = [model.space.resolve(saved.data["route"])]
    mean, std = tuple(normalisation["mean"]), tuple(normalisation["std"])
    batches = ((normalise(x, mean, std), y) for x, y in images.epoch(args.batch))
    total = math.ceil(len(images) / args.batch)
    results = evaluate(model, progress(batches, total, "batch"), routes)
    rows = [{**result.to_dict(), "accuracy": result.accuracy} for result in results]
    if args.csv:
        write_output(args.csv, csv_text(rows))
    if args.plot is not None:
        title = f"{model.spec.name} on {data}: {len(images)} test images"
        write_chart(args.plot, title, accuracy_plot(result_curves(results, "supernet")))
    if args.json:
        print_json({"model": model.spec.name, "data": data, "step": saved.data["step"], "routes": rows})
        return 0
    largest = results[-1].madds
    cells = (
        (f"{100 * r.accuracy:.2f} %", human(r.madds), human(r.params), r.statistics, bar(r.madds, largest))
        for r in results
    )
    sized = results[0].image_size is not None
    first = ([str(r.route), *[f"{r.image_size} px"] * sized] for r in results)
    body = [[*names, *row] for names, row in zip(first, cells, strict=True)]
    header = ["route", *["image"] * sized, "accuracy", "MAdds", "params", "statistics", "cost"]
    images_text = f"{len(images)} test images of {printable(data)}"
    print(f"{model.spec.name} after {saved.data['step']} steps, {images_text}\n")
    print(table(header, body, left=("statistics", "cost")))
    return 0


def _run_routed(args: argparse.Namespace) -> int:
    """Evaluate the routers of a calibrated run and print a comparison."""
    if args.data is not None or args.root is not None:
        raise DsnetError("--routed uses the run's own test split; --data and --root are not for it")
    opened = open_trained(args.run, args.name, device=args.device)
    set_threads_for(args, opened.model, opened.test.size, batch=args.batch)
    calibration = Calibration.of(opened.saved, run_text(args)).only(args.router or "auto")
    costs = calibration.costs
    low, high = calibration.budget_range()
    budgets = [parse_budget(text, costs) for text in args.budget or ()]
    budgets = list(dict.fromkeys(budgets)) or [low + share * (high - low) for share in SHARES]
    for budget in budgets:
        calibration.pick(budget)  # an error that says what can be reached
    alone = [_stand_alone(path, costs, opened.model.spec.name) for path in args.alone or ()]
    many = [] if args.plot is None else [low + i / 24 * (high - low) for i in range(25)]
    routes = [opened.model.space[i].number for i in evenly_spaced(len(opened.model.space), args.routes)]
    routes += needed_routes(calibration, [*budgets, *many])
    total = -(-len(opened.test) // args.batch)
    batches = progress(opened.seen(opened.test, args.batch), total, "batch")
    outputs = collect(opened.model, batches, routes)
    comparison = compare(outputs, calibration, budgets, alone)
    title = f"{opened.model.spec.name} on {opened.config.data.name}: {comparison.images} test images"
    if args.csv is not None:
        plain = (row.to_dict().items() for row in comparison.rows)
        rows = [{key: value for key, value in row if not isinstance(value, dict)} for row in plain]
        write_output(args.csv, csv_text(rows))
    if args.plot is not None:
        curve = compare(outputs, calibration, many, alone)
        space = opened.model.space
        chart = accuracy_plot(router_curves(curve, space), unit=costs.unit)
        write_chart(args.plot, title, chart, lambda: comparison_page(title, comparison, curve, costs, space))
    if args.json:
        print_json(
            {
                "model": opened.model.spec.name,
                "data": opened.config.data.name,
                "images": comparison.images,
                "unit": costs.unit,
                "shares": comparison.shares,
                "rows": [row.to_dict() for row in comparison.rows],
                "verdict": None if comparison.verdict is None else comparison.verdict.to_dict(),
                "single_routes": [
                    {**_named(opened.model.space, p.routes[0]), "cost": p.cost, "accuracy": p.accuracy}
                    for p in comparison.singles
                ],
                "alone": [[p.cost, p.accuracy] for p in comparison.alone],
                "oracle": [comparison.oracle.cost, comparison.oracle.accuracy],
            }
        )
        return 0
    print(f"{printable(title)}\n")
    print(comparison_text(comparison, costs, opened.model.space))
    return 0


def _named(space: RouteSpace, number: int) -> dict[str, int]:
    """Return the number of a route and, where routes differ in it, its image size."""
    size = space.resolve(number).image_size
    return {"route": number, **({} if size is None else {"image_size": size})}


def _stand_alone(folder: Path, costs: CostTable, name: str) -> OperatingPoint:
    """Read the cost and accuracy of a run that was trained at one route."""
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
