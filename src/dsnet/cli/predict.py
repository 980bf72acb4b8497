"""``dsnet predict``: classes of image files, every image at its route."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

from dsnet.cli.options import check_out, positive
from dsnet.cli.progress import progress
from dsnet.data.find import find_images
from dsnet.errors import DsnetError
from dsnet.report.text import human, table
from dsnet.routing.costs import CostTable
from dsnet.routing.predict import Prediction, Unread, open_predictor
from dsnet.routing.router import written

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "predict",
        help="classes of image files, every image at its own route",
        description="Says what images show, at which route, and what that cost. Who picks the route:\n"
        "  --budget 45%     the routers of a calibrated run (`dsnet calibrate`), for this mean cost\n"
        "  --route N        nobody: every image runs at route N; works for any run\n"
        "  neither          the gates by their own decision, once `dsnet gate` has trained them\n"
        "Images are resized and normalised as the run's test split. One that cannot be read is reported,\n"
        "the others go on, and the exit status is 1.",
        epilog="Examples:\n"
        "  dsnet predict runs/digits_mbnet seven.png\n"
        "  dsnet predict runs/mine photos --budget 45%                    a folder and those in it\n"
        "  dsnet predict runs/mine 'photos/**/*.jpg' --budget 300M --router cascade --trace\n"
        "  dsnet predict runs/mine photos --route 0 --top 5               the cheapest route, five guesses\n"
        "  dsnet predict runs/mine photos --budget 5ms --out found.jsonl  written as results come\n"
        "  dsnet predict runs/mine photos --budget 45% --json | jq -r 'select(.probability < 0.5).path'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, as `dsnet train` makes it")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="a file, a folder, or a pattern in quotes ('a/**/*.png')"
    )
    parser.add_argument("--budget", help="mean cost of an image: 300M, 45%% (of the largest route), 5ms")
    parser.add_argument(
        "--router",
        choices=("auto", "gate", "cascade"),
        help="who keeps the budget (default: auto, the more accurate one)",
    )
    parser.add_argument("--route", type=int, metavar="N", help="every image at this route")
    parser.add_argument("--trace", action="store_true", help="also the routes that ran, in order")
    parser.add_argument(
        "--top", type=positive, default=1, metavar="K", help="the K most probable classes (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, an object a line, as results come")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="these lines to a file")
    parser.add_argument("--force", action="store_true", help="with --out: replace a file that is there")
    parser.add_argument("--batch", type=positive, default=64, help="images at a time (default: 64)")
    parser.add_argument("--name", help="which of its checkpoints (default: gated, else final, else last)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Predicts and prints; 1 where an image could not be read."""
    _check(args)
    paths = find_images(args.images)
    predictor = open_predictor(
        args.run,
        budget=args.budget,
        router=args.router or "auto",
        route=args.route,
        name=args.name,
        device=args.device,
    )
    costs = predictor.rule.costs
    results: Iterator[Prediction | Unread] = predictor(paths, batch=args.batch, top=args.top)
    if len(paths) > args.batch and not (args.json and sys.stdout.isatty()):  # lines there show how far it is
        results = progress(results, len(paths), "image")
    rows: list[list[str]] = []
    count, unread, total = 0, 0, 0.0
    try:
        with _lines(args) as lines:
            for result in results:
                if isinstance(result, Unread):
                    unread += 1
                    _complain(result)
                    continue
                count, total = count + 1, total + result.cost
                if lines is None:
                    rows.append(_row(result, trace=args.trace))
                else:
                    print(json.dumps(result.to_dict(trace=args.trace)), file=lines, flush=True)
    finally:  # also of a run that was stopped
        if rows:
            print(table(_header(costs, args), rows, left=("image", "class", "ran", "then")) + "\n")
    if not args.json:
        print(_closing(count, unread, total, costs))
    return 1 if unread else 0


def _check(args: argparse.Namespace) -> None:
    if args.route is not None and (args.budget is not None or args.router is not None):
        raise DsnetError("--route is for every image, --budget and --router pick one for each: give either")
    if args.json and args.out is not None:
        raise DsnetError("--json prints what --out writes to a file: give one of them")
    if args.force and args.out is None:
        raise DsnetError("--force is for --out: it replaces the file")
    check_out(args.out)
    if args.out is not None and args.out.exists() and not args.force:
        raise DsnetError(f"{args.out} is there already; name another file, or replace it with --force")


def _lines(args: argparse.Namespace) -> AbstractContextManager[TextIO | None]:
    """Where JSON lines go; none where a table is shown instead."""
    if args.out is not None:
        opened: TextIO = args.out.open("w" if args.force else "x", encoding="utf-8")
        return opened
    return nullcontext(sys.stdout if args.json else None)


def _complain(result: Unread) -> None:
    over = "\r\033[2K" if sys.stderr.isatty() else ""  # a progress line may stand there
    print(f"{over}dsnet: {result.path} cannot be read: {result.reason}", file=sys.stderr, flush=True)


def _header(costs: CostTable, args: argparse.Namespace) -> list[str]:
    unit = "MAdds" if costs.unit == "madds" else "ms"
    header = ["image", "class", "probability", "route", *(["ran"] if args.trace else []), unit]
    return header + (["then"] if args.top > 1 else [])


def _row(result: Prediction, *, trace: bool) -> list[str]:
    cost = human(result.cost) if result.unit == "madds" else f"{result.cost:.3g}"
    row = [result.path, result.best.name, f"{100 * result.best.probability:.1f} %", str(result.route)]
    row += [" → ".join(map(str, result.routes))] if trace else []
    others = [f"{answer.name} {100 * answer.probability:.1f} %" for answer in result.answers[1:]]
    return [*row, cost, ", ".join(others)] if others else [*row, cost]


def _closing(count: int, unread: int, total: float, costs: CostTable) -> str:
    said = f"{count} image{'s' * (count != 1)}"
    if count:
        mean = total / count
        said += f", {written(mean, costs.unit)} on average, {mean / costs.largest:.0%} of the largest route"
    return f"{said}; {unread} could not be read" if unread else said
