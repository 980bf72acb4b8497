"""``dsnet detect evaluate`` and ``predict``: a detector with every image at its own route."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from dsnet.cli.output import print_json, writes_files
from dsnet.cli.progress import progress
from dsnet.cli.threads import set_threads_for
from dsnet.core.device import pick_device
from dsnet.core.files import write_output
from dsnet.core.timer import silent
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
    """Evaluate a detector and print the results."""
    saved = _open(args)
    annotated = read_splits(args.data, args.split, saved.classes)
    images, damaged = load_detection_dataset(annotated, saved.preprocessing.size, progress)
    problems = (*annotated.problems, *damaged)
    if args.problems is not None:
        text = "".join(f"{one_line(f'{problem.file}: {problem.what}')}\n" for problem in problems)
        write_output(args.problems, text)
    rest = f"{args.problems or '--problems FILE.txt'} lists them"
    report_problems(problems, rest, lambda line: _warn(printable(line)))
    space = saved.detector.network.space
    gated = saved.checkpoint.data.get("gate") is not None
    results = list(
        evaluate_detector(
            saved.detector,
            images,
            saved.preprocessing,
            args.routes or [*range(len(space)), *([None] if gated else [])],
            batch=args.batch,
            progress=silent if args.json else progress,
        )
    )
    if args.json:
        print_json([result.to_dict() for result in results])
        return 0
    print(f"{len(images)} images of {printable(str(args.data))}, {args.split}\n\n{detection_table(results)}")
    if problems:
        print(f"{plural(len(problems), 'problem')} with files")
    return 0


def _open(args: argparse.Namespace) -> SavedDetector:
    """Load a run's detector on its device; warn if its training is not finished."""
    saved = load_detector(args.run)
    step, steps = saved.checkpoint.data["step"], saved.checkpoint.data.get("steps", 0)
    if step < steps:
        _warn(f"{args.run} was stopped at step {step} of {steps}: its batch-norm statistics are not exact")
    elif any(state is not KeyState.CALIBRATED for norm in saved.detector.norms() for state in norm.states):
        _warn(
            f"{args.run} was stopped after training: its batch-norm statistics are not computed yet; "
            "`dsnet detect train` with --resume computes them"
        )
    saved.detector.to(pick_device(args.device))
    set_threads_for(args, saved.detector.network, saved.preprocessing.size, batch=args.batch)
    return saved


def _warn(text: str) -> None:
    print(f"dsnet: {text}", file=sys.stderr)


@writes_files("out", folder="draw")
def run_predict(args: argparse.Namespace) -> int:
    """Find boxes and print them; return 1 if an image has none for an error."""
    if not 0 <= args.score < 1:
        raise DsnetError(f"--score must be at least 0 and below 1, not {args.score}")
    paths = find_images(args.images)
    drawings = {} if args.draw is None else drawing_paths(args.images, args.draw)
    _check_targets(args, paths, drawings)
    saved = _open(args)
    route: int | None = args.route
    if route is None and len(saved.detector.network.space) == 1:
        route = 0
    if route is None and saved.checkpoint.data.get("gate") is None:
        raise DsnetError(f"the gate of {args.run} is not trained: give --route, or train with gate.epochs")
    failures, rows = 0, []
    with nullcontext() if args.out is None else args.out.open("w", encoding="utf-8") as file:
        results = detect_files(
            saved, paths, route=route, score=args.score, batch=args.batch, backend=args.backend
        )
        for result in results if args.json else progress(results, len(paths), "image"):
            if not isinstance(result, ImageDetections):
                failures += 1
                _warn(f"{printable(result.path)}: {result.error}")
                continue
            plain = result.to_dict(saved.classes)
            if args.draw is not None:
                drawing = drawings[result.path]
                drawing.parent.mkdir(parents=True, exist_ok=True)
                try:
                    draw_detections(result.path, result.detections, saved.classes).save(drawing)
                    plain["drawn"] = str(drawing)
                except DecodeError as error:  # the file has changed; its boxes are known
                    failures += 1
                    _warn(f"{printable(result.path)}: cannot be drawn: {error}")
            line = json.dumps(plain, allow_nan=False)
            if args.json:
                print(line, flush=True)
            if file is not None:
                file.write(line + "\n")
            names = [saved.classes[index] for index in result.detections.classes.tolist()]
            counts = ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names))) or "nothing"
            drawn = [] if args.draw is None else [plain.get("drawn", "")]
            rows.append([result.path, str(result.route), human(result.madds), counts, *drawn])
    if not args.json and rows:
        header = ["image", "route", "MAdds", "found", *(["drawn"] if args.draw is not None else [])]
        print(table(header, rows, left=("image", "found", "drawn")))
        if args.draw is not None:
            print(printable(f"\nImages with their boxes: {args.draw}"))
    return 1 if failures else 0


def _check_targets(args: argparse.Namespace, paths: Sequence[str], drawings: Mapping[str, Path]) -> None:
    """Raise if an existing file would be replaced without --force, or an image at all."""
    if args.draw is not None and args.draw.exists() and not args.draw.is_dir():
        raise DsnetError(f"--draw takes a folder, not the file {args.draw}")
    images = {Path(path).resolve() for path in paths}
    for option, target in [("--draw", path) for path in drawings.values()] + [("--out", args.out)]:
        if target is not None and target.resolve() in images:
            raise DsnetError(f"{option} would replace {target}, which is one of the images")
        if target is not None and target.exists() and not args.force:
            raise DsnetError(f"{target} exists: --force replaces it")
