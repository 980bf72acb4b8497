"""``dsnet calibrate``, ``evaluate`` and ``predict``."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Parser, positive

__all__ = ["calibrate", "evaluate", "predict"]


def calibrate(parser: Parser) -> None:
    """Find the settings of gate and cascade that keep a budget.

    Runs held-out images through the network once and finds, for every mean cost, the gate's cost weight and
    the cascade's thresholds. Saved with the checkpoint: any budget then works without training again
    (`--budget` of evaluate and predict, `Routed.at`).

    Examples:
      dsnet calibrate runs/digits_mbnet --sweep
      dsnet calibrate runs/mine --target-madds 300M
      dsnet profile runs/mine --out t.json && dsnet calibrate runs/mine --latency-table t.json --target-ms 5
    A table of a plan (`dsnet profile --backend …`) counts the time of that plan: measure the backend that
    will serve.
    """
    parser.add_run()
    parser.add_checkpoint("gated, else final")
    target = parser.add_mutually_exclusive_group()
    text = "mean multiply-adds of an image: 300M, 1.2B, 45%%"
    target.add_argument("--target-madds", metavar="COST", help=text)
    text = "mean milliseconds of an image; needs --latency-table"
    target.add_argument("--target-ms", metavar="MS", help=text)
    target.add_argument("--sweep", action="store_true", help="show the whole curve (default)")
    text = "count the milliseconds of this table, at its smallest batch size (default: multiply-adds)"
    parser.add_argument("--latency-table", type=Path, metavar="FILE", help=text)
    text = "single: one route for all images; auto: the most accurate one at the budget (default: auto)"
    parser.add_argument("--router", metavar="NAME", default="auto", help=text)
    parser.add_device()
    parser.add_json()


def evaluate(parser: Parser) -> None:
    """Show accuracy, multiply-adds and parameters of every route of a checkpoint.

    Runs the test split through every route of a checkpoint's network and shows their accuracy and cost; of
    many routes, an evenly spaced sample. With --routed: the calibrated routers at some budgets, beside the
    best single route within the same budget, stand-alone networks, a random router and an oracle; and
    whether routing pays here.

    Examples:
      dsnet evaluate runs/digits_mbnet
      dsnet evaluate runs/mine --data cifar10 --csv routes.csv --plot routes.svg
      dsnet evaluate runs/mine --routed --budget 45% --budget 300M --plot routers.html
      dsnet evaluate runs/mine --routed --alone runs/route0 --alone runs/route13
    """
    parser.add_run()
    parser.add_checkpoint()
    parser.add_data("test")
    parser.add_batch(256)
    parser.add_device()
    text = "maximum number of routes to show (default: 32)"
    parser.add_argument("--routes", type=positive, default=32, help=text)
    parser.add_json()
    parser.add_argument("--csv", type=Path, help="also write a table to this file")
    parser.add_argument("--plot", type=Path, help="also plot accuracy against cost (.svg or .html)")
    parser.add_flag("--routed", "evaluate the routers of a calibrated run")
    text = "with --routed: mean cost, 300M, 45%%, 5ms; may be repeated"
    parser.add_argument("--budget", action="append", help=text)
    text = "with --routed: only this router (default: all that are calibrated)"
    parser.add_argument("--router", metavar="NAME", help=text)
    text = "with --routed: a run of one route trained alone; may be repeated"
    parser.add_argument("--alone", action="append", type=Path, metavar="RUN", help=text)


def predict(parser: Parser) -> None:
    """Show the classes of image files, every image at its own route.

    Shows the class of every image, the route that it took, and the cost of that. What picks the route:
      --budget 45%     the routers of a calibrated run (`dsnet calibrate`), for this mean cost
      --route N        route N for every image; works for any run
      neither          the gates by their own decision, once `dsnet gate` has trained them
    Images are resized and normalised as the run's test split. An image that cannot be read, or whose logits
    are not finite, is reported; the others are still processed, and the exit status is 1. In JSON its line
    is {"path": …, "error": …}.

    Examples:
      dsnet predict runs/digits_mbnet seven.png
      dsnet predict runs/mine photos --budget 45%                    a folder and those in it
      dsnet predict runs/mine 'photos/**/*.jpg' --budget 300M --router cascade --trace
      dsnet predict runs/mine photos --route 0 --top 5               the cheapest route, five guesses
      dsnet predict runs/mine photos --budget 5ms --out found.jsonl  written as results come
      dsnet predict runs/mine photos --budget 45% --json | jq -r 'select(.probability < 0.5).path'
    """
    parser.add_run()
    text = "a file, a folder, or a pattern in quotes ('a/**/*.png')"
    parser.add_argument("images", nargs="+", metavar="IMAGE", help=text)
    parser.add_argument("--budget", help="mean cost of an image: 300M, 45%% (of the largest route), 5ms")
    text = "router for the budget; single: one route for all images (default: auto, the most accurate one)"
    parser.add_argument("--router", metavar="NAME", help=text)
    parser.add_argument("--route", type=int, metavar="N", help="every image at this route")
    parser.add_flag("--trace", "also show all routes that ran, in order")
    text = "the K most probable classes (default: 1)"
    parser.add_argument("--top", type=positive, default=1, metavar="K", help=text)
    parser.add_json("print JSON, one object per line, as results come")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write these lines to a file")
    parser.add_flag("--force", "with --out: replace an existing file")
    parser.add_batch(64)
    parser.add_checkpoint()
    parser.add_device()
    parser.add_plan_backend()
