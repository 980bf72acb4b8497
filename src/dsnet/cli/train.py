"""``dsnet train``: a recipe, from random weights to a network of known accuracy."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from dsnet.cli.progress import TrainingProgress
from dsnet.cli.training import settings_text, settle_for_training, stop_status
from dsnet.core.checkpoint import has_last
from dsnet.core.device import pick_device
from dsnet.core.distributed.launch import launched
from dsnet.core.interrupt import stopped_status
from dsnet.core.run_lock import LockedError
from dsnet.core.settings import override, parse_assignments, to_plain
from dsnet.data.inspect import DatasetSummary, inspect_dataset
from dsnet.errors import DsnetError, printable
from dsnet.models import Supernet, create_model
from dsnet.recipes.custom_data import recipe_for
from dsnet.recipes.resolve import resolve_recipe
from dsnet.report.routes import route_rows, route_table
from dsnet.report.run_page import write_run_page
from dsnet.report.text import bar, human, table
from dsnet.report.training import before_text, low_accuracy
from dsnet.training.api import train
from dsnet.training.config import TrainConfig
from dsnet.training.estimate import estimate, image_size, step_cost, timed_step
from dsnet.training.results import Outcome
from dsnet.training.run_dir import read_config
from dsnet.training.transfer import check_start

__all__ = ["report_outcome", "run", "stopped_at_once"]


def run(args: argparse.Namespace) -> int:
    """Train, or show what would be trained."""
    _check(args)
    name = _run_name(args)
    folder: Path = args.out or Path("runs") / name
    config, dataset = _configure(args, folder)
    model: Supernet = create_model(config.model, device="meta", **config.options)
    if not isinstance(model, Supernet):
        raise DsnetError(f"{config.model} is a static network; `dsnet models` lists the supernets")
    if args.dry_run:
        plain = json.dumps(to_plain(config), indent=2)
        print(plain if args.json else _plan(args, folder, name, config, model, dataset))
        return 0
    expected = None
    if launched().rank == 0 and not args.resume and not (folder / "last").is_file():
        dataset = dataset or _inspect(config)
        if config.start is not None:
            check_start(model, config.start, image_size(config, model, dataset))
        _settle_threads(args, folder, config, model, dataset)
        if not args.json:
            cost = estimate(config, model, dataset)
            expected = cost.seconds
            print(before_text(config, dataset, cost), file=sys.stderr, flush=True)
    else:
        _settle_threads(args, folder, config, model, dataset)
    callback = TrainingProgress(quiet=args.json, expected=expected)
    try:
        outcome = train(config, folder, resume=args.resume, callback=callback)
    except KeyboardInterrupt as stopped:  # before the first step or after the last one
        return stopped_at_once(stopped, folder)
    return report_outcome(outcome, config, as_json=args.json)


def stopped_at_once(stopped: KeyboardInterrupt, folder: Path) -> int:
    """Print what is kept of a run that was stopped between steps; return the exit status."""
    kept = (
        f"{folder} keeps what was saved. Go on with the same command and --resume."
        if has_last(folder)
        else "Nothing was saved yet."
    )
    print(f"Stopped. {kept}", file=sys.stderr)
    return stopped_status(stopped)


def _check(args: argparse.Namespace) -> None:
    if args.recipe is None and args.data is None:
        raise DsnetError(
            "what is to be trained? Give a RECIPE (`dsnet recipes` lists them), or --data with a data set or "
            "a folder that has one folder of images per class"
        )
    if args.data is not None and "data.name" in parse_assignments(args.set):
        raise DsnetError(f"--data {args.data} and --set data.name both say which data; give one of them")


def _run_name(args: argparse.Namespace) -> str:
    """The name of the run's folder unless --out is given."""
    recipe = args.recipe or ""
    if recipe.endswith(".json"):
        path = Path(recipe)
        recipe = path.resolve().parent.name if path.name == "recipe.json" else path.stem
    data = "" if args.data is None else Path(args.data.removeprefix("hf:")).resolve().name
    return "-".join(filter(None, (recipe, data.replace(":", "-"))))


def _configure(args: argparse.Namespace, folder: Path) -> tuple[TrainConfig, DatasetSummary | None]:
    """The settings of the recipe, of the run to resume, or made from the data."""
    changes = parse_assignments(args.set)
    if args.recipe is not None:
        config = resolve_recipe(args.recipe, args.set, args.data)
    elif args.resume and (folder / "recipe.json").is_file():
        config = override(read_config(folder), changes)
    else:
        base = override(TrainConfig(), {"data.name": args.data, **changes})
        dataset = _inspect(base)
        config = recipe_for(
            base.data,
            images=dataset.images,
            classes=len(dataset.classes),
            side=dataset.side,
            device=pick_device(base.run.device).type,
        )
        return override(config, changes), dataset
    return config, None if args.data is None else _inspect(config)


