"""How long a call takes, until the device is done; and how whoever waits is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Progress", "logged", "silent", "timed"]

LOG = logging.getLogger("dsnet.runtime")
EVERY = 5.0  # seconds between two lines about the same items

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""(items, how many, what they are) → the items, passed on one by one; as `dsnet.cli.progress` does."""


def silent(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
    """Tells nobody."""
    return items


def logged(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
    """Logs how many have gone by, at level INFO of the logger ``dsnet.runtime``."""
    begun = told = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - told > EVERY or done == total:
            told = now
            LOG.info("%s %d of %d, %.0f s", label, done, total, now - begun)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds, from the host's point of view."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begun)
