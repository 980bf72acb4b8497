"""The parser of the whole command line, one file a command; what runs a command is imported when it runs."""

from __future__ import annotations

import argparse

import dsnet
from dsnet.cli.parsers import (
    bench,
    calibrate,
    demo,
    describe,
    detect,
    evaluate,
    gate,
    models,
    predict,
    profile,
    recalibrate,
    recipes,
    train,
    transfer,
)
from dsnet.cli.parsers.common import Parser, add_import_argument

__all__ = ["build_parser"]

_INTRO = """\
dsnet: dynamic weight slicing. One supernet holds one set of weights; a route says how much of every
layer runs; gates look at each image and pick its route, so easy images cost little.

First steps:
  dsnet models                       what there is
  dsnet describe ds_mbnet            a network's routes, with widths, multiply-adds and parameters
  dsnet train digits_mbnet           train one in half a minute, on two cores
  dsnet train --data photos          or on your own pictures, one folder a class
  dsnet demo                         the whole story on digits, with a report to look at
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="dsnet",
        description=_INTRO,
        epilog="`dsnet COMMAND --help` explains a command and gives examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsnet {dsnet.__version__}")
    add_import_argument(parser, "import_before")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    steps = (
        models,
        describe,
        recipes,
        train,
        transfer,
        recalibrate,
        gate,
        calibrate,
        evaluate,
        predict,
        detect,
        profile,
        bench,
        demo,
    )
    for module in steps:
        module.add_command(commands)
    return parser
