"""``dsnet evaluate``: accuracy of every route of a checkpoint."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

from dsnet.cli.evaluate_routed import run_routed
from dsnet.cli.options import open_run
from dsnet.cli.output import print_json, write_chart, writes_files
from dsnet.cli.progress import progress
from dsnet.cli.threads import set_threads_for
from dsnet.core.files import write_output
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError, printable
from dsnet.report.plot import Point, accuracy_plot
from dsnet.report.text import bar, csv_text, human, table
from dsnet.routes import evenly_spaced
from dsnet.training.evaluation import evaluate

__all__ = ["run"]


@writes_files("csv", "plot")
def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    if args.routed:
        return run_routed(args)
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
    rows = [{**asdict(result), "accuracy": result.accuracy} for result in results]
    if args.csv:
        write_output(args.csv, csv_text(rows))
    if args.plot is not None:
        title = f"{model.spec.name} on {data}: {len(images)} test images"
        points = [Point(r.madds, r.accuracy, f"route {r.route}") for r in results]
        write_chart(args.plot, title, accuracy_plot({"supernet": points}))
    if args.json:
        print_json({"model": model.spec.name, "data": data, "step": saved.data["step"], "routes": rows})
        return 0
    largest = results[-1].madds
    cells = (
        (f"{100 * r.accuracy:.2f} %", human(r.madds), human(r.params), r.statistics, bar(r.madds, largest))
        for r in results
    )
    body = [[str(r.route), *row] for r, row in zip(results, cells, strict=True)]
    header = ["route", "accuracy", "MAdds", "params", "statistics", "cost"]
    images_text = f"{len(images)} test images of {printable(data)}"
    print(f"{model.spec.name} after {saved.data['step']} steps, {images_text}\n")
    print(table(header, body, left=("statistics", "cost")))
    return 0
