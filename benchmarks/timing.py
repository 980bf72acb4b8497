"""Timing that survives shared machines: interleaved repeats, medians, spread, and what it ran on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsnet.report.provenance import UNKNOWN, provenance
from dsnet.routing.latency import device_name


class Timing(NamedTuple):
    """Milliseconds a call."""

    median: float
    low: float  # first quartile
    high: float  # third quartile


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, device: torch.device, warmup: int = 3
) -> dict[str, Timing]:
    """Times every call once per round, so that a slow moment of the machine hits all of them."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: _summary(taken) for name, taken in samples.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(samples: list[float]) -> Timing:
    ordered = torch.tensor(samples, dtype=torch.float64)
    low, median, high = torch.quantile(ordered, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return Timing(median, low, high)


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure was measured on, with which code, and by which command."""
    return provenance(device_name(device), " ".join(["python -m", _module_name(), *_arguments()]))


def _arguments() -> list[str]:
    """The command's arguments, without where its figures go."""
    given = sys.argv[1:]
    at = given.index("--json") if "--json" in given else len(given)
    return given[:at] + given[at + 2 :]


def _module_name() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).name


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    if data["commit"] == UNKNOWN:
        print("its commit is unknown: set DSNET_COMMIT where there is no git history")
