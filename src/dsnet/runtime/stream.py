"""Streams: batches are joined to larger ones, so that images are regrouped by route across them.

A batch waits until there are enough images for the device, or until it has waited for too many other batches
or for too long. Results come in the order of the images.
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
from dsnet.runtime._batch_source import BatchSource, Event

__all__ = ["MAX_DELAY_MS", "StreamResult", "stream"]

MAX_DELAY_MS = 50.0
NOT_FINITE = (
    "the logits of this image are not finite (NaN or infinity): the image, the network's weights or its "
    "normalisation hold such values, or values that overflow"
)

Run = Callable[[Tensor], RoutedOutput]


@dataclass(frozen=True, slots=True)
class StreamResult:
    """The result of one image of a stream.

    Attributes:
        index: The position of the image in the stream.
        logits: Logits [classes], or None if there is an error.
        route: The number of its route, or None if it did not run.
        error: Why there are no logits.
    """

    index: int
    logits: Tensor | None
    route: int | None
    error: str | None = None


class _Batch(NamedTuple):
    """A batch that can run, or an error."""

    start: int  # index of its first image
    size: int
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
) -> Iterator[StreamResult]:
    """Run batches [B, C, H, W] and yield a result for every image, in order.

    A batch that cannot run, or an image whose logits are not finite, gives errors; the others are not
    affected. If the source fails or the program is interrupted, all images that came before are answered
    first.

    Args:
        run: Runs images and returns logits and routes.
        check: Raises for images that cannot run.
        batches: The source. Batches are not copied: each must have memory of its own. None stands for one
            image that could not be read.
        images: How many images to run together.
        delay: For how many further batches a batch waits at most.
        max_delay_ms: For how many milliseconds it waits at most, also while the source blocks.
        ahead: Whether to yield results only when the next images are launched, so that the device does not
            wait for the consumer.
        blocks: Whether the source may block; then a thread reads it.
    """
    if type(images) is not int or type(delay) is not int or images < 1 or delay < 0:
        raise DsnetError(
            f"images must be an integer of at least 1, delay of at least 0, not {images}, {delay}"
        )
    if isinstance(max_delay_ms, bool) or not isinstance(max_delay_ms, int | float) or not max_delay_ms >= 0:
        raise DsnetError(
            f"max_delay_ms must be a number of milliseconds, at least 0, not {shorten(max_delay_ms)}; "
            "math.inf sets no limit"
        )
    ahead = ahead and delay > 0
    wait = max(0, (delay - 1) // 2) if ahead else delay  # and as long again until the next are launched
    source = BatchSource(
        iter(batches),
        size=_count,
        min_size=images,
        max_items=wait + 1,
        seconds=min(max_delay_ms / 1e3, threading.TIMEOUT_MAX / 2),
        blocks=blocks,
    )
    return _results_of(run, check, source, ahead=ahead)


def _results_of(
    run: Run, check: Callable[[Tensor], None], source: BatchSource[Tensor | None], *, ahead: bool
) -> Iterator[StreamResult]:
    launched: Iterator[StreamResult] = iter(())
    due: float | None = None  # when the results of what is launched must be yielded
    index = 0
    failure: BaseException | None = None
    try:
        while failure is None:
            try:
                event = source.wait(due)
            except KeyboardInterrupt as interrupt:
                failure, event = interrupt, Event.GROUP
            if event is not Event.GROUP:
                yield from launched
                launched, due = iter(()), None
                if event is Event.END:
                    break
                continue
            group, since = source.take()
            batches = []
            for x in group:
                batches.append(_checked(x, index, check))
                index += batches[-1].size
            try:
                following = _launch(run, batches)
            except KeyboardInterrupt as interrupt:
                failure, following = interrupt, _launch(run, batches)
            yield from launched
            launched, due = following, since + source.seconds
            if not ahead:
                yield from launched
                launched, due = iter(()), None
        yield from launched
    finally:
        source.close()
    failure = failure or source.failure
    if failure is not None:
        raise failure


def _count(x: Tensor | None) -> int:
    return x.size(0) if isinstance(x, Tensor) and x.ndim == 4 else 1  # nested tensors have no len


def _checked(x: Tensor | None, index: int, check: Callable[[Tensor], None]) -> _Batch:
    try:
        if x is None:
            raise DsnetError("the image could not be read")
        check(x)
    except (DsnetError, RuntimeError, TypeError) as error:
        return _Batch(index, _count(x), None, str(error))
    return _Batch(index, _count(x), x)


def _launch(run: Run, batches: list[_Batch]) -> Iterator[StreamResult]:
    """Launch all images that can run together; the returned iterator waits for the results."""
    runnable = [batch.images for batch in batches if batch.images is not None and batch.size]
    if not runnable:
        return _results(batches)
    try:
        output = run(runnable[0] if len(runnable) == 1 else torch.cat(runnable))
        finite = output.logits.isfinite().all(1)
        # Not finite: the bitwise complement of the route, so that one copy to the host is enough.
        routes = _copy_to_host(torch.where(finite, output.routes, ~output.routes))
        return _results(batches, output.logits.unbind(0), routes)
    except (DsnetError, RuntimeError, TypeError) as error:
        if sum(map(len, runnable)) == 1:
            return _results([b._replace(images=None, error=b.error or str(error)) for b in batches])
    single = itertools.chain.from_iterable(map(_split, batches))
    return iter([result for batch in single for result in _launch(run, [batch])])


def _split(batch: _Batch) -> list[_Batch]:
    """Split a batch into its images."""
    if batch.images is None or batch.size < 2:
        return [batch]
    try:
        return [_Batch(batch.start + i, 1, batch.images[i : i + 1]) for i in range(batch.size)]
    except RuntimeError as error:
        return [batch._replace(images=None, error=str(error))]


def _copy_to_host(routes: Tensor) -> Callable[[], list[int]]:
    """Start copying and return a function that waits for the copy, but not for what is launched later."""
    if routes.device.type != "cuda":
        return routes.tolist
    copied = routes.to("cpu", non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(routes.device))

    def wait() -> list[int]:
        done.synchronize()
        return cast("list[int]", copied.tolist())

    return wait


def _results(
    batches: list[_Batch], logits: Iterable[Tensor] = (), routes: Callable[[], list[int]] = list
) -> Iterator[StreamResult]:
    outputs = zip(logits, routes(), strict=True)
    for batch in batches:
        for index in range(batch.start, batch.start + batch.size):
            if batch.images is None:
                yield StreamResult(index, None, None, batch.error)
                continue
            image_logits, route = next(outputs)
            if route < 0:
                yield StreamResult(index, None, ~route, NOT_FINITE)
            else:
                yield StreamResult(index, image_logits, route)
