"""``dsnet detect``: boxes, found by a supernet at each image's own route."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from dsnet.cli.output import writes_files
from dsnet.cli.progress import progress
from dsnet.cli.threads import set_threads_for
from dsnet.core.device import pick_device
from dsnet.core.files import write_output
from dsnet.data.decode import DecodeError
from dsnet.data.find_images import find_images
from dsnet.detection.data.dataset import load_detection_dataset, read_splits
from dsnet.detection.data.summary import plural, report_problems
from dsnet.detection.eval.evaluate import evaluate_detector
from dsnet.detection.io import SavedDetector, load_detector
from dsnet.detection.visualize import draw_detections, drawing_paths
from dsnet.errors import DsnetError, printable
from dsnet.inference.detect import ImageDetections, detect_files
from dsnet.report.detection import detection_table
from dsnet.report.text import human, one_line, table
from dsnet.slicing import KeyState

__all__ = ["run_evaluate", "run_predict"]


@writes_files("problems")
def run_evaluate(args: argparse.Namespace) -> int:
    """Evaluates a detector and prints."""
    saved = _open(args)
    annotated = read_splits(args.data, args.split, saved.classes)
    pictures, damaged = load_detection_dataset(annotated, saved.preprocessing.size, progress)
    problems = (*annotated.problems, *damaged)
    if args.problems is not None:
        text = "".join(f"{one_line(f'{problem.file}: {problem.what}')}\n" for problem in problems)
        write_output(args.problems, text)
    rest = "--problems FILE.txt lists them" if args.problems is None else f"{args.problems} lists them"
    report_problems(problems, rest, lambda line: print(f"dsnet: {printable(line)}", file=sys.stderr))
    space = saved.detector.network.space
    gated = saved.checkpoint.data.get("gate") is not None
    wanted = args.routes or [*range(len(space)), *([None] if gated else [])]
    results = list(
        evaluate_detector(
            saved.detector,
            pictures,
            saved.preprocessing,
            wanted,
            batch=args.batch,
            progress=None if args.json else progress,
        )
    )
    if args.json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        print(
            f"{len(pictures)} images of {printable(str(args.data))}, {args.split}\n\n"
            f"{detection_table(results)}"
        )
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
    set_threads_for(args, saved.detector.network, saved.preprocessing.size, batch=args.batch)
    return saved


@writes_files("out", folder="draw")
def run_predict(args: argparse.Namespace) -> int:
    """Finds boxes and prints."""
    if not 0 <= args.score < 1:
        raise DsnetError(f"--score must be at least 0 and below 1, not {args.score}")
    paths = find_images(args.images)
    drawn = {} if args.draw is None else drawing_paths(args.images, args.draw)
    _check_targets(args, paths, drawn)
    saved = _open(args)
    route: int | None = args.route
    if route is None and len(saved.detector.network.space) == 1:
        route = 0
    if route is None and saved.checkpoint.data.get("gate") is None:
        raise DsnetError(f"the gate of {args.run} is not trained: give --route, or train with gate.epochs")
    missed, rows = 0, []
    with nullcontext() if args.out is None else args.out.open("w", encoding="utf-8") as file:
        found = detect_files(
            saved, paths, route=route, score=args.score, batch=args.batch, backend=args.backend
        )
        for one in found if args.json else progress(found, len(paths), "image"):
            if not isinstance(one, ImageDetections):
                missed += 1
                print(f"dsnet: {printable(one.path)}: {one.error}", file=sys.stderr)
                continue
            place = {}
            if args.draw is not None:
                drawn[one.path].parent.mkdir(parents=True, exist_ok=True)
                try:
                    draw_detections(one.path, one.detections, saved.classes).save(drawn[one.path])
                    place = {"drawn": str(drawn[one.path])}
                except DecodeError as error:  # it could be read a moment ago; its boxes are known
                    missed += 1
                    print(f"dsnet: {printable(one.path)}: cannot be drawn: {error}", file=sys.stderr)
            line = json.dumps({**one.to_dict(saved.classes), **place}, allow_nan=False)
            if args.json:
                print(line, flush=True)
            if file is not None:
                file.write(line + "\n")
            kinds = [saved.classes[kind] for kind in one.detections.classes.tolist()]
            counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "nothing"
            shown = [] if args.draw is None else [place.get("drawn", "")]
            rows.append([one.path, str(one.route), human(one.madds), counts, *shown])
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
