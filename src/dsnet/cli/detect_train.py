"""``dsnet detect train``: a detector with all its routes, and its gate."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

from dsnet.cli.detect_live import BoxWatch
from dsnet.detection.config import DetectConfig
from dsnet.detection.counts import ahead_text, count_boxes, plural
from dsnet.detection.pictures import read_splits
from dsnet.detection.predict import Found, find_boxes
from dsnet.detection.recipes import DETECTORS, get_detector_recipe
from dsnet.detection.run import (
    PROBLEMS,
    RESULTS,
    DetectionOutcome,
    planned_network,
    tell_problems,
    train_detector,
)
from dsnet.detection.saved import load_detector
from dsnet.errors import DsnetError
from dsnet.report.detection import detection_page, detection_table
from dsnet.training.config import TrainConfig
from dsnet.training.run import pick_device
from dsnet.training.settings import check_kind, from_plain, keys_of, override, parse_assignments, to_plain

__all__ = ["add_train"]

EXAMPLES = 6  # images on the page of a run


def add_train(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the step to the command."""
    names = "\n".join(f"  {name:22}{recipe.about}" for name, recipe in DETECTORS.items())
    parser = steps.add_parser(
        "train",
        help="train a detector, all routes together, then its gate",
        description="Trains a detector on a folder in Pascal VOC's layout:\n"
        "  DIR/JPEGImages/NAME.jpg  DIR/Annotations/NAME.xml  DIR/ImageSets/Main/{trainval,test}.txt\n"
        "All routes learn together; then the statistics of every route are made, all routes are evaluated\n"
        "on the test split, and a gate is trained. What is wrong with files is told before training starts.\n"
        "Ctrl-C and SIGTERM save before they stop; --resume goes on.\n\n"
        "The bccd recipes fit any folder in this layout: classes are those of its training images. Only the\n"
        "number of epochs is made for BCCD: fewer images need more of them, many images fewer.\n\n"
        "Recipes:\n" + names,
        epilog="Examples:\n"
        "  dsnet detect train bccd_ds_mbnet --data BCCD\n"
        "  dsnet detect train bccd_ds_mbnet --data my-boxes --dry-run       (images, classes, boxes, steps)\n"
        "  dsnet detect train bccd_ds_mbnet --data my-boxes --out runs/short \\\n"
        "      --set optim.epochs=5 --set optim.batch=8 --set data.size=160 --set gate.epochs=2\n"
        "                         (a short run, to see that all works; a batch must not exceed the images)\n"
        "  dsnet detect train bccd_ds_mbnet --data my-boxes --set data.train=train --set data.test=val\n"
        "  dsnet detect train bccd_ds_mbnet --data BCCD --set data.classes=RBC,WBC,Platelets\n"
        "  dsnet detect train bccd_ds_mbnet --data my-boxes --set start=runs/imagenette_mbnet\n"
        "  dsnet detect train voc_ds_mbnet --data VOCdevkit --dry-run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe by name, or the recipe.json of a run")
    parser.add_argument("--data", metavar="DIR", help="folder in VOC's layout, or one with several of them")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting, lists with commas; --dry-run shows all; may be repeated",
    )
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the settings and what the data has; train nothing"
    )
    parser.add_argument("--json", action="store_true", help="the settings (--dry-run) or the results as JSON")
    parser.set_defaults(run_command=_train)


def _train(args: argparse.Namespace) -> int:
    config = _resolve(args)
    if args.dry_run:
        print(
            json.dumps(to_plain(config), indent=2)
            if args.json
            else f"{_settings(config)}\n\n{_ahead(config)}"
        )
        return 0
    stem = Path(args.recipe).resolve().parent.name if args.recipe.endswith(".json") else args.recipe
    folder = args.out or Path("runs") / stem
    watch = BoxWatch(config.optim.epochs, quiet=args.json)
    outcome = train_detector(config, folder, resume=args.resume, watch=watch, said=watch.said)
    if not outcome.done:
        print(_stopped(outcome), file=sys.stderr)
        return 128 + (outcome.ending.signal or signal.SIGINT)
    report = folder / "report.html"
    if outcome.train is None:
        print(f"{folder} is finished: all {outcome.ending.steps} steps, figures and gate", file=sys.stderr)
    else:
        _write_page(config, outcome, report)
    if args.json:
        print((folder / RESULTS).read_text(encoding="utf-8"), end="")
    else:
        print(f"\n{config.model} on {config.data.root}\n\n{detection_table(outcome.results)}\n")
        if outcome.problems:
            print(f"{plural(len(outcome.problems), 'problem')} with files: {folder / PROBLEMS}")
        last = outcome.results[-1].route
        at = "" if last is None or len(outcome.results) == 1 else f" --route {last}"
        print(f"Detector: {folder}; find boxes with `dsnet detect predict {folder} IMAGE --draw found{at}`")
        if report.is_file():
            print(f"Report: {report}")
    return 0


def _stopped(outcome: DetectionOutcome) -> str:
    """What is saved of a run that did not come to its end."""
    ending, folder = outcome.ending, outcome.folder
    if not ending.done:
        text = f"Stopped after step {ending.step} of {ending.steps}; saved in {folder}. "
        return text + "Go on with the same command and --resume."
    return (
        f"Stopped after training, all {ending.steps} steps: the trained weights are saved in {folder}, "
        "figures and gate are not made yet. The same command and --resume makes them, without training again."
    )


def _ahead(config: DetectConfig) -> str:
    """What a run with these settings has before it, where the data is there."""
    data = config.data
    try:
        train = read_splits(data.root, data.train, data.classes)
        test = read_splits(data.root, data.test, train.classes)
    except (DsnetError, OSError) as error:  # a recipe can be looked at before its data is there
        return f"How much there is to train with is not known: {error}"
    problems = (*train.problems, *test.problems)
    routes = len(planned_network(config).space)
    text = ahead_text(config, count_boxes(train), count_boxes(test), routes=routes)
    if problems:
        lines: list[str] = []
        tell_problems(problems, "a run lists them", lines.append)
        text += f"\n\n{plural(len(problems), 'problem')} with files:\n" + "\n".join(lines)
    return text


def _write_page(config: DetectConfig, outcome: DetectionOutcome, path: Path) -> None:
    saved = load_detector(outcome.folder)
    saved.detector.to(pick_device(config.run.device))
    route = outcome.results[-1].route
    found = [
        one for one in find_boxes(saved, outcome.tested[:EXAMPLES], route=route) if isinstance(one, Found)
    ]
    text = detection_page(
        config.model,
        outcome.folder,
        outcome.classes,
        outcome.results,
        found,
        train=outcome.train,
        test=outcome.test,
        problems=outcome.problems,
    )
    path.write_text(text, encoding="utf-8")


def _resolve(args: argparse.Namespace) -> DetectConfig:
    if args.recipe.endswith(".json"):
        try:
            plain = json.loads(Path(args.recipe).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DsnetError(f"{args.recipe} cannot be read as a recipe: {error}") from error
        if isinstance(plain, dict):
            told = f"{args.recipe} is a recipe for a classifier: dsnet train {args.recipe}"
            check_kind(plain, DetectConfig, TrainConfig, told)
        config = from_plain(DetectConfig, plain)
    else:
        config = get_detector_recipe(args.recipe).config
    if args.data is not None:
        config = replace(config, data=replace(config.data, root=args.data))
    return override(config, parse_assignments(args.set))


def _settings(config: DetectConfig) -> str:
    lines = []
    for key, _ in keys_of(DetectConfig):
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        lines.append(f"{key} = {value}")
    return "\n".join(lines)
