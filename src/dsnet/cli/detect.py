"""``dsnet detect``: boxes, found by a supernet at each image's own route."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from dsnet.cli.detect_train import add_train
from dsnet.cli.options import check_out, positive
from dsnet.cli.progress import progress
from dsnet.data.find import find_images
from dsnet.detection.counts import plural
from dsnet.detection.draw import draw_boxes, drawn_names
from dsnet.detection.evaluate import evaluate_detector
from dsnet.detection.pictures import load_pictures, read_splits
from dsnet.detection.predict import Found, find_boxes
from dsnet.detection.run import tell_problems
from dsnet.detection.saved import SavedDetector, load_detector
from dsnet.errors import DsnetError
from dsnet.report.detection import detection_table
from dsnet.report.text import human, table
from dsnet.slicing import KeyState
from dsnet.training.run import pick_device

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "detect",
        help="find boxes: train, evaluate and use a detector (FSSD)",
        description="An FSSD detector on a supernet with one gate: every image at its own route.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True)
    add_train(steps)
    _add_evaluate(steps)
    _add_predict(steps)


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
        print(f"{len(pictures)} images of {args.data}, {args.split}\n\n{detection_table(results)}")
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
