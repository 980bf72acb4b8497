"""The parser of the whole command line; the module that runs a command is imported when it runs.

Each function that describes a command takes its parser and adds the arguments. The function's name is the
command's, and its docstring the command's help. Nothing here imports torch.
"""

from __future__ import annotations

import argparse

import dsnet
from dsnet.cli.parsers import detect, listing, routing, timing, training
from dsnet.cli.parsers.common import Commands, Parser

__all__ = ["build_parser"]

_INTRODUCTION = """\
dsnet: dynamic weight slicing. One supernet holds one set of weights; a route says how much of every
layer runs; gates look at each image and pick its route, so easy images cost little.

First steps:
  dsnet models                       list the networks
  dsnet describe ds_mbnet            show a network's routes, with widths, multiply-adds and parameters
  dsnet train digits_mbnet           train one in half a minute, on two cores
  dsnet train --data photos          or on your own images, one folder per class
  dsnet train --data photos --model timm:resnet18      or start from a pretrained network
  dsnet demo                         route images by a trained network, with a report to look at
"""
_COMMANDS: Commands = {
    listing.models: "dsnet.cli.models:run",
    listing.describe: "dsnet.cli.describe:run",
    listing.recipes: "dsnet.cli.recipes:run",
    listing.weights: "dsnet.cli.weights:run",
    training.train: "dsnet.cli.train:run",
    training.convert: "dsnet.cli.convert:run",
    training.transfer: "dsnet.cli.transfer:run",
    training.recalibrate: "dsnet.cli.recalibrate:run",
    training.gate: "dsnet.cli.gate:run",
    routing.calibrate: "dsnet.cli.calibrate:run",
    routing.evaluate: "dsnet.cli.evaluate:run",
    routing.predict: "dsnet.cli.predict:run",
    detect.detect: None,
    timing.profile: "dsnet.cli.profile:run",
    timing.bench: "dsnet.cli.bench:run",
    training.demo: "dsnet.cli.demo:run",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = Parser(
        prog="dsnet",
        description=_INTRODUCTION,
        epilog="`dsnet COMMAND --help` explains a command and gives examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsnet {dsnet.__version__}")
    parser.add_import("import_before")
    parser.add_commands(_COMMANDS, title="commands", metavar="COMMAND")
    return parser
