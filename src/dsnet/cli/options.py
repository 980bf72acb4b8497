"""Arguments that several commands take."""

from __future__ import annotations

import ast
from typing import Any

from dsnet.errors import DsnetError

__all__ = ["parse_settings", "positive"]


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """``["norm=group", "num_classes=10"]`` → ``{"norm": "group", "num_classes": 10}``."""
    parsed = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.isidentifier():
            raise DsnetError(f"--set takes key=value, not {setting!r}")
        try:
            parsed[key] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            parsed[key] = text
    return parsed


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


positive.__name__ = "positive number"  # what argparse calls it in an error
