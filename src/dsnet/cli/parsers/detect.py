"""``dsnet detect``: boxes, found by a supernet at each image's own route."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser
from dsnet.cli.parsers.detect_train import add_detect_train

__all__ = ["add_detect"]


def add_detect(commands: Commands) -> None:
    """Add ``dsnet detect``."""
    parser = commands.add_parser(
        "detect",
        help="find boxes: train, evaluate and use a detector (FSSD)",
        description="An FSSD detector on a supernet with one gate: every image at its own route.",
    )
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True)
    add_detect_train(steps)
    _add_evaluate(steps)
    _add_predict(steps)


def _add_evaluate(steps: Commands) -> None:
    parser = add_parser(
        steps,
        "evaluate",
        "dsnet.cli.detect",
        function="run_evaluate",
        help="mean average precision of every route, and of the gate",
        description="Mean average precision by the rules of VOC 2007 and 2010 and of COCO, beside the\n"
        "multiply-adds of the whole detector.",
        epilog="Examples:\n"
        "  dsnet detect evaluate runs/bccd_ds_mbnet --data BCCD\n"
        "  dsnet detect evaluate runs/bccd_ds_mbnet --data BCCD --split val --routes 0 13 --json",
    )
    parser.add_run("dsnet detect train")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder in VOC's layout")
    parser.add_argument("--split", default="test", help="of ImageSets/Main, or FOLDER/SPLIT (default: test)")
    parser.add_argument("--routes", type=int, nargs="+", metavar="N", help="these alone, without the gate")
    parser.add_argument("--problems", type=Path, metavar="FILE.txt", help="all problems with files, listed")
    parser.add_batch(32)
    parser.add_device()
    parser.add_json()


def _add_predict(steps: Commands) -> None:
    parser = add_parser(
        steps,
        "predict",
        "dsnet.cli.detect",
        function="run_predict",
        help="boxes in image files, every image at its own route",
        description="Finds boxes in images: as a table, as JSON lines, and as images with the boxes drawn.\n"
        "One that cannot be read, or that the detector gives answers for that are not finite, is reported;\n"
        "the others go on, and the exit status is 1.",
        epilog="Examples:\n"
        "  dsnet detect predict runs/bccd_ds_mbnet photo.jpg --draw found\n"
        "  dsnet detect predict runs/bccd_ds_mbnet photos --score 0.5 --out boxes.jsonl\n"
        "  dsnet detect predict runs/bccd_ds_mbnet photos --route 0 --json | jq '.boxes | length'",
    )
    parser.add_run("dsnet detect train")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a file, a folder, or a pattern in quotes")
    parser.add_argument("--route", type=int, metavar="N", help="every image at this route")
    parser.add_argument("--score", type=float, default=0.3, help="least probability of a box (default: 0.3)")
    parser.add_argument(
        "--draw",
        type=Path,
        metavar="DIR",
        help="images with their boxes, into this folder; folders inside stay",
    )
    parser.add_json("print JSON, one object per line, as results come")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write these lines to a file")
    parser.add_flag("--force", "replace existing files")
    parser.add_batch(16)
    parser.add_device()
