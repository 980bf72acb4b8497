"""``dsnet evaluate``: accuracy of every route of a checkpoint."""

from __future__ import annotations

import argparse
import csv
import json
import math
from dataclasses import asdict
from pathlib import Path

from dsnet.cli.options import add_run_arguments, open_run, positive
from dsnet.cli.progress import progress
from dsnet.cli.routed import run_routed
from dsnet.data.augment import normalise
from dsnet.errors import DsnetError
from dsnet.report.page import page
from dsnet.report.plot import Point, accuracy_plot
from dsnet.report.text import bar, human, table
from dsnet.routes import evenly
from dsnet.training.evaluate import evaluate

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "evaluate",
        help="accuracy, multiply-adds and parameters of every route of a checkpoint",
        description="Runs the test split through every route of a checkpoint's network and shows what each\n"
        "reaches and costs. Where there are many routes, an evenly spaced sample of them. With --routed:\n"
        "the calibrated routers at some budgets, beside single routes, stand-alone networks, a random\n"
        "router and an oracle at the same mean cost.",
        epilog="Examples:\n"
        "  dsnet evaluate runs/digits_mbnet\n"
        "  dsnet evaluate runs/mine --data cifar10 --csv routes.csv --plot routes.svg\n"
        "  dsnet evaluate runs/mine --routed --budget 45% --budget 300M --plot routers.html\n"
        "  dsnet evaluate runs/mine --routed --alone runs/route0 --alone runs/route13",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_arguments(parser, "test")
    parser.add_argument("--routes", type=positive, default=32, help="at most so many (default: 32)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--csv", type=Path, help="also as a table in this file")
    parser.add_argument("--plot", type=Path, help="also as a picture, accuracy against cost (.svg or .html)")
    parser.add_argument("--routed", action="store_true", help="the routers of a calibrated run")
    parser.add_argument(
        "--budget", action="append", help="with --routed: mean cost, 300M, 45%%, 5ms; may be repeated"
    )
    parser.add_argument(
        "--alone", action="append", type=Path, metavar="RUN", help="with --routed: a route trained alone"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Evaluates and prints."""
    if args.plot is not None and args.plot.suffix not in (".svg", ".html"):
        raise DsnetError(f"--plot writes .svg or .html, not {args.plot.name!r}")
    for path in (args.plot, args.csv):
        if path is not None and not path.parent.is_dir():
            raise DsnetError(f"there is no folder {path.parent} to write {path.name} into")
    if args.routed:
        return run_routed(args)
    if args.budget or args.alone:
        raise DsnetError("--budget and --alone are for --routed")
    saved, model, images, data = open_run(args, "test")
    known = saved.data.get("input")
    if known is None:
        raise DsnetError(
            f"{args.run} does not say how its images were normalised; `dsnet recalibrate` notes it, or "
            'save it with save_checkpoint(..., data={"input": {"mean": [...], "std": [...]}})'
        )
    routes = [model.space[i] for i in evenly(len(model.space), args.routes)]
    if saved.data.get("route") is not None:  # trained alone
        routes = [model.space.resolve(saved.data["route"])]
    mean, std = tuple(known["mean"]), tuple(known["std"])
    batches = ((normalise(x, mean, std), y) for x, y in images.epoch(args.batch))
    total = math.ceil(len(images) / args.batch)
    results = evaluate(model, progress(batches, total, "batch"), routes)
    rows = [{**asdict(result), "accuracy": result.accuracy} for result in results]
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if args.plot is not None:
        title = f"{model.spec.name} on {data}: {len(images)} test images"
        points = [Point(r.madds, r.accuracy, f"route {r.route}") for r in results]
        curves = {"supernet": points}
        picture = accuracy_plot(title, curves)
        args.plot.write_text(
            picture if args.plot.suffix == ".svg" else page(title, accuracy_plot("", curves)),
            encoding="utf-8",
        )
    if args.json:
        about = {"model": model.spec.name, "data": data, "step": saved.data["step"], "routes": rows}
        print(json.dumps(about, indent=2))
        return 0
    largest = results[-1].madds
    body = [
        [
            str(r.route),
            f"{100 * r.accuracy:.2f} %",
            human(r.madds),
            human(r.params),
            r.statistics,
            bar(r.madds, largest),
        ]
        for r in results
    ]
    print(f"{model.spec.name} after {saved.data['step']} steps, {len(images)} test images of {data}\n")
    header = ["route", "accuracy", "MAdds", "params", "statistics", "cost"]
    print(table(header, body, left=("statistics", "cost")))
    return 0
