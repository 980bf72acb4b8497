"""``dsnet train``: train a supernet by a recipe or on your own images; what other training commands share."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from dsnet.cli.options import chosen_weights
from dsnet.cli.output import print_json
from dsnet.cli.progress import TrainingProgress
from dsnet.cli.threads import Work, forward_work, kept_threads, set_threads
from dsnet.core.checkpoint import has_last
from dsnet.core.device import pick_device
from dsnet.core.distributed.launch import launched
from dsnet.core.interrupt import stopped_status
from dsnet.core.run_lock import LockedError
from dsnet.core.settings import keys_of, override, parse_assignments, to_plain
from dsnet.data.inspect import DatasetSummary, inspect_dataset
from dsnet.detection.train.config import DetectionConfig
from dsnet.errors import DsnetError, printable
from dsnet.models import Supernet, create_model
from dsnet.recipes.custom_data import fine_tuning_recipe, recipe_for
from dsnet.recipes.resolve import resolve_recipe
from dsnet.report.routes import route_rows, route_table
from dsnet.report.run_page import write_run_page
from dsnet.report.text import bar, human, table
from dsnet.report.training import before_text, low_accuracy
from dsnet.training.api import train
from dsnet.training.config import TrainConfig
from dsnet.training.estimate import estimate, image_size, step_cost, timed_step
from dsnet.training.loop import RunStatus
from dsnet.training.results import Outcome
from dsnet.training.run_dir import read_config
from dsnet.training.transfer import check_start

__all__ = [
    "print_stopped",
    "report_outcome",
    "run",
    "set_training_threads",
    "settings_text",
    "stop_status",
]


def run(args: argparse.Namespace) -> int:
    """Train, or show what would be trained."""
    if args.recipe is None and args.data is None:
        raise DsnetError(
            "what is to be trained? Give a RECIPE (`dsnet recipes` lists them), or --data with a data set or "
            "a folder that has one folder of images per class"
        )
    if args.data is not None and "data.name" in parse_assignments(args.set):
        raise DsnetError(f"--data {args.data} and --set data.name both say which data; give one of them")
    name = _run_name(args)
    folder: Path = args.out or Path("runs") / name
    config, dataset = _configure(args, folder)
    model: Supernet = create_model(config.model, device="meta", **config.options)
    if not isinstance(model, Supernet):
        raise DsnetError(f"{config.model} is a static network; `dsnet models` lists the supernets")
    if args.dry_run:
        if args.json:
            print_json(to_plain(config))
        else:
            print(_dry_run_text(args, folder, name, config, model, dataset))
        return 0
    expected = None
    starts = launched().rank == 0 and not args.resume and not (folder / "last").is_file()
    if starts:
        dataset = dataset or _inspect(config)
        if config.start is not None:
            check_start(model, config.start, image_size(config, model, dataset))
    set_training_threads(args, folder, config, _step_work(config, model, dataset), announce=not args.json)
    if starts and dataset is not None and not args.json:
        cost = estimate(config, model, dataset)
        expected = cost.seconds
        print(before_text(config, dataset, cost), file=sys.stderr, flush=True)
    try:
        callback = TrainingProgress(quiet=args.json, expected=expected)
        outcome = train(config, folder, resume=args.resume, callback=callback)
    except KeyboardInterrupt as stopped:  # before the first step or after the last one
        return print_stopped(stopped, folder)
    return report_outcome(outcome, config, as_json=args.json)


def _run_name(args: argparse.Namespace) -> str:
    """Return the name of the run's folder unless --out is given."""
    recipe = args.recipe or ""
    if recipe.endswith(".json"):
        path = Path(recipe)
        recipe = path.resolve().parent.name if path.name == "recipe.json" else path.stem
    data = "" if args.data is None else Path(args.data.removeprefix("hf:")).resolve().name
    model = (args.model or "").rpartition(":")[2]
    return "-".join(filter(None, (recipe, model, data.replace(":", "-"))))


def _configure(args: argparse.Namespace, folder: Path) -> tuple[TrainConfig, DatasetSummary | None]:
    """Return the settings of the recipe, of the run to resume, or chosen by the data."""
    changes = parse_assignments(args.set)
    if args.model is None and (args.weights is not None or args.weights_by_order):
        raise DsnetError("--weights is for --model NAME: which network are the weights of?")
    if args.model is not None and (args.recipe is not None or args.data is None):
        raise DsnetError(
            "--model goes with --data and without a recipe; a recipe's network is changed by --set model=NAME"
        )
    if args.recipe is not None:
        config = resolve_recipe(args.recipe, args.set, args.data)
    elif args.resume and (folder / "recipe.json").is_file():
        config = override(read_config(folder), changes)
    else:
        base = override(TrainConfig(), {"data.name": args.data, **changes})
        dataset = _inspect(base)
        known: dict[str, Any] = {
            "images": dataset.images,
            "classes": len(dataset.classes),
            "side": dataset.side,
            "device": pick_device(base.run.device).type,
        }
        if args.model is None:
            config = recipe_for(base.data, **known)
        else:
            weights, by_order = chosen_weights(args, args.model), args.weights_by_order
            config = fine_tuning_recipe(
                base.data, **known, model=args.model, weights=weights, by_order=by_order
            )
        return override(config, changes), dataset
    return config, None if args.data is None else _inspect(config)


def _inspect(config: TrainConfig) -> DatasetSummary:
    dataset = inspect_dataset(config.data.name, config.data.root)
    dataset.check()
    return dataset