def _inspect(config: TrainConfig) -> DatasetSummary:
    """Count and check the images."""
    dataset = inspect_dataset(config.data.name, config.data.root)
    dataset.check()
    return dataset


def _settle_threads(
    args: argparse.Namespace,
    folder: Path,
    config: TrainConfig,
    model: Supernet,
    dataset: DatasetSummary | None,
) -> None:
    """Set the number of threads; measure training steps if the data is known, else forward passes."""
    work = None
    if dataset is not None and config.scheme.teacher is None:
        size = image_size(config, model, dataset)
        work = partial(timed_step, config, len(dataset.classes), size)
    settle_for_training(args, config, folder, work, say=not args.json)


def report_outcome(outcome: Outcome, config: TrainConfig, *, as_json: bool) -> int:
    """Print the results of a run and write its page; return the exit status."""
    if not outcome.first:
        return 0
    status = outcome.status
    exit_status = 0
    if not status.finished:
        exit_status = stop_status(status, outcome.folder)
    elif as_json:
        print((outcome.folder / "results.json").read_text(encoding="utf-8"), end="")
    else:
        print(_results(outcome, config))
    low = low_accuracy(outcome) if status.finished else None
    if low is not None:
        print(f"warning: {low}", file=sys.stderr)
    try:
        report = write_run_page(outcome, config)
    except LockedError as error:
        print(f"dsnet: no report: {error}", file=sys.stderr)
    else:
        line = f"Report: {printable(str(report))}"
        print(line, file=sys.stdout if status.finished and not as_json else sys.stderr)
    return exit_status


def _plan(
    args: argparse.Namespace,
    folder: Path,
    name: str,
    config: TrainConfig,
    model: Supernet,
    dataset: DatasetSummary | None,
) -> str:
    """The settings, the routes and the cost of a run."""
    try:
        dataset = dataset or inspect_dataset(config.data.name, config.data.root)
        _settle_threads(args, folder, config, model, dataset)
        ahead = estimate(config, model, dataset)
        size, cost_text = ahead.size, before_text(config, dataset, ahead)
    except DsnetError as error:  # a recipe can be looked at before its data is there
        size = config.data.size or model.input_spec.image_size
        cost_text = f"What the whole run costs is not known: {error}"
    cost = step_cost(config, model, size)
    batch = config.optim.batch
    return "\n".join(
        [
            f"{name}: {config.model}, scheme {config.scheme.name}\n",
            settings_text(config),
            "",
            route_table(model, route_rows(model, image_size=size), most=32),
            "",
            f"A step runs {cost.networks}: {human(3 * cost.forward)} multiply-adds an image, forward and "
            "backward (counted as three forwards)"
            + (f", and {human(cost.teacher)} for the teacher's forward" if cost.teacher else "")
            + f"; {human(cost.madds * batch)} for the batch of {batch}.",
            "",
            cost_text,
        ]
    )


def _results(outcome: Outcome, config: TrainConfig) -> str:
    before = {after.route: (b, after) for b, after in outcome.held_out}
    largest = max(result.madds for result in outcome.test)
    rows = []
    for result in outcome.test:
        row = [str(result.route), human(result.madds), bar(result.madds, largest), f"{result.accuracy:.2%}"]
        if before:
            earlier, later = before[result.route]
            row += ["–" if earlier is None else f"{earlier.accuracy:.2%}", f"{later.accuracy:.2%}"]
        rows.append(row)
    if outcome.gated is not None:
        gated = outcome.gated
        cells = ["gated", human(gated.madds), bar(gated.madds, largest), f"{gated.accuracy:.2%}"]
        rows.append(cells + ["", ""] * bool(before))
    header = ["route", "MAdds", "cost", "test"] + (["held-out before", "after"] if before else [])
    images = f"{outcome.test[0].images} test images"
    if before:
        images += f"; {outcome.held_out[0][1].images} held-out ones, before and after re-calibration"
    return (
        f"\n{config.model} on {printable(config.data.name)}, {images}\n\n"
        f"{table(header, rows, left=('cost',))}\n\nFinal network: {printable(str(outcome.folder / 'final'))}"
    )
