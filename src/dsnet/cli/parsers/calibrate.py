"""``dsnet calibrate``: routers that keep a budget, from one pass over held-out images."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import ROUTERS, Commands, add_parser

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "calibrate",
        "dsnet.cli.calibrate",
        help="find the settings of gate and cascade that keep a budget",
        description="Runs held-out images through the network once and finds, for every mean cost, the\n"
        "gate's weight of cost and the cascade's thresholds. Saved with the checkpoint: any budget then\n"
        "works without training again (`--budget` of evaluate and predict, `Routed.at`).",
        epilog="Examples:\n"
        "  dsnet calibrate runs/digits_mbnet --sweep\n"
        "  dsnet calibrate runs/mine --target-madds 300M\n"
        "  dsnet profile runs/mine --out t.json && dsnet calibrate runs/mine --latency-table t.json "
        "--target-ms 5\n"
        "A table of a plan (`dsnet profile --backend …`) counts what that plan takes: measure what you\n"
        "will serve with.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, as `dsnet train` makes it")
    parser.add_argument("--name", help="which of its checkpoints (default: gated, else final)")
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--target-madds", metavar="COST", help="mean multiply-adds an image: 300M, 1.2B, 45%%"
    )
    wanted.add_argument("--target-ms", metavar="MS", help="mean milliseconds an image; needs --latency-table")
    wanted.add_argument("--sweep", action="store_true", help="show the whole curve (default)")
    parser.add_argument(
        "--latency-table",
        type=Path,
        metavar="FILE",
        help="count milliseconds of this table, of whichever backend; its smallest batch size",
    )
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        default="auto",
        help="which one; single: one route for all images; auto: the most accurate one at the budget "
        "(default: auto)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--json", action="store_true", help="as JSON")
