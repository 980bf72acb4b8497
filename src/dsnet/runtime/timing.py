"""How long a call takes, until the device is done."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["timed"]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds, from the host's point of view."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begun)
