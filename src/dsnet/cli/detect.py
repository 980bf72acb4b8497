"""``dsnet detect``: boxes, found by a supernet at each image's own route."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from dsnet.cli.detect_live import BoxWatch
from dsnet.cli.options import check_out, positive
from dsnet.cli.progress import progress
from dsnet.data.find import find_images
from dsnet.detection.config import DetectConfig
from dsnet.detection.counts import ahead_text, count_boxes, plural
from dsnet.detection.draw import draw_boxes, drawn_names
from dsnet.detection.evaluate import DetectionResult, evaluate_detector
from dsnet.detection.pictures import load_pictures, read_splits
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
from dsnet.detection.saved import SavedDetector, load_detector
from dsnet.errors import DsnetError
from dsnet.report.detection import detection_page
from dsnet.report.text import bar, human, table
from dsnet.slicing import KeyState
from dsnet.training.config import TrainConfig
from dsnet.training.run import pick_device
from dsnet.training.settings import check_kind, from_plain, keys_of, override, parse_assignments, to_plain

__all__ = ["add_command"]

EXAMPLES = 6  # images on the page of a run


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "detect",
        help="find boxes: train, evaluate and use a detector (FSSD)",
        description="An FSSD detector on a supernet with one gate: every image at its own route.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True)
    _add_train(steps)
    _add_evaluate(steps)
    _add_predict(steps)


def _add_train(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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


def _add_evaluate(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = steps.add_parser(
        "evaluate",
        help="mean average precision of every route, and of the gate",
        description="Mean average precision by the rules of VOC 2007 and 2010 and of COCO, beside the\n"
        "multiply-adds of the whole detector.",
        epilog="Examples:\n"
        "  dsnet detect evaluate runs/bccd_ds_mbnet --data BCCD\n"
        "  dsnet detect evaluate runs/bccd_ds_mbnet --data BCCD --split val --routes 0 13 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run of `dsnet detect train`")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder in VOC's layout")
    parser.add_argument("--split", default="test", help="of ImageSets/Main, or FOLDER/SPLIT (default: test)")
    parser.add_argument("--routes", type=int, nargs="+", metavar="N", help="these alone, without the gate")
    parser.add_argument("--problems", type=Path, metavar="FILE.txt", help="all problems with files, listed")
    parser.add_argument("--batch", type=positive, default=32, help="images at a time (default: 32)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run_command=_evaluate)


def _add_predict(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = steps.add_parser(
        "predict",
        help="boxes in image files, every image at its own route",
        description="Finds boxes in images: as a table, as JSON lines, and as images with the boxes drawn.\n"
        "One that cannot be read is reported, the others go on, and the exit status is 1.",
        epilog="Examples:\n"
        "  dsnet detect predict runs/bccd_ds_mbnet photo.jpg --draw found\n"
        "  dsnet detect predict runs/bccd_ds_mbnet photos --score 0.5 --out boxes.jsonl\n"
        "  dsnet detect predict runs/bccd_ds_mbnet photos --route 0 --json | jq '.boxes | length'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run of `dsnet detect train`")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a file, a folder, or a pattern in quotes")
    parser.add_argument("--route", type=int, metavar="N", help="every image at this route")
    parser.add_argument("--score", type=float, default=0.3, help="least probability of a box (default: 0.3)")
    parser.add_argument(
        "--draw",
        type=Path,
        metavar="DIR",
        help="images with their boxes, into this folder; folders inside stay",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, an object a line, as results come")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="these lines to a file")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument("--batch", type=positive, default=16, help="images at a time (default: 16)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.set_defaults(run_command=_predict)


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
        print(f"\n{config.model} on {config.data.root}\n\n{_table(outcome.results)}\n")
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
    return override(config, _assigned(args.set))


def _assigned(settings: Sequence[str]) -> dict[str, object]:
    """Keys and values of ``--set``; class names may be given with commas."""
    changes: dict[str, object] = parse_assignments(settings)
    for key in changes.keys() & {"classes", "data.classes"}:
        value = changes[key]
        if isinstance(value, str):
            changes[key] = tuple(name.strip() for name in value.split(",") if name.strip())
        elif isinstance(value, int | tuple) and not isinstance(value, bool):  # names may be numbers
            changes[key] = tuple(map(str, value if isinstance(value, tuple) else (value,)))
    return changes


def _settings(config: DetectConfig) -> str:
    lines = []
    for key, _ in keys_of(DetectConfig):
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        lines.append(f"{key} = {value}")
    return "\n".join(lines)


def _evaluate(args: argparse.Namespace) -> int:
    check_out(args.problems, "--problems")
    saved = _open(args)
    annotated = read_splits(args.data, args.split, saved.classes)
    pictures, damaged = load_pictures(annotated, saved.prepared.size, progress)
    problems = (*annotated.problems, *damaged)
    if args.problems is not None:
        text = "".join(f"{problem.file}: {problem.what}\n" for problem in problems)
        args.problems.write_text(text, encoding="utf-8")
    rest = "--problems FILE.txt lists them" if args.problems is None else f"{args.problems} lists them"
    tell_problems(problems, rest, lambda line: print(f"dsnet: {line}", file=sys.stderr))
    space = saved.detector.network.space
    gated = saved.checkpoint.data.get("gate") is not None
    wanted = args.routes or [*range(len(space)), *([None] if gated else [])]
    results = list(
        evaluate_detector(
            saved.detector,
            pictures,
            saved.prepared,
            wanted,
            batch=args.batch,
            progress=None if args.json else progress,
        )
    )
    if args.json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        print(f"{len(pictures)} images of {args.data}, {args.split}\n\n{_table(results)}")
        if problems:
            print(f"{plural(len(problems), 'problem')} with files")
    return 0


def _open(args: argparse.Namespace) -> SavedDetector:
    """A run's detector on its device; tells where it is not a finished one."""
    saved = load_detector(args.run)
    step, steps = saved.checkpoint.data["step"], saved.checkpoint.data.get("steps", 0)
    if step < steps:
        print(
            f"dsnet: {args.run} was stopped at step {step} of {steps}: its norms' statistics are not exact",
            file=sys.stderr,
        )
    elif any(state is not KeyState.CALIBRATED for norm in saved.detector.norms() for state in norm.states):
        print(
            f"dsnet: {args.run} was stopped after training: its norms' statistics are not made yet; "
            "`dsnet detect train` with --resume makes them",
            file=sys.stderr,
        )
    saved.detector.to(pick_device(args.device))
    return saved


