"""The conditions of a measurement: threads, clocks and the machine's load."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Conditions", "conditions", "load_average"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that times depend on; None where the machine does not report them.

    Attributes:
        threads: Threads of torch and of the backends.
        cores: CPU cores.
        cpu_mhz: Clock of the CPU after the last round, median over cores.
        gpu_mhz: Clock of the GPU after the last round.
        load: Load averages over 1, 5 and 15 minutes, before the first round.
    """

    threads: int
    cores: int | None
    cpu_mhz: float | None
    gpu_mhz: int | None
    load: tuple[float, float, float] | None


def conditions(device: torch.device, load: tuple[float, float, float] | None) -> Conditions:
    """Return the present conditions, with a load that was read before."""
    return Conditions(torch.get_num_threads(), os.cpu_count(), _cpu_mhz(), _gpu_mhz(device), load)


def load_average() -> tuple[float, float, float] | None:
    """Return the load averages over 1, 5 and 15 minutes."""
    try:
        return os.getloadavg()
    except (AttributeError, OSError):  # not available on this system
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
