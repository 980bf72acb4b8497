"""A progress line on the terminal, and nothing where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["progress"]

T = TypeVar("T")


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Passes the items on and shows how many have gone by, a few times a second; total 0: nobody knows."""
    shown = 0.0
    live = sys.stderr.isatty()
    for done, item in enumerate(items, 1):
        yield item
        if live and (time.monotonic() - shown > 0.2 or done == total):
            shown = time.monotonic()
            of = f"/{total}" if total else ""
            print(f"\r{label} {done}{of}", end="", file=sys.stderr, flush=True)
    if live:
        print(file=sys.stderr)