def _table(results: Sequence[DetectionResult]) -> str:
    largest = max(result.madds for result in results)
    kinds = list(results[0].classes)
    shown = kinds if len(kinds) <= 5 else []
    rows = [
        [
            "gate" if result.route is None else str(result.route),
            human(round(result.madds)),
            bar(result.madds, largest),
            *(f"{100 * result.mean[rule]:.1f}" for rule in ("voc2007", "voc2010", "coco")),
            *(f"{100 * result.classes[kind]:.1f}" for kind in shown),
        ]
        for result in results
    ]
    header = ["route", "MAdds", "cost", "mAP 2007", "mAP 2010", "COCO", *shown]
    text = table(header, rows, left=("cost",))
    gate = results[-1]
    if gate.route is None:
        taken = ", ".join(f"{count} at {route}" for route, count in gate.taken.items())
        text += f"\n\nThe gate ran {taken}."
    return text


def _predict(args: argparse.Namespace) -> int:
    check_out(args.out)
    if not 0 <= args.score < 1:
        raise DsnetError(f"--score must be at least 0 and below 1, not {args.score}")
    paths = find_images(args.images)
    drawn = {} if args.draw is None else drawn_names(args.images, args.draw)
    _check_targets(args, paths, drawn)
    saved = _open(args)
    route: int | None = args.route
    if route is None and len(saved.detector.network.space) == 1:
        route = 0
    if route is None and saved.checkpoint.data.get("gate") is None:
        raise DsnetError(f"the gate of {args.run} is not trained: give --route, or train with gate.epochs")
    missed, rows = 0, []
    with nullcontext() if args.out is None else args.out.open("w", encoding="utf-8") as file:
        found = find_boxes(saved, paths, route=route, score=args.score, batch=args.batch)
        for one in found if args.json else progress(found, len(paths), "image"):
            if not isinstance(one, Found):
                missed += 1
                print(f"dsnet: {one.path}: {one.error}", file=sys.stderr)
                continue
            place = {} if args.draw is None else {"drawn": str(drawn[one.path])}
            line = json.dumps({**one.to_dict(saved.classes), **place})
            if args.json:
                print(line, flush=True)
            if file is not None:
                file.write(line + "\n")
            if args.draw is not None:
                drawn[one.path].parent.mkdir(parents=True, exist_ok=True)
                draw_boxes(one.path, one.detections, saved.classes, drawn[one.path])
            kinds = [saved.classes[kind] for kind in one.detections.classes.tolist()]
            counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "nothing"
            rows.append([one.path, str(one.route), human(one.madds), counts, *place.values()])
    if not args.json and rows:
        header = ["image", "route", "MAdds", "found", *(["drawn"] if args.draw is not None else [])]
        print(table(header, rows, left=("image", "found", "drawn")))
        if args.draw is not None:
            print(f"\nImages with their boxes: {args.draw}")
    return 1 if missed else 0


def _check_targets(args: argparse.Namespace, paths: Sequence[str], drawn: Mapping[str, Path]) -> None:
    """Nothing that is there is replaced unasked, and an image never."""
    if args.draw is not None and args.draw.exists() and not args.draw.is_dir():
        raise DsnetError(f"--draw takes a folder, not the file {args.draw}")
    given = {Path(path).resolve() for path in paths}
    for option, target in [("--draw", path) for path in drawn.values()] + [("--out", args.out)]:
        if target is None:
            continue
        if target.resolve() in given:
            raise DsnetError(f"{option} would replace {target}, which is one of the images")
        if target.exists() and not args.force:
            raise DsnetError(f"{target} is there already: --force replaces it")
