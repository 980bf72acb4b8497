"""The parser of the whole command line; the module that runs a command is imported when it runs."""

from __future__ import annotations

import argparse

import dsnet
from dsnet.cli.parsers import detect, listing, predict, routing, timing, training
from dsnet.cli.parsers.common import Parser

__all__ = ["build_parser"]

_INTRO = """\
dsnet: dynamic weight slicing. One supernet holds one set of weights; a route says how much of every
layer runs; gates look at each image and pick its route, so easy images cost little.

First steps:
  dsnet models                       list the networks
  dsnet describe ds_mbnet            show a network's routes, with widths, multiply-adds and parameters
  dsnet train digits_mbnet           train one in half a minute, on two cores
  dsnet train --data photos          or on your own images, one folder per class
  dsnet demo                         all steps on digits, with a report to look at
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = Parser(
        prog="dsnet",
        description=_INTRO,
        epilog="`dsnet COMMAND --help` explains a command and gives examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsnet {dsnet.__version__}")
    parser.add_import("import_before")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in (
        listing.add_models,
        listing.add_describe,
        listing.add_recipes,
        training.add_train,
        training.add_transfer,
        training.add_recalibrate,
        training.add_gate,
        routing.add_calibrate,
        routing.add_evaluate,
        predict.add_predict,
        detect.add_detect,
        timing.add_profile,
        timing.add_bench,
        training.add_demo,
    ):
        add_command(commands)
    return parser
