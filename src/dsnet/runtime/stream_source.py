"""A source of batches read in a thread of its own, so that waiting for it can end.

The thread reads only while a group of batches is being collected, and not ahead of that, as if there were no
thread: how far a source has been read follows from how many groups were taken.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

import torch

__all__ = ["Ready", "Source"]

T = TypeVar("T")

GRACE = 2e-3  # seconds that a source has to complete a group although an older one is due
QUICK = 2e-3  # seconds in which most sources do, so that nobody is woken before
JOIN = 1.0  # seconds that closing waits for a source that is about to give its next batch


class Ready(Enum):
    """Why waiting has ended."""

    GROUP = auto()  # a group is complete, or has waited long enough, or is the last
    DUE = auto()  # the time that was given is up, and there is no group yet
    END = auto()  # there is nothing more


class Source(Generic[T]):
    """Items of an iterator, in groups that end when they are large or their first item has waited long.

    ``size`` says how much an item counts; a group ends with ``enough`` of that or more, with ``most`` items,
    or ``seconds`` after its first item came in. An exception of the iterator, whatever it is, ends the items
    and is kept in ``failure``. Items that never keep anyone waiting (``blocks=False``) are read without a
    thread.
    """

    def __init__(
        self,
        items: Iterator[T],
        *,
        size: Callable[[T], int],
        enough: int,
        most: int,
        seconds: float,
        blocks: bool = True,
    ) -> None:
        self.items, self.size, self.enough, self.most, self.seconds = items, size, enough, most, seconds
        self.blocks = blocks
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._arrived: list[T] = []
        self._since = 0.0  # when the first of them came in, as time.monotonic()
        self._counted = 0
        self._wanted = self._closed = self._ended = False
        self._idle = False  # whether whoever waits has to be woken by a first item, for its time runs
        self._thread: threading.Thread | None = None

    def wait(self, due: float | None = None) -> Ready:
        """Wait for a group, or until the time ``due`` (as `time.monotonic`)."""
        if not self.blocks:
            self._read_at_once()
            return Ready.GROUP if self._arrived else Ready.END
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=contextvars.copy_context().run,
                    args=(self._read, _Surroundings.of_this_thread()),
                    name="dsnet stream",
                    daemon=True,  # a source may block for ever
                )
                self._thread.start()
            if not self._complete():
                self._wanted = True
                self._changed.notify_all()
            now = time.monotonic()
            due = None if due is None else max(due, now + GRACE)
            quick = now + QUICK
            while not self._complete():
                if self._ended:
                    return Ready.GROUP if self._arrived else Ready.END
                now = time.monotonic()
                late = self._since + self.seconds if self._arrived else None
                if late is not None and now >= late:
                    return Ready.GROUP
                if due is not None and now >= due:
                    return Ready.DUE
                limits = [limit for limit in (late, due) if limit is not None]
                self._idle = late is None and now >= quick
                if late is None and not self._idle:
                    limits.append(quick)
                self._changed.wait(min(limits) - now if limits else None)
            return Ready.GROUP

    def take(self) -> tuple[list[T], float]:
        """All items that there are, and when the first of them came in."""
        with self._changed:
            arrived, self._arrived, self._counted = self._arrived, [], 0
            self._wanted = False
            return arrived, self._since

    def close(self) -> None:
        """End the thread. One that waits for its source ends when that gives its next item."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN)

    def _complete(self) -> bool:
        return self._counted >= self.enough or len(self._arrived) >= self.most

    def _read_at_once(self) -> None:
        """Read the source directly, for lists and tuples, which cannot block."""
        self._since = time.monotonic()
        try:
            while not (self._ended or self._complete()):
                item = next(self.items)
                self._arrived.append(item)
                self._counted += self.size(item)
        except StopIteration:
            self._ended = True
        except BaseException as error:
            self.failure, self._ended = error, True

    # --- the thread ------------------------------------------------------------------------------------
    def _read(self, surroundings: _Surroundings) -> None:
        with surroundings.same():
            while self._asked():
                self._read_on()

    def _read_on(self) -> None:
        """As far as wanted, or to the end."""
        ended = True
        try:
            while self._wanted and not self._complete():
                self._arrive(next(self.items))
            ended = False
        except StopIteration:
            pass
        except BaseException as error:  # raised again by whoever takes the items
            self.failure = error
        if ended or self._closed:
            self.items = iter(())  # a generator is closed by the thread that ran it
            with self._changed:
                self._ended, self._wanted = True, False
                self._changed.notify_all()

    def _asked(self) -> bool:
        """Wait until items are wanted; not, if there is nothing more to read."""
        with self._changed:
            while not (self._ended or self._closed or (self._wanted and not self._complete())):
                self._changed.wait()
            self._ended = self._ended or self._closed
            if self._ended:
                self.items = iter(())
            return not self._ended

    def _arrive(self, item: T) -> None:
        now, counted = time.monotonic(), self.size(item)
        with self._changed:
            if not self._arrived:
                self._since = now
            self._arrived.append(item)
            self._counted += counted
            if self._complete() or self._closed:
                self._wanted = False
                self._changed.notify_all()
            elif self._idle:
                self._idle = False
                self._changed.notify_all()


class _Surroundings(NamedTuple):
    """What torch keeps by thread and a source may depend on."""

    grad: bool
    inference: bool
    stream: torch.cuda.Stream | None

    @classmethod
    def of_this_thread(cls) -> _Surroundings:
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.cuda.current_stream() if torch.cuda.is_available() else None,
        )

    @contextlib.contextmanager
    def same(self) -> Iterator[None]:
        """The same in the thread that asks for it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            yield
