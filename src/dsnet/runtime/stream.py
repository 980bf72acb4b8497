"""Bulk work through a plan: batches joined to larger ones, so that routes are regrouped across them.

Batches wait until there are enough images for one that the device runs well, or until the first of them has
waited for so many others. Answers come in the order of the images.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.routing.rules import RoutedOutput
from dsnet.runtime.engine import Engine

__all__ = ["Answer", "stream", "together"]

TOGETHER = 64  # images that run at once on the host

Run = Callable[[Tensor], RoutedOutput]


class Answer(NamedTuple):
    """Of one image: its place in the stream, logits [classes] and route; or what was wrong with it."""

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


def together(engine: Engine) -> int:
    """How many images of a stream suit the device at once."""
    return TOGETHER if engine.graphed is None else engine.graphed.most


def stream(
    run: Run,
    check: Callable[[Tensor], None],
    batches: Iterable[Tensor | None],
    *,
    images: int,
    delay: int,
    ahead: bool = False,
) -> Iterator[Answer]:
    """Runs batches [B, C, H, W] in the order they come and gives an answer for every image, in order.

    ``images`` are run together; no batch waits for more than ``delay`` further ones. With ``ahead`` answers
    are given when the next images have been started, so that a device does not wait for whoever takes them.
    What cannot be run (another shape, no numbers) is answered by its error and the rest go on; `None` stands
    for one image that could not be read. Batches are held, not copied: each comes in memory of its own.
    """
    if type(images) is not int or type(delay) is not int or images < 1 or delay < 0:
        raise DsnetError(
            f"images must be an integer of at least 1, delay of at least 0, not {images}, {delay}"
        )
    return _answers(run, check, iter(batches), images, delay, ahead=ahead and delay > 0)


def _answers(
    run: Run,
    check: Callable[[Tensor], None],
    batches: Iterator[Tensor | None],
    images: int,
    delay: int,
    *,
    ahead: bool,
) -> Iterator[Answer]:
    waiting: list[_Batch] = []
    started: Iterator[Answer] = iter(())
    place = 0
    failure: Exception | None = None
    wait = max(0, (delay - 1) // 2) if ahead else delay  # and as long again, until the next are started
    for _ in itertools.count():
        try:
            x = next(batches)
        except StopIteration:
            break
        except Exception as error:  # what came before it is answered first
            failure = error
            break
        batch = _taken(x, place, check)
        waiting.append(batch)
        place += batch.count
        if sum(b.count for b in waiting) >= images or len(waiting) > wait:
            following = _run(run, waiting)
            yield from started
            waiting, started = [], following
            if not ahead:
                yield from started
    following = _run(run, waiting)
    yield from started
    yield from following
    if failure is not None:
        raise failure


def _taken(x: Tensor | None, place: int, check: Callable[[Tensor], None]) -> _Batch:
    count = 1 if not isinstance(x, Tensor) or x.ndim != 4 else len(x)
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
        numbers = _on_host(output.routes)
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
            else:
                yield Answer(place, *next(found))
