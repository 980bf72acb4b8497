"""Under what conditions times were measured: clocks, threads and what else the machine did."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Conditions", "conditions", "load_average"]


class Conditions(NamedTuple):
    """What a time depends on beside the program. What the machine does not say is None."""

    threads: int  # of torch and of the backends
    cores: int | None
    cpu_mhz: float | None  # median over cores, right behind the last round
    gpu_mhz: int | None
    load: tuple[float, float, float] | None  # over 1, 5 and 15 minutes, before the first round


def conditions(device: torch.device, load: tuple[float, float, float] | None) -> Conditions:
    """Those of now, with the load of before."""
    return Conditions(torch.get_num_threads(), os.cpu_count(), _cpu_mhz(), _gpu_mhz(device), load)


def load_average() -> tuple[float, float, float] | None:
    """Mean numbers of busy processes."""
    try:
        return os.getloadavg()
    except (AttributeError, OSError):  # no such thing on this system
        return None


def _cpu_mhz(path: Path = Path("/proc/cpuinfo")) -> float | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    return statistics.median(clocks) if clocks else None


def _gpu_mhz(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:  # the driver's library, or torch's access to it, may be missing in many ways
        return None
