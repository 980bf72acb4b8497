"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from dsnet.data import SETS
from dsnet.errors import DsnetError

__all__ = ["add_run_arguments", "image_size", "parse_settings", "positive"]


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """``["norm=group", "num_classes=10"]`` → ``{"norm": "group", "num_classes": 10}``."""
    parsed = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.isidentifier():
            raise DsnetError(f"--set takes key=value, not {setting!r}")
        if key in ("name", "device", "dtype", "generator"):
            raise DsnetError(f"{key} is no model option; here --set takes what `dsnet models --json` lists")
        try:
            parsed[key] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            parsed[key] = text
    return parsed


def image_size(text: str) -> int | tuple[int, int]:
    """``224`` or ``224x192`` (height × width), for argparse."""
    sides = tuple(map(positive, text.split("x")))
    if len(sides) == 1:
        return sides[0]
    height, width = sides
    return height, width


image_size.__name__ = "image size"


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    number = int(text)
    if not 1 <= number <= 2**31:
        raise ValueError(text)
    return number


positive.__name__ = "positive number"  # what argparse calls it in an error


def add_run_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """A run's folder, which of its checkpoints, and the data of a split."""
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="folder of a run, as `save_checkpoint` makes it"
    )
    parser.add_argument("--name", default="last", help="which of its checkpoints (default: last)")
    parser.add_argument(
        "--data",
        required=True,
        help=f"{', '.join(SETS)}, or a folder with {split}/CLASS/*.jpg; the {split} split is used",
    )
    parser.add_argument("--batch", type=positive, default=256, help="images at a time (default: 256)")
