"""``dsnet train``: a recipe, from nothing to a network with known accuracy."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from dsnet.calibration.difficulty import GateReport
from dsnet.cli.progress import TrainingProgress
from dsnet.cli.threads import Work, forward_work, kept_threads, settle
from dsnet.core.checkpoint import has_last, load_checkpoint
from dsnet.core.device import pick_device
from dsnet.core.distributed.launch import launched
from dsnet.core.files import write_text
from dsnet.core.formats import GATE_REPORTS, ROUTING
from dsnet.core.interrupt import stopped_status
from dsnet.core.metrics_log import read_metrics
from dsnet.core.run_lock import LockedError
from dsnet.core.schema import check
from dsnet.core.settings import check_kind, keys_of, override, parse_assignments, to_plain
from dsnet.data.inspect import DatasetSummary, inspect_dataset
from dsnet.detection.train.config import DetectConfig
from dsnet.errors import DsnetError, DsnetWarning, printable
from dsnet.models import Supernet, create_model
from dsnet.recipes import get_recipe, list_recipes
from dsnet.recipes.custom_data import recipe_for
from dsnet.report.routes import route_rows, route_table
from dsnet.report.text import bar, human, table
from dsnet.report.training import before_text, low_accuracy, training_page
from dsnet.training.api import train
from dsnet.training.config import TrainConfig
from dsnet.training.estimate import estimate, image_size, step_cost, timed_step
from dsnet.training.results import Outcome, read_outcome
from dsnet.training.run_dir import locked, read_config, read_plain, settings_of
from dsnet.training.transfer import check_start

__all__ = ["run", "resolve_recipe", "stopped_at_once", "tell", "write_page_again"]


def resolve_recipe(name: str, settings: list[str], data: str | None = None) -> TrainConfig:
    """The configuration of a recipe by name or file, on other data, changed by ``key=value`` settings."""
    if name.endswith(".json"):
        plain = read_plain(Path(name))
        told = f"{name} is a recipe for a detector: dsnet detect train {name}"
        check_kind(plain, TrainConfig, DetectConfig, told)
        config = settings_of(TrainConfig, plain, name)
    elif os.path.isfile(os.path.join(name, "recipe.json")):
        raise DsnetError(f"{name} is the folder of a run; its recipe is {Path(name) / 'recipe.json'}")
    elif os.path.isdir(name) and name not in list_recipes():
        raise DsnetError(
            f"{name} is a folder, not a recipe; `dsnet train --data {name}` trains on its images"
        )
    else:
        config = get_recipe(name).config
    if data is not None:
        config = replace(config, data=replace(config.data, name=data))
    return override(config, parse_assignments(settings))


def run(args: argparse.Namespace) -> int:
    """Trains, or shows what would be trained."""
    _check(args)
    name = _name(args)
    folder: Path = args.out or Path("runs") / name
    config, found = _settings(args, folder)
    model: Supernet = create_model(config.model, device="meta", **config.options)
    if not isinstance(model, Supernet):
        raise DsnetError(f"{config.model} is a static network; `dsnet models` lists the supernets")
    if args.dry_run:
        plain = json.dumps(to_plain(config), indent=2)
        print(plain if args.json else _plan(args, name, config, model, found))
        return 0
    first, expected = launched().rank == 0, None
    if first and not args.resume and not (folder / "last").is_file():
        found = found or inspect_dataset(config.data.name, config.data.root)
        found.check()
        if config.start is not None:
            check_start(model, config.start, image_size(config, model, found))
        _settle_threads(args, config, model, found)
        if not args.json:
            ahead = estimate(config, model, found)
            expected = ahead.seconds
            print(before_text(config, found, ahead), file=sys.stderr, flush=True)
    else:
        _settle_threads(args, config, model, found, kept_threads(folder))
    callback = TrainingProgress(quiet=args.json, expected=expected)
    try:
        outcome = train(config, folder, resume=args.resume, callback=callback)
    except KeyboardInterrupt as stopped:  # before the first step or after the last one
        return stopped_at_once(stopped, folder)
    return tell(outcome, config, as_json=args.json)


def stopped_at_once(stopped: KeyboardInterrupt, folder: Path) -> int:
    """Prints what is kept of a run that was stopped between steps; the exit status."""
    kept = (
        f"{folder} keeps what was saved. Go on with the same command and --resume."
        if has_last(folder)
        else "Nothing was saved yet."
    )
    print(f"Stopped. {kept}", file=sys.stderr)
    return stopped_status(stopped)


def _settle_threads(
    args: argparse.Namespace,
    config: TrainConfig,
    model: Supernet,
    found: DatasetSummary | None,
    kept: int | None = None,
) -> None:
    """Measures steps where the data is known, else passes."""

    def work() -> Work:
        if found is None or config.scheme.teacher is not None:
            return forward_work(create_model(config.model, **config.options), config.data.size)
        return timed_step(config, len(found.classes), image_size(config, model, found))

    device = pick_device(config.run.device)
    settle(args, device, work, batch=config.optim.batch, kept=kept, say=not args.json)


def _check(args: argparse.Namespace) -> None:
    if args.recipe is None and args.data is None:
        raise DsnetError(
            "what is to be trained? Give a RECIPE (`dsnet recipes` lists them), or --data with a data set or "
            "a folder that has one folder of images a class"
        )
    if args.data is not None and "data.name" in parse_assignments(args.set):
        raise DsnetError(f"--data {args.data} and --set data.name both say which data; give one of them")


def _name(args: argparse.Namespace) -> str:
    """What the run is called where nobody says."""
    recipe = args.recipe or ""
    if recipe.endswith(".json"):
        path = Path(recipe)
        recipe = path.resolve().parent.name if path.name == "recipe.json" else path.stem
    data = "" if args.data is None else Path(args.data.removeprefix("hf:")).resolve().name
    return "-".join(filter(None, (recipe, data.replace(":", "-"))))


def _settings(args: argparse.Namespace, folder: Path) -> tuple[TrainConfig, DatasetSummary | None]:
    """The recipe's, or settings made from the data; a run that goes on has its own."""
    if args.recipe is not None:
        config = resolve_recipe(args.recipe, args.set, args.data)
    elif args.resume and (folder / "recipe.json").is_file():
        config = override(read_config(folder), parse_assignments(args.set))
    else:
        return _own_settings(args)
    if args.data is None:
        return config, None
    found = inspect_dataset(config.data.name, config.data.root)
    found.check()
    return config, found


