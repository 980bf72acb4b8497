"""Any number of images through programs that take so many at a time, one thread after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dsnet.core.cuda_graphs import StreamPool
from dsnet.errors import DsnetError
from dsnet.routing.policies import RoutedOutput

__all__ = ["in_batches"]


class _Recorded(Protocol):
    most: int
    lock: threading.Lock
    streams: StreamPool


@torch.no_grad()
def in_batches(recorded: _Recorded, x: Tensor, run: Callable[[slice | None], RoutedOutput]) -> RoutedOutput:
    """So many images at a time as there is room for, or all of them (none); one thread at a time."""
    with recorded.lock, recorded.streams.on_device():
        try:
            if 0 < len(x) <= recorded.most:
                return run(None)
            found = [run(slice(start, start + recorded.most)) for start in range(0, len(x), recorded.most)]
        except BaseException:
            recorded.streams.release()  # what was launched so far belongs to what went before
            raise
    if not found:
        raise DsnetError("there are no images to run")
    return RoutedOutput(torch.cat([f.logits for f in found]), torch.cat([f.routes for f in found]))
