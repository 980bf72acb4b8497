"""``dsnet predict``: classes of image files, every image at its own route."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from dsnet.cli.output import writes_files
from dsnet.cli.progress import CLEAR, progress
from dsnet.cli.threads import set_threads_for
from dsnet.data.find_images import find_images
from dsnet.errors import DsnetError, printable
from dsnet.inference.classify import FailedImage, Prediction, open_predictor
from dsnet.report.text import human, table
from dsnet.routing.cost_table import CostTable
from dsnet.routing.router import format_cost

__all__ = ["run"]


@writes_files("out")
def run(args: argparse.Namespace) -> int:
    """Predict and print; return 1 if an image has no prediction."""
    _check(args)
    paths = find_images(args.images)
    predictor = open_predictor(
        args.run,
        budget=args.budget,
        router=args.router or "auto",
        route=args.route,
        name=args.name,
        device=args.device,
        backend=args.backend,
    )
    size = predictor.preprocessing.size
    set_threads_for(args, predictor.model, size, batch=min(args.batch, len(paths)))
    costs = predictor.policy.costs
    results: Iterator[Prediction | FailedImage] = predictor(paths, batch=args.batch, top=args.top)
    if len(paths) > args.batch and not (args.json and sys.stdout.isatty()):  # there, lines show the progress
        results = progress(results, len(paths), "image")
    rows: list[list[str]] = []
    predicted, unread, unanswered, total_cost = 0, 0, 0, 0.0
    try:
        with _json_lines(args) as lines:
            for result in results:
                if isinstance(result, Prediction):
                    predicted, total_cost = predicted + 1, total_cost + result.cost
                    plain = result.to_dict(trace=args.trace)
                    if lines is None:
                        rows.append(_row(result, trace=args.trace))
                else:
                    unread, unanswered = unread + (not result.readable), unanswered + result.readable
                    plain = result.to_dict()
                    clear = CLEAR if sys.stderr.isatty() else ""  # a progress line may be shown
                    text = f"{clear}dsnet: {printable(plain['path'])} {plain['error']}"
                    print(text, file=sys.stderr, flush=True)
                if lines is not None:
                    print(json.dumps(plain, allow_nan=False), file=lines, flush=True)
    finally:  # also if the command is stopped
        if rows:
            unit = "MAdds" if costs.unit == "madds" else "ms"
            header = ["image", "class", "probability", "route", *(["ran"] if args.trace else []), unit]
            header += ["then"] if args.top > 1 else []
            print(table(header, rows, left=("image", "class", "ran", "then")) + "\n")
    if not args.json:
        print(_summary(predicted, unread, unanswered, total_cost, costs))
    return 1 if unread or unanswered else 0


def _check(args: argparse.Namespace) -> None:
    if args.route is not None and (args.budget is not None or args.router is not None):
        raise DsnetError("--route is for every image, --budget and --router pick one for each: give either")
    if args.json and args.out is not None:
        raise DsnetError("--json prints what --out writes to a file: give one of them")
    if args.force and args.out is None:
        raise DsnetError("--force is for --out: it replaces the file")
    if args.out is not None and args.out.exists() and not args.force:
        raise DsnetError(f"{args.out} exists; name another file, or replace it with --force")


def _json_lines(args: argparse.Namespace) -> AbstractContextManager[TextIO | None]:
    """Return the file that JSON lines are written to; None if a table is printed instead."""
    if args.out is not None:
        opened: TextIO = args.out.open("w" if args.force else "x", encoding="utf-8")
        return opened
    return nullcontext(sys.stdout if args.json else None)


def _row(result: Prediction, *, trace: bool) -> list[str]:
    cost = human(result.cost) if result.unit == "madds" else f"{result.cost:.3g}"
    route = f"{result.route}" if result.image_size is None else f"{result.route} ({result.image_size} px)"
    row = [result.path, result.best.name, f"{100 * result.best.probability:.1f} %", route]
    row += [" → ".join(map(str, result.routes))] if trace else []
    others = [f"{answer.name} {100 * answer.probability:.1f} %" for answer in result.answers[1:]]
    return [*row, cost, ", ".join(others)] if others else [*row, cost]


def _summary(predicted: int, unread: int, unanswered: int, total_cost: float, costs: CostTable) -> str:
    text = f"{predicted} image{'s' * (predicted != 1)}"
    if predicted:
        mean = total_cost / predicted
        text += (
            f", {format_cost(mean, costs.unit)} on average, {mean / costs.largest:.0%} of the largest route"
        )
    text += f"; {unread} could not be read" if unread else ""
    return text + (f"; {unanswered} without an answer" if unanswered else "")
