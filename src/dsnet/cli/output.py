"""What commands write: JSON on stdout, and files that the arguments name."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

from dsnet.core.files import write_output
from dsnet.core.run_lock import locked_outputs
from dsnet.errors import DsnetError, shorten
from dsnet.report.page import page
from dsnet.report.plot import Chart

__all__ = ["print_json", "write_chart", "writes_files"]

Command = Callable[[argparse.Namespace], int]


def writes_files(*options: str, folder: str | None = None) -> Callable[[Command], Command]:
    """Check the output files of a command before it starts, and lock the runs that contain them.

    Args:
        options: Options that name a file to write; ``plot`` must name an .svg or .html file.
        folder: Option that names a folder to write into.
    """

    def wrap(command: Command) -> Command:
        @functools.wraps(command)
        def run(args: argparse.Namespace) -> int:
            for option in options:
                _check_output(getattr(args, option), option)
            with locked_outputs(*(getattr(args, name) for name in (*options, folder) if name is not None)):
                return command(args)

        return run

    return wrap


def _check_output(path: Path | None, option: str) -> None:
    if path is None:
        return
    if option == "plot" and path.suffix not in (".svg", ".html"):
        raise DsnetError(f"--plot writes .svg or .html, not {shorten(path.name)}")
    if path.is_dir() or not path.parent.is_dir():
        raise DsnetError(f"--{option} takes a file in an existing folder, not {path}")


def print_json(data: object) -> None:
    """Print plain data as JSON."""
    print(json.dumps(data, indent=2, allow_nan=False))


def write_chart(path: Path, title: str, chart: Chart, html: Callable[[], str] | None = None) -> None:
    """Write a chart as .svg or, in a page, as .html (``html``: returns a page with more than the chart)."""
    if path.suffix == ".svg":
        write_output(path, chart.svg(title))
    else:
        write_output(path, html() if html else page(title, chart.html()))
