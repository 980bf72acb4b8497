"""Decode batches in worker processes."""

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
from dsnet.data.decode import DecodeError, ImageList, decode
from dsnet.errors import DsnetError

__all__ = ["BatchDecoder", "decode_batches"]

# Images [V, B, 3, H, W], the position in the batch that each shows, and (item, reason) of decode errors.
DecodedBatch = tuple[Tensor, list[int], list[tuple[int, str]]]


class BatchDecoder(Dataset[DecodedBatch]):
    """Decode whole batches of items, for a `DataLoader`."""

    def __init__(self, items: ImageList, size: int, ratio: float, crops: Crops | None) -> None:
        self.items, self.size, self.ratio, self.crops = items, size, ratio, crops

    def __getitems__(self, indices: list[int]) -> DecodedBatch:
        views = 1 if self.crops is None else self.crops.views
        images = torch.empty(views, len(indices), 3, self.size, self.size, dtype=torch.uint8)
        good: list[int] = []
        errors: list[tuple[int, str]] = []
        for position, index in enumerate(indices):
            try:
                source = self.items.source(index)
                images[:, position] = decode(
                    source, self.size, ratio=self.ratio, crops=self.crops, index=index
                )
            except DecodeError as error:
                errors.append((index, str(error)))
            else:
                good.append(position)
        if len(good) == len(indices) or not good:
            return images, good, errors
        shown = [next((j for j in good if j >= i), good[0]) for i in range(len(indices))]
        return images[:, shown], shown, errors


def decode_batches(
    decoder: BatchDecoder, order: list[list[int]], *, workers: int, prefetch: int, pin_memory: bool
) -> Iterator[DecodedBatch]:
    """Decode each batch of ``order``, in that order; with 0 workers in this process."""
    parallel = workers > 0 and len(order) > 0
    loader = DataLoader(
        decoder,
        batch_sampler=order,
        collate_fn=_identity,
        num_workers=min(workers, len(order)),
        prefetch_factor=prefetch if parallel else None,
        multiprocessing_context=_context() if parallel else None,
        worker_init_fn=_ignore_interrupts,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # the default would draw from the global one
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


def _identity(batch: object) -> object:
    return batch


def _ignore_interrupts(worker: int) -> None:
    """Leave ending to the main process: ignore Ctrl-C, and do not report connections that it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _report_unless_disconnected


def _report_unless_disconnected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def _context() -> BaseContext:
    """Start workers without forking this process, whose threads may hold locks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The server imports these once, so that workers start in milliseconds; `datasets` only where it is used.
    context.set_forkserver_preload([__name__, "PIL.Image", *{"datasets"} & sys.modules.keys()])
    return context
