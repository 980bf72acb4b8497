"""Progress as lines, also where output is piped: a stage begins, how far it is, and that it has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["StageLog"]

T = TypeVar("T")

EVERY = 10.0  # seconds between two lines of a stage


class StageLog:
    """Passes items on and prints lines to stderr, each with the time since this was made."""

    def __init__(self) -> None:
        self.begun = time.monotonic()

    def __call__(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """A stage of so many items; total 0: nobody knows."""
        begun = told = time.monotonic()
        of, done = f" of {total}" if total else "", 0
        self._line(f"{label}: {total or 'some'} to do")
        for done, item in enumerate(items, 1):
            yield item
            now = time.monotonic()
            if now - told >= EVERY and done != total:
                told = now
                left = (
                    f", about {written_seconds((now - begun) / done * (total - done))} left" if total else ""
                )
                self._line(f"{label} {done}{of}{left}")
        self._line(f"{label}: {done}{of} done in {written_seconds(time.monotonic() - begun)}")

    def _line(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", file=sys.stderr, flush=True)


def written_seconds(seconds: float) -> str:
    """``42 s`` or ``3.5 min``."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
