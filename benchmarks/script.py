"""What the scripts of this folder share: their arguments, results of earlier calls, tables and JSON files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import KINDS
from benchmarks.timing import write_json


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a script, with ``--json``; ``description`` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")


def earlier_runs(path: Path | None) -> list[dict[str, Any]]:
    """Return the runs that an earlier call wrote to this file."""
    if path is None or not path.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return runs


def report(data: Mapping[str, Any], path: Path | None) -> None:
    """Print figures as the table that the documentation has of them; write them to a JSON file if given."""
    if path is not None:
        write_json(path, data)
    print("\n" + KINDS[data["benchmark"]](data["benchmark"], data), flush=True)
