"""A time limit for an operation of many steps, which ends between two of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from dsnet.core.timer import Progress
from dsnet.errors import DsnetError, shorten

__all__ = ["TimeLimit", "TimeUpError"]


class TimeUpError(Exception):
    """The time is up."""


class TimeLimit:
    """A time limit that starts now.

    Args:
        seconds: The limit (None: no limit).
    """

    def __init__(self, seconds: float | None) -> None:
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and seconds > 0):
            raise DsnetError(f"a time limit is a number of seconds above 0, not {shorten(seconds)}")
        self.seconds = seconds
        self.begin = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.used >= 1

    @property
    def used(self) -> float:
        """The share of the time that has passed."""
        return 0.0 if self.seconds is None else (time.monotonic() - self.begin) / self.seconds

    def checked(self, progress: Progress) -> Progress:
        """Return the same progress, which raises `TimeUpError` before the next item if the time is up."""

        def limited(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
            for item in progress(items, total, label):
                if self.over:
                    raise TimeUpError
                yield item

        return limited