def _dry_run_text(
    args: argparse.Namespace,
    folder: Path,
    name: str,
    config: TrainConfig,
    model: Supernet,
    dataset: DatasetSummary | None,
) -> str:
    """Describe the settings, the routes and the cost of a run."""
    try:
        dataset = dataset or inspect_dataset(config.data.name, config.data.root)
        set_training_threads(args, folder, config, _step_work(config, model, dataset), announce=not args.json)
        run_cost = estimate(config, model, dataset)
        size, cost_text = run_cost.size, before_text(config, dataset, run_cost)
    except DsnetError as error:  # a recipe can be looked at before its data is there
        size = config.data.size or model.input_spec.image_size
        cost_text = f"The cost of the whole run is unknown: {error}"
    cost = step_cost(config, model, size)
    teacher = f", and {human(cost.teacher)} for the teacher's forward" if cost.teacher else ""
    batch = config.optim.batch
    return (
        f"{name}: {config.model}, scheme {config.scheme.name}\n\n{settings_text(config)}\n\n"
        f"{route_table(model, route_rows(model, image_size=size), max_rows=32)}\n\n"
        f"A step runs {cost.networks}: {human(3 * cost.forward)} multiply-adds an image, forward and "
        f"backward (counted as three forwards){teacher}; {human(cost.madds * batch)} for the batch of "
        f"{batch}.\n\n{cost_text}"
    )


def settings_text(config: TrainConfig | DetectionConfig) -> str:
    """Format all settings, one ``key = value`` per line."""
    return "\n".join(f"{key} = {printable(str(attrgetter(key)(config)))}" for key, _ in keys_of(type(config)))


def set_training_threads(
    args: argparse.Namespace,
    folder: Path,
    config: TrainConfig | DetectionConfig,
    make_work: Callable[[], Work] | None = None,
    *,
    announce: bool,
) -> None:
    """Set the number of threads of a run by measuring ``make_work`` (default: forward passes)."""
    set_threads(
        args,
        pick_device(config.run.device),
        make_work or (lambda: forward_work(create_model(config.model, **config.options), config.data.size)),
        batch=config.optim.batch,
        kept=kept_threads(folder) if args.resume else None,
        announce=announce,
    )


def _step_work(
    config: TrainConfig, model: Supernet, dataset: DatasetSummary | None
) -> Callable[[], Work] | None:
    """Return training steps to measure; None if the data is unknown or a teacher would have to be loaded."""
    if dataset is None or config.scheme.teacher is not None:
        return None
    return partial(timed_step, config, len(dataset.classes), image_size(config, model, dataset))


def print_stopped(stopped: KeyboardInterrupt, folder: Path) -> int:
    """Print what is saved of a run that was stopped between steps; return the exit status."""
    saved = "Nothing was saved yet."
    if has_last(folder):
        saved = f"{folder} keeps what was saved. Go on with the same command and --resume."
    print(printable(f"Stopped. {saved}"), file=sys.stderr)
    return stopped_status(stopped)


def stop_status(status: RunStatus, folder: Path | None = None) -> int:
    """Print where a run stopped and how to continue; return the exit status of its signal."""
    saved = "" if folder is None else f"; saved in {folder}"
    text = f"Stopped after step {status.step} of {status.steps}{saved}."
    print(printable(f"{text} Go on with the same command and --resume."), file=sys.stderr)
    return 128 + (status.signal or signal.SIGINT)


def report_outcome(outcome: Outcome, config: TrainConfig, *, as_json: bool) -> int:
    """Print the results of a run and write its page; return the exit status."""
    if not outcome.first:
        return 0
    exit_status = 0
    if not outcome.status.finished:
        exit_status = stop_status(outcome.status, outcome.folder)
    elif as_json:
        print((outcome.folder / "results.json").read_text(encoding="utf-8"), end="")
    else:
        print(_results_text(outcome, config))
    low = low_accuracy(outcome) if outcome.status.finished else None
    if low is not None:
        print(f"warning: {low}", file=sys.stderr)
    try:
        report = write_run_page(outcome, config)
    except LockedError as error:
        print(f"dsnet: no report: {error}", file=sys.stderr)
    else:
        to_stdout = outcome.status.finished and not as_json
        print(f"Report: {printable(str(report))}", file=sys.stdout if to_stdout else sys.stderr)
    return exit_status


def _results_text(outcome: Outcome, config: TrainConfig) -> str:
    held_out = {after.route: (before, after) for before, after in outcome.held_out}
    largest = max(result.madds for result in outcome.test)
    sized = outcome.test[0].image_size is not None
    rows = []
    for result in outcome.test:
        size = [] if result.image_size is None else [f"{result.image_size} px"]
        row = [
            str(result.route),
            *size,
            human(result.madds),
            bar(result.madds, largest),
            f"{result.accuracy:.2%}",
        ]
        if held_out:
            before, after = held_out[result.route]
            row += ["–" if before is None else f"{before.accuracy:.2%}", f"{after.accuracy:.2%}"]
        rows.append(row)
    if outcome.gated is not None:
        gated = outcome.gated
        row = ["gated", *[""] * sized, human(gated.madds), bar(gated.madds, largest), f"{gated.accuracy:.2%}"]
        rows.append(row + ["", ""] * bool(held_out))
    header = ["route", *["image"] * sized, "MAdds", "cost", "test"]
    images = f"{outcome.test[0].images} test images"
    if held_out:
        header += ["held-out before", "after"]
        images += f"; {outcome.held_out[0][1].images} held-out ones, before and after re-calibration"
    return (
        f"\n{config.model} on {printable(config.data.name)}, {images}\n\n"
        f"{table(header, rows, left=('cost',))}\n\nFinal network: {printable(str(outcome.folder / 'final'))}"
    )
