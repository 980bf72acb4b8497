"""Ctrl-C and SIGTERM, as a request to stop after the current step or as an exception."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "Terminated", "stop_on_signals", "stopped_status", "terminable"]


class StopRequest:
    """The signal that requested to stop, if any."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, as KeyboardInterrupt on Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, which otherwise ends the process without cleaning up."""
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
def stop_on_signals(notify: Callable[[str], None] = lambda message: None) -> Iterator[StopRequest]:
    """Record the first SIGINT or SIGTERM as a request; the next one has its usual effect."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def record(number: int, frame: FrameType | None) -> None:
        request.signal = number
        restore()
        notify("stopping after this step, then saving; once more stops at once, without saving")

    for number in before:
        signal.signal(number, record)
    try:
        yield request
    finally:
        restore()
