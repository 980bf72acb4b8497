"""Processes that decode batches."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from types import TracebackType

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dsnet.data.dataset import Crops
from dsnet.data.decode import DamagedError, Items, decode
from dsnet.errors import DsnetError

__all__ = ["Work", "run"]

# What a worker sends: images [V, B, 3, H, W], which image of the batch stands where, and the damaged ones.
Sent = tuple[Tensor, list[int], list[tuple[int, str]]]


class Work(Dataset[Sent]):
    """What the workers do: decode whole batches of items."""

    def __init__(self, items: Items, size: int, ratio: float, crops: Crops | None) -> None:
        self.items, self.size, self.ratio, self.crops = items, size, ratio, crops

    def __getitems__(self, positions: list[int]) -> Sent:
        views = 1 if self.crops is None else self.crops.views
        images = torch.empty(views, len(positions), 3, self.size, self.size, dtype=torch.uint8)
        good: list[int] = []
        damaged: list[tuple[int, str]] = []
        for i, position in enumerate(positions):
            try:
                images[:, i] = decode(
                    self.items.source(position),
                    self.size,
                    ratio=self.ratio,
                    crops=self.crops,
                    position=position,
                )
            except DamagedError as error:
                damaged.append((position, str(error)))
            else:
                good.append(i)
        if len(good) == len(positions) or not good:
            return images, good, damaged
        stand_ins = [next((j for j in good if j >= i), good[0]) for i in range(len(positions))]
        return images[:, stand_ins], stand_ins, damaged


def run(work: Work, order: list[list[int]], *, workers: int, prefetch: int, pinned: bool) -> Iterator[Sent]:
    """Does the work for every batch of ``order``, in that order; without workers in this process."""
    parallel = workers > 0 and len(order) > 0
    loader = DataLoader(
        work,
        batch_sampler=order,
        collate_fn=_as_it_is,
        num_workers=min(workers, len(order)),
        prefetch_factor=prefetch if parallel else None,
        multiprocessing_context=_context() if parallel else None,
        worker_init_fn=_leave_the_end_to_main,
        pin_memory=pinned,
        generator=torch.Generator(),  # else it draws from the global one
    )
    try:
        yield from loader
    except RuntimeError as error:
        if not any(end in str(error) for end in ("exited unexpectedly", "is killed by signal")):
            raise
        raise DsnetError(
            f"{str(error).splitlines()[0]}. Memory or shared memory (/dev/shm) may be used up, or the script "
            'lacks `if __name__ == "__main__":`. With workers=0 images are decoded in the process itself'
        ) from error


def _as_it_is(batch: object) -> object:
    return batch


def _leave_the_end_to_main(worker: int) -> None:
    """The main process ends the workers; one that it leaves while handing over a batch says nothing of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _but_lost_connections


def _but_lost_connections(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def _context() -> BaseContext:
    """How workers start: never by a fork of this process, whose threads may hold locks at that moment."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The server imports these once, so that workers start in milliseconds; `datasets` only where it is used.
    context.set_forkserver_preload([__name__, "PIL.Image", *{"datasets"} & sys.modules.keys()])
    return context
