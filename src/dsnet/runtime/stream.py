"""Bulk work through a plan: batches joined to larger ones, so that routes are regrouped across them.

Batches wait until there are enough images for one that the device runs well, or until the first of them has
waited for so many others or for so long. Answers come in the order of the images.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dsnet.errors import DsnetError, shorten
from dsnet.routing.policies import RoutedOutput
from dsnet.runtime.stream_source import Ready, Source

__all__ = ["MAX_DELAY_MS", "Answer", "stream"]

MAX_DELAY_MS = 50.0  # that an image waits for others, unless told otherwise
NOT_FINITE = (
    "the logits of this image are not finite (NaN or infinity): the image, the network's weights or its "
    "normalisation hold such values, or values that overflow"
)

Run = Callable[[Tensor], RoutedOutput]


class Answer(NamedTuple):
    """Of one image: its place in the stream, logits [classes] and route; or what was wrong with it.

    An image with an ``error`` has no logits; one whose logits were not finite has the route that it took.
    """

    place: int
    logits: Tensor | None
    route: int | None
    error: str | None = None


@dataclass(slots=True)
class _Batch:
    """What came in: images that can be run, or what is wrong with them."""

    place: int  # of its first image
    count: int
    images: Tensor | None
    error: str | None = None


def stream(
    run: Run,
    check: Callable[[Tensor], None],
    batches: Iterable[Tensor | None],
    *,
    images: int,
    delay: int,
    max_delay_ms: float = MAX_DELAY_MS,
    ahead: bool = False,
    blocks: bool = True,
) -> Iterator[Answer]:
    """Runs batches [B, C, H, W] in the order they come and gives an answer for every image, in order.

    ``images`` are run together; no batch waits for more than ``delay`` further ones, nor for longer than
    ``max_delay_ms``, also while the source blocks: it is read in a thread. With ``ahead`` answers
    are given when the next images have been started, so that a device does not wait for whoever takes them.
    What cannot be run (another shape, no numbers) or has no finite answer is answered by its error and the
    rest go on; `None` stands for one image that could not be read. A source that never ``blocks`` needs no
    thread. Batches are held, not copied: each comes
    in memory of its own. Where the source fails, or the program is interrupted, all images that came before
    are answered first.
    """
    if type(images) is not int or type(delay) is not int or images < 1 or delay < 0:
        raise DsnetError(
            f"images must be an integer of at least 1, delay of at least 0, not {images}, {delay}"
        )
    if isinstance(max_delay_ms, bool) or not isinstance(max_delay_ms, int | float) or not max_delay_ms >= 0:
        raise DsnetError(
            f"max_delay_ms must be a number of milliseconds, at least 0, not {shorten(max_delay_ms)}; "
            "math.inf waits for as long as it takes"
        )
    ahead = ahead and delay > 0
    wait = max(0, (delay - 1) // 2) if ahead else delay  # and as long again, until the next are started
    seconds = min(max_delay_ms / 1e3, threading.TIMEOUT_MAX / 2)
    source = Source(iter(batches), size=_count, enough=images, most=wait + 1, seconds=seconds, blocks=blocks)
    return _answers(run, check, source, ahead=ahead)


def _answers(
    run: Run, check: Callable[[Tensor], None], source: Source[Tensor | None], *, ahead: bool
) -> Iterator[Answer]:
    started: Iterator[Answer] = iter(())
    due: float | None = None  # when answers that were started are to be given
    place = 0
    failure: BaseException | None = None
    try:
        while failure is None:
            try:
                ready = source.wait(due)
            except KeyboardInterrupt as interrupt:  # what has come in by now is answered first
                failure, ready = interrupt, Ready.GROUP
            if ready is not Ready.GROUP:
                yield from started
                started, due = iter(()), None
                if ready is Ready.END:
                    break
                continue
            taken, since = source.take()
            waiting = []
            for x in taken:
                waiting.append(_taken(x, place, check))
                place += waiting[-1].count
            try:
                following = _run(run, waiting)
            except KeyboardInterrupt as interrupt:
                failure, following = interrupt, _run(run, waiting)
            yield from started
            started, due = following, since + source.seconds
            if not ahead:
                yield from started
                started, due = iter(()), None
        yield from started
    finally:
        source.close()
    failure = failure or source.failure
    if failure is not None:
        raise failure


def _count(x: Tensor | None) -> int:
    return 1 if not isinstance(x, Tensor) or x.ndim != 4 else x.size(0)  # which nested tensors have, too


def _taken(x: Tensor | None, place: int, check: Callable[[Tensor], None]) -> _Batch:
    count = _count(x)
    try:
        if x is None:
            raise DsnetError("the image could not be read")
        check(x)
    except (DsnetError, RuntimeError, TypeError) as error:
        return _Batch(place, count, None, str(error))
    return _Batch(place, count, x)


def _run(run: Run, batches: list[_Batch]) -> Iterator[Answer]:
    """Starts all that can be run together; the answers are looked at when they are asked for."""
    found = [batch.images for batch in batches if batch.images is not None and batch.count]
    if not found:
        return _told(batches)
    try:
        x = found[0] if len(found) == 1 else torch.cat(found)
        output = run(x)
        finite = output.logits.isfinite().all(1)
        numbers = _on_host(torch.where(finite, output.routes, ~output.routes))  # one copy says both
        return _told(batches, output.logits.unbind(0), numbers)  # taken apart while the device is busy
    except (DsnetError, RuntimeError, TypeError) as error:
        if sum(map(len, found)) == 1:
            (batch,) = (b for b in batches if b.images is not None and b.count)
            batch.images, batch.error = None, str(error)
            return _told(batches)
    alone = itertools.chain.from_iterable(map(_apart, batches))
    return iter([answer for one in alone for answer in _run(run, [one])])


def _apart(batch: _Batch) -> list[_Batch]:
    """Its images one by one."""
    if batch.images is None or batch.count < 2:
        return [batch]
    try:
        return [_Batch(batch.place + i, 1, batch.images[i : i + 1]) for i in range(batch.count)]
    except RuntimeError as error:
        return [_Batch(batch.place, batch.count, None, str(error))]


def _on_host(numbers: Tensor) -> Callable[[], list[int]]:
    """Starts to copy them; asked for, they do not wait for what is launched behind them."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    copied = numbers.to("cpu", non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record(torch.cuda.current_stream(numbers.device))

    def wait() -> list[int]:
        there.synchronize()
        return cast("list[int]", copied.tolist())

    return wait


def _told(
    batches: list[_Batch], logits: Iterable[Tensor] = (), taken: Callable[[], list[int]] = list
) -> Iterator[Answer]:
    found = zip(logits, taken(), strict=True)
    for batch in batches:
        for place in range(batch.place, batch.place + batch.count):
            if batch.images is None:
                yield Answer(place, None, None, batch.error)
                continue
            own, route = next(found)
            if route < 0:
                yield Answer(place, None, ~route, NOT_FINITE)
            else:
                yield Answer(place, own, route)
