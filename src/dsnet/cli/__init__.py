"""The command line: one thin file a command."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import dsnet
from dsnet.cli import (
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
from dsnet.cli.live import CLEARED
from dsnet.errors import DsnetError, DsnetWarning

__all__ = ["build_parser", "main"]

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
    parser = argparse.ArgumentParser(
        prog="dsnet",
        description=_INTRO,
        epilog="`dsnet COMMAND --help` explains a command and gives examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsnet {dsnet.__version__}")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status: 0, or 2 where something was asked for that cannot be done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × still gets the table
    try:
        args = build_parser().parse_args(argv)
        with _plain_warnings():
            status: int = args.run_command(args)
    except DsnetError as error:
        print(f"dsnet: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"dsnet: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dsnet: stopped", file=sys.stderr)
        return 130
    return status


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Meanwhile our own warnings are lines like all others, without a file and a line of code."""
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if not issubclass(category, DsnetWarning):
            return before(message, category, filename, lineno, line)
        return f"{CLEARED if sys.stderr.isatty() else ''}warning: {message}\n"

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before
