"""How long a call takes, until the device is done; and how whoever waits is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Progress", "silent", "timed"]

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""(items, how many, what they are) → the items, passed on one by one; as `dsnet.cli.progress` does."""


def silent(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
    """Tells nobody."""
    return items


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds, from the host's point of view."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begun)
