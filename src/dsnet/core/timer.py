"""Timing of calls, progress callbacks, and time limits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from dsnet.errors import DsnetError, shorten

__all__ = [
    "Progress",
    "TimeLimit",
    "TimeUpError",
    "logged",
    "silent",
    "time_interleaved",
    "timed",
    "timed_on_device",
]

LOG = logging.getLogger("dsnet.runtime")
EVERY = 5.0  # seconds between two lines on the same operation
K = TypeVar("K", bound=Hashable)

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""Function of (items, their number, a label) that yields the items and shows how many are done."""


def silent(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
    """Show nothing."""
    return items


def logged(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
    """Log the number of items done, at level INFO of the logger ``dsnet.runtime``, every five seconds."""
    start = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last > EVERY or done == total:
            last = now
            LOG.info("%s %d of %d, %.0f s", label, done, total, now - start)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call by the host's clock, until the device is done."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def timed_on_device(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call by the clock of a CUDA device; launching on an idle device counts."""
    if device.type != "cuda":
        return timed(call, device)
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    start.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end))


@torch.no_grad()
def time_interleaved(
    calls: Mapping[K, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    warm_up: int,
    clock: Callable[[Callable[[], object], torch.device], float] = timed,
    progress: Progress = silent,
    label: str = "round",
    stop: Callable[[], bool] = lambda: False,
) -> dict[K, list[float]]:
    """Time calls in turn, round after round, so that a slow moment of the machine affects all of them.

    Args:
        calls: Functions without arguments, by any key.
        device: Where they run.
        rounds: Times per call.
        warm_up: Rounds before these, which do not count.
        clock: Function that times one call.
        progress: Progress callback for the rounds.
        label: What it says beside their number.
        stop: Function that returns whether to end early; one round is measured even then.

    Returns:
        The milliseconds of every call, one per round.
    """
    samples: dict[K, list[float]] = {key: [] for key in calls}
    for number in progress(range(warm_up + rounds), warm_up + rounds, label):
        counts = number >= warm_up or stop()
        for key, call in calls.items():
            milliseconds = clock(call, device)
            if counts:
                samples[key].append(milliseconds)
        if counts and stop():
            break
    return samples


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
