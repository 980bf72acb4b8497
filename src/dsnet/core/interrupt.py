"""Ctrl-C and SIGTERM: as a request to stop after the step under way, or at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "Terminated", "stop_on_signals", "stopped_status", "terminable"]


class StopRequest:
    """Which signal asked to stop, if any."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it ends what runs as Ctrl-C does."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, which ends a process without a word otherwise."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stopped_status(stopped: KeyboardInterrupt) -> int:
    """Return the exit status of a command that Ctrl-C (130) or SIGTERM (143) stopped."""
    return 128 + (signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT)


@contextmanager
def stop_on_signals(told: Callable[[str], None] = lambda message: None) -> Iterator[StopRequest]:
    """While inside, the first SIGINT or SIGTERM is noted; the next one acts as it always does."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield request
        return
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in watched}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        for each in watched:
            signal.signal(each, before[each])
        told("stopping after this step, then saving; once more stops at once, without saving")

    for number in watched:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number in watched:
            signal.signal(number, before[number])
