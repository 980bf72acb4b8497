"""``dsnet demo``: the whole story on digits, from training to a budget, and a report to look at."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser, positive

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "demo",
        "dsnet.cli.demo",
        help="train, route and evaluate a small network on digits, and write a report",
        description="The whole story in about a minute on two cores, on the digits of scikit-learn: Stage I\n"
        "(one supernet, all routes), exact batch-norm statistics, stand-alone networks to compare with,\n"
        "Stage II (its gate), calibration for budgets, evaluation on test images, and measured time.\n"
        "Writes one HTML file with pictures, and test images as PNG files for `dsnet predict`. Nothing is\n"
        "downloaded, nothing is opened.",
    )
    parser.add_argument("--out", type=Path, default=Path("dsnet-demo"), help="folder (default: dsnet-demo)")
    parser.add_argument("--epochs", type=positive, default=16, help="of Stage I (default: 16)")
