"""A source of batches that a thread reads, so that waiting for it can time out.

The thread reads only while a group of batches is being collected. How far a source has been read therefore
depends only on how many groups were taken.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

import torch

__all__ = ["BatchSource", "Event"]

T = TypeVar("T")

GRACE = 2e-3  # seconds that a source has to complete a group although older results are due
QUICK = 2e-3  # seconds in which most sources complete a group; the waiting thread is not woken before
JOIN = 1.0  # seconds that closing waits for a source that is about to give its next batch


class Event(Enum):
    """Why `BatchSource.wait` has returned."""

    GROUP = auto()  # a group is complete, has waited long enough, or is the last
    DUE = auto()  # the time limit is reached, and there is no group yet
    END = auto()  # the source is exhausted


class BatchSource(Generic[T]):
    """Collects the items of an iterator in groups.

    An exception of the iterator ends the items and is kept in ``failure``.

    Args:
        items: The iterator.
        size: Returns how much an item counts.
        min_size: A group ends when its items count this much,
        max_items: or when it has this many items,
        seconds: or this long after its first item arrived.
        blocks: Whether the iterator may block. If not, no thread is needed.
    """

    def __init__(
        self,
        items: Iterator[T],
        *,
        size: Callable[[T], int],
        min_size: int,
        max_items: int,
        seconds: float,
        blocks: bool = True,
    ) -> None:
        self.items, self.size, self.min_size, self.max_items = items, size, min_size, max_items
        self.seconds, self.blocks = seconds, blocks
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._group: list[T] = []
        self._group_size = 0
        self._since = 0.0  # when the first item of the group arrived, as `time.monotonic`
        self._wanted = self._closed = self._ended = False
        self._wake_at_first = False  # whether to wake the waiting thread for the first item
        self._thread: threading.Thread | None = None

    def wait(self, due: float | None = None) -> Event:
        """Wait for a group, or until the time ``due`` (as `time.monotonic`)."""
        if not self.blocks:
            self._wanted = True
            self._read_group()
            return Event.GROUP if self._group else Event.END
        with self._changed:
            if self._thread is None:
                self._thread = self._start_thread()
            if not self._complete():
                self._wanted = True
                self._changed.notify_all()
            now = time.monotonic()
            due = None if due is None else max(due, now + GRACE)
            quick = now + QUICK
            while not self._complete():
                if self._ended:
                    return Event.GROUP if self._group else Event.END
                now = time.monotonic()
                late = self._since + self.seconds if self._group else None
                if late is not None and now >= late:
                    return Event.GROUP
                if due is not None and now >= due:
                    return Event.DUE
                limits = [limit for limit in (late, due) if limit is not None]
                self._wake_at_first = late is None and now >= quick
                if late is None and not self._wake_at_first:
                    limits.append(quick)
                self._changed.wait(min(limits) - now if limits else None)
            return Event.GROUP

    def take(self) -> tuple[list[T], float]:
        """Return the group so far, and when its first item arrived."""
        with self._changed:
            group, self._group, self._group_size = self._group, [], 0
            self._wanted = False
            return group, self._since

    def close(self) -> None:
        """End the thread; if its source blocks, it ends when the source gives the next item."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN)

    def _complete(self) -> bool:
        return self._group_size >= self.min_size or len(self._group) >= self.max_items

    def _start_thread(self) -> threading.Thread:
        """Start the thread with the context variables and torch's settings of this one."""
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        settings = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), stream
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run, *settings),
            name="dsnet stream",
            daemon=True,  # a source may block for ever
        )
        thread.start()
        return thread

    # --- in the thread -----------------------------------------------------------------------------------
    def _run(self, inference: bool, grad: bool, stream: torch.cuda.Stream | None) -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.cuda.stream(stream):
            while self._next_group_wanted():
                self._read_group()

    def _next_group_wanted(self) -> bool:
        """Wait until a group is wanted, or return False if there is nothing more to read."""
        with self._changed:
            while not (self._ended or self._closed or (self._wanted and not self._complete())):
                self._changed.wait()
            self._ended = self._ended or self._closed
            if self._ended:
                self.items = iter(())
            return not self._ended

    def _read_group(self) -> None:
        ended = True
        try:
            while self._wanted and not self._complete():
                self._add(next(self.items))
            ended = False
        except StopIteration:
            pass
        except BaseException as error:  # raised again where the items are taken
            self.failure = error
        if ended or self._closed:
            self.items = iter(())  # a generator is closed by the thread that ran it
            with self._changed:
                self._ended, self._wanted = True, False
                self._changed.notify_all()

    def _add(self, item: T) -> None:
        now, size = time.monotonic(), self.size(item)
        with self._changed:
            if not self._group:
                self._since = now
            self._group.append(item)
            self._group_size += size
            if self._complete() or self._closed:
                self._wanted = False
                self._changed.notify_all()
            elif self._wake_at_first:
                self._wake_at_first = False
                self._changed.notify_all()
