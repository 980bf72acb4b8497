"""``dsnet predict``: classes of image files, every image at its route."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser, positive

__all__ = ["add_predict"]


def add_predict(commands: Commands) -> None:
    """Add ``dsnet predict``."""
    parser = add_parser(
        commands,
        "predict",
        "dsnet.cli.predict",
        help="classes of image files, every image at its own route",
        description="Says what images show, at which route, and what that cost. Who picks the route:\n"
        "  --budget 45%     the routers of a calibrated run (`dsnet calibrate`), for this mean cost\n"
        "  --route N        nobody: every image runs at route N; works for any run\n"
        "  neither          the gates by their own decision, once `dsnet gate` has trained them\n"
        "Images are resized and normalised as the run's test split. One that cannot be read, or whose\n"
        "logits are not finite, is reported; the others go on, and the exit status is 1. In JSON its line\n"
        'is {"path": …, "error": …}.',
        epilog="Examples:\n"
        "  dsnet predict runs/digits_mbnet seven.png\n"
        "  dsnet predict runs/mine photos --budget 45%                    a folder and those in it\n"
        "  dsnet predict runs/mine 'photos/**/*.jpg' --budget 300M --router cascade --trace\n"
        "  dsnet predict runs/mine photos --route 0 --top 5               the cheapest route, five guesses\n"
        "  dsnet predict runs/mine photos --budget 5ms --out found.jsonl  written as results come\n"
        "  dsnet predict runs/mine photos --budget 45% --json | jq -r 'select(.probability < 0.5).path'",
    )
    parser.add_run()
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="a file, a folder, or a pattern in quotes ('a/**/*.png')"
    )
    parser.add_argument("--budget", help="mean cost of an image: 300M, 45%% (of the largest route), 5ms")
    parser.add_argument(
        "--router",
        metavar="NAME",
        help="who keeps the budget; single: one route for all images (default: auto, the most accurate one)",
    )
    parser.add_argument("--route", type=int, metavar="N", help="every image at this route")
    parser.add_flag("--trace", "also show all routes that ran, in order")
    parser.add_argument(
        "--top", type=positive, default=1, metavar="K", help="the K most probable classes (default: 1)"
    )
    parser.add_json("print JSON, one object per line, as results come")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write these lines to a file")
    parser.add_flag("--force", "with --out: replace an existing file")
    parser.add_batch(64)
    parser.add_checkpoint()
    parser.add_device()
