"""``dsnet detect train``: a detector with all its routes, and its gate."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from dsnet.cli.output import print_json
from dsnet.cli.progress import TrainingProgress
from dsnet.cli.train import set_training_threads, settings_text, stop_status
from dsnet.core.device import pick_device
from dsnet.core.files import write_text
from dsnet.core.run_lock import LockedError
from dsnet.core.settings import to_plain
from dsnet.detection.data.dataset import read_splits
from dsnet.detection.data.summary import count_split, describe_run, plural, report_problems
from dsnet.detection.io import load_detector
from dsnet.detection.train.api import RESULTS, DetectionOutcome, train_detector
from dsnet.detection.train.config import DetectionConfig
from dsnet.detection.train.setup import PROBLEMS, create_network
from dsnet.errors import DsnetError, printable
from dsnet.inference.detect import ImageDetections, detect_files
from dsnet.recipes.resolve import resolve_recipe
from dsnet.report.detection import detection_page, detection_table
from dsnet.training.run_dir import locked

__all__ = ["run"]

EXAMPLES = 6  # images on the page of a run


def run(args: argparse.Namespace) -> int:
    """Train, or show what would be trained."""
    config = resolve_recipe(args.recipe, args.set, args.data, DetectionConfig)
    if args.dry_run:
        if args.json:
            print_json(to_plain(config))
        else:
            print(f"{settings_text(config)}\n\n{_dry_run_text(config)}")
        return 0
    stem = Path(args.recipe).resolve().parent.name if args.recipe.endswith(".json") else args.recipe
    folder = args.out or Path("runs") / stem
    callback = TrainingProgress(epochs=config.optim.epochs, quiet=args.json)
    set_training_threads(args, folder, config, announce=not args.json)
    outcome = train_detector(config, folder, resume=args.resume, callback=callback, notice=callback.notice)
    status = outcome.status
    if not outcome.done and not status.finished:
        return stop_status(status, folder)
    if not outcome.done:
        print(
            f"Stopped after training, all {status.steps} steps: the trained weights are saved in {folder}; "
            "statistics, results and gate are missing. The same command and --resume makes them, without "
            "training again.",
            file=sys.stderr,
        )
        return 128 + (status.signal or signal.SIGINT)
    report = folder / "report.html"
    if outcome.train is None:
        print(printable(f"{folder} is finished: all {status.steps} steps, results and gate"), file=sys.stderr)
    else:
        _write_page(config, outcome, report)
    if args.json:
        print((folder / RESULTS).read_text(encoding="utf-8"), end="")
        return 0
    print(f"\n{config.model} on {printable(config.data.root)}\n\n{detection_table(outcome.results)}\n")
    if outcome.problems:
        print(printable(f"{plural(len(outcome.problems), 'problem')} with files: {folder / PROBLEMS}"))
    last = outcome.results[-1].route
    route = "" if last is None or len(outcome.results) == 1 else f" --route {last}"
    name = printable(str(folder))
    print(f"Detector: {name}; find boxes with `dsnet detect predict {name} IMAGE --draw found{route}`")
    if report.is_file():
        print(printable(f"Report: {report}"))
    return 0


def _dry_run_text(config: DetectionConfig) -> str:
    """Describe the data and the steps of a run, if its data is there."""
    data = config.data
    try:
        train = read_splits(data.root, data.train, data.classes)
        test = read_splits(data.root, data.test, train.classes)
    except (DsnetError, OSError) as error:  # a recipe can be looked at before its data is there
        return f"How much there is to train with is not known: {error}"
    problems = (*train.problems, *test.problems)
    routes = len(create_network(config).space)
    text = describe_run(config, count_split(train), count_split(test), routes=routes)
    if problems:
        lines: list[str] = []
        report_problems(problems, "a run lists them", lines.append)
        text += f"\n\n{plural(len(problems), 'problem')} with files:\n" + "\n".join(lines)
    return text


def _write_page(config: DetectionConfig, outcome: DetectionOutcome, path: Path) -> None:
    saved = load_detector(outcome.folder)
    saved.detector.to(pick_device(config.run.device))
    examples = detect_files(saved, outcome.tested[:EXAMPLES], route=outcome.results[-1].route)
    text = detection_page(
        config.model,
        outcome.folder,
        outcome.classes,
        outcome.results,
        [example for example in examples if isinstance(example, ImageDetections)],
        train=outcome.train,
        test=outcome.test,
        problems=outcome.problems,
    )
    try:
        with locked(outcome.folder):
            write_text(path, text)
    except LockedError as error:
        print(printable(f"dsnet: {path} is not written: {error}"), file=sys.stderr)
