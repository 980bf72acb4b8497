"""``dsnet evaluate``: accuracy of every route of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser, add_run_arguments, positive

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "evaluate",
        "dsnet.cli.evaluate",
        help="accuracy, multiply-adds and parameters of every route of a checkpoint",
        description="Runs the test split through every route of a checkpoint's network and shows what each\n"
        "reaches and costs. Where there are many routes, an evenly spaced sample of them. With --routed:\n"
        "the calibrated routers at some budgets, beside the best single route within the same budget,\n"
        "stand-alone networks, a random router and an oracle; and whether routing pays here.",
        epilog="Examples:\n"
        "  dsnet evaluate runs/digits_mbnet\n"
        "  dsnet evaluate runs/mine --data cifar10 --csv routes.csv --plot routes.svg\n"
        "  dsnet evaluate runs/mine --routed --budget 45% --budget 300M --plot routers.html\n"
        "  dsnet evaluate runs/mine --routed --alone runs/route0 --alone runs/route13",
    )
    add_run_arguments(parser, "test")
    parser.add_argument("--routes", type=positive, default=32, help="at most so many (default: 32)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--csv", type=Path, help="also as a table in this file")
    parser.add_argument("--plot", type=Path, help="also as a picture, accuracy against cost (.svg or .html)")
    parser.add_argument("--routed", action="store_true", help="the routers of a calibrated run")
    parser.add_argument(
        "--budget", action="append", help="with --routed: mean cost, 300M, 45%%, 5ms; may be repeated"
    )
    parser.add_argument(
        "--alone", action="append", type=Path, metavar="RUN", help="with --routed: a route trained alone"
    )
