"""``dsnet calibrate`` and ``evaluate``: routers that keep a budget, and what they reach."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser, positive

__all__ = ["add_calibrate", "add_evaluate"]


def add_calibrate(commands: Commands) -> None:
    """Add ``dsnet calibrate``."""
    parser = add_parser(
        commands,
        "calibrate",
        "dsnet.cli.calibrate",
        help="find the settings of gate and cascade that keep a budget",
        description="Runs held-out images through the network once and finds, for every mean cost, the\n"
        "gate's cost weight and the cascade's thresholds. Saved with the checkpoint: any budget then works\n"
        "without training again (`--budget` of evaluate and predict, `Routed.at`).",
        epilog="Examples:\n"
        "  dsnet calibrate runs/digits_mbnet --sweep\n"
        "  dsnet calibrate runs/mine --target-madds 300M\n"
        "  dsnet profile runs/mine --out t.json && dsnet calibrate runs/mine --latency-table t.json "
        "--target-ms 5\n"
        "A table of a plan (`dsnet profile --backend …`) counts the time of that plan: measure the backend\n"
        "that will serve.",
    )
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
    parser.add_argument(
        "--router",
        metavar="NAME",
        default="auto",
        help="single: one route for all images; auto: the most accurate one at the budget (default: auto)",
    )
    parser.add_device()
    parser.add_json()


def add_evaluate(commands: Commands) -> None:
    """Add ``dsnet evaluate``."""
    parser = add_parser(
        commands,
        "evaluate",
        "dsnet.cli.evaluate",
        help="accuracy, multiply-adds and parameters of every route of a checkpoint",
        description="Runs the test split through every route of a checkpoint's network and shows their\n"
        "accuracy and cost; of many routes, an evenly spaced sample. With --routed: the calibrated routers\n"
        "at some budgets, beside the best single route within the same budget, stand-alone networks, a\n"
        "random router and an oracle; and whether routing pays here.",
        epilog="Examples:\n"
        "  dsnet evaluate runs/digits_mbnet\n"
        "  dsnet evaluate runs/mine --data cifar10 --csv routes.csv --plot routes.svg\n"
        "  dsnet evaluate runs/mine --routed --budget 45% --budget 300M --plot routers.html\n"
        "  dsnet evaluate runs/mine --routed --alone runs/route0 --alone runs/route13",
    )
    parser.add_run()
    parser.add_checkpoint()
    parser.add_data("test")
    parser.add_batch(256)
    parser.add_device()
    parser.add_argument("--routes", type=positive, default=32, help="at most so many (default: 32)")
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