def _own_settings(args: argparse.Namespace) -> tuple[TrainConfig, DatasetSummary]:
    changes = parse_assignments(args.set)
    asked = override(TrainConfig(), {"data.name": args.data, **changes})
    found = inspect_dataset(args.data, asked.data.root)
    found.check()
    config = recipe_for(
        asked.data,
        images=found.images,
        classes=len(found.classes),
        side=found.side,
        device=pick_device(asked.run.device).type,
    )
    return override(config, changes), found


def tell(outcome: Outcome, config: TrainConfig, *, as_json: bool) -> int:
    """Prints what a run came to and writes its page; the exit status."""
    if not outcome.first:
        return 0
    status = outcome.status
    if not status.finished:
        print(
            f"Stopped after step {status.step} of {status.steps}; saved in {outcome.folder}. "
            "Go on with the same command and --resume.",
            file=sys.stderr,
        )
    elif as_json:
        print((outcome.folder / "results.json").read_text(encoding="utf-8"), end="")
    else:
        print(_results(outcome, config))
    low = low_accuracy(outcome) if status.finished else None
    if low is not None:
        print(f"warning: {low}", file=sys.stderr)
    try:
        report = _write_page(outcome, config)
    except LockedError as error:
        print(f"dsnet: no report: {error}", file=sys.stderr)
    else:
        line = f"Report: {printable(str(report))}"
        print(line, file=sys.stdout if status.finished and not as_json else sys.stderr)
    return 0 if status.finished else 128 + (status.signal or signal.SIGINT)


def write_page_again(folder: Path) -> None:
    """Brings the page of a finished run up to date, where it has one: a gate may have been trained since."""
    try:
        outcome = read_outcome(folder)
        if outcome is not None and (folder / "report.html").is_file():
            _write_page(outcome, read_config(folder))
    except DsnetError as error:  # what was made is saved all the same
        warnings.warn(f"{folder / 'report.html'} is not brought up to date: {error}", DsnetWarning, 2)


def _write_page(outcome: Outcome, config: TrainConfig) -> Path:
    folder = outcome.folder
    report = folder / "report.html"
    with locked(folder):
        gates: list[GateReport] = []
        verdict: str | None = None
        if any((folder / name).is_file() for name in ("gated", "final")):
            data = load_checkpoint(folder).data
            plain = data.get("gate_reports", [])
            check(GATE_REPORTS, plain, f"{folder}: gate_reports")
            gates = [GateReport.from_dict(one) for one in plain]
            if data.get("routing") is not None:
                check(ROUTING, data["routing"], f"{folder}: routing")
                verdict = (data["routing"].get("verdict") or {}).get("text")
        metrics = read_metrics(folder / "metrics.jsonl")
        write_text(report, training_page(outcome, config, metrics, gates=gates, verdict=verdict))
    return report


def _plan(
    args: argparse.Namespace, name: str, config: TrainConfig, model: Supernet, found: DatasetSummary | None
) -> str:
    lines = [f"{key} = {printable(str(_value(config, key)))}" for key, _ in keys_of(TrainConfig)]
    try:
        found = found or inspect_dataset(config.data.name, config.data.root)
        _settle_threads(args, config, model, found)
        ahead = estimate(config, model, found)
        size, cost_text = ahead.size, before_text(config, found, ahead)
    except DsnetError as error:  # a recipe can be looked at before its data is there
        size = config.data.size or model.input_spec.image_size
        cost_text = f"What the whole run costs is not known: {error}"
    cost = step_cost(config, model, size)
    batch = config.optim.batch
    return "\n".join(
        [
            f"{name}: {config.model}, scheme {config.scheme.name}\n",
            *lines,
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


def _value(config: TrainConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


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
