"""The command line: `parsers` describes the commands, and a module for each runs it."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dsnet.cli.crash_report import report_internal
from dsnet.cli.parsers import build_parser
from dsnet.cli.progress import CLEAR
from dsnet.cli.user_modules import import_modules
from dsnet.core.interrupt import stopped_status, terminable
from dsnet.errors import DsnetError, DsnetWarning, printable

__all__ = ["build_parser", "main"]

MAX_MESSAGE = 4000  # characters


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success; 1: a file could not be read or written; 2: the request is not possible; 70: an unexpected
    error, whose traceback is saved; 75: another process of the run was lost; 130: Ctrl-C; 143: SIGTERM.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × still gets the table
    try:
        args = build_parser().parse_args(argv)
        with _plain_warnings(), terminable(), _user_modules(args):
            status: int = args.run_command(args)
    except DsnetError as error:
        print(f"dsnet: {printable(str(error), MAX_MESSAGE)}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"dsnet: {printable(str(error), MAX_MESSAGE)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        print("dsnet: stopped", file=sys.stderr)
        return stopped_status(stopped)
    except Exception as error:
        return report_internal(error)
    return status


@contextmanager
def _user_modules(args: argparse.Namespace) -> Iterator[None]:
    """Import the user's modules; note whether they or the calling program set the number of threads.

    The calling program gets its number of threads back.
    """
    called_by_program = "torch" in sys.modules
    modules = [*args.import_before, *args.import_after]
    if not called_by_program and not (modules and "threads" in args):
        args.keep_threads = False
        import_modules(modules)
        yield
        return
    import torch

    before = torch.get_num_threads()
    import_modules(modules)
    args.keep_threads = called_by_program or torch.get_num_threads() != before
    try:
        yield
    finally:
        if called_by_program and torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings of this package as plain lines, without a file and a line of code."""
    default = warnings.formatwarning

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if not issubclass(category, DsnetWarning):
            return default(message, category, filename, lineno, line)
        return f"{CLEAR if sys.stderr.isatty() else ''}warning: {printable(str(message), MAX_MESSAGE)}\n"

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = default
