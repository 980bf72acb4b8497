"""Arguments that several commands take."""

from __future__ import annotations

import ast
from typing import Any

from dsnet.errors import DsnetError

__all__ = ["image_size", "parse_settings", "positive"]


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
