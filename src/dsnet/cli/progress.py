"""Progress of what takes a while: a line that moves on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["CLEARED", "LOG_SECONDS", "clock", "progress"]

CLEARED = "\r\033[2K"  # takes away the line that moves
LOG_SECONDS = 15.0  # between lines where stderr is no terminal

T = TypeVar("T")


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Passes the items on and shows how many have gone by; ``total`` 0: it is not known.

    On a terminal a few times a second, in a log every `LOG_SECONDS`, with the time that is left.
    """
    live = sys.stderr.isatty()
    begun = shown = time.monotonic()
    if live:
        shown = 0.0
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        of = f"/{total}" if total else ""
        if live and (now - shown > 0.2 or done == total):
            shown = now
            print(f"\r{label} {done}{of}", end="", file=sys.stderr, flush=True)
        elif not live and now - shown >= LOG_SECONDS and done != total:
            shown = now
            left = f", {clock((now - begun) / done * (total - done))} left" if total else ""
            print(f"{label} {done}{of}{left}", file=sys.stderr, flush=True)
    if live:
        print(file=sys.stderr)


def clock(seconds: float) -> str:
    """A duration as 0:05, 12:30 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
