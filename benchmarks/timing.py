"""Timing on shared machines: interleaved rounds, medians and quartiles, with what they were measured on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dsnet.benchmark.results import Spread
from dsnet.core.timer import time_interleaved, timed
from dsnet.report.provenance import UNKNOWN, provenance
from dsnet.routing.latency import device_name


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, device: torch.device, warm_up: int = 3
) -> dict[str, Spread]:
    """Time every call once a round, in the caller's gradient mode; return milliseconds by name."""
    gradients = torch.is_grad_enabled()

    def clock(call: Callable[[], object], device: torch.device) -> float:
        with torch.set_grad_enabled(gradients):
            return timed(call, device)

    samples = time_interleaved(calls, device, rounds=repeats, warm_up=warm_up, clock=clock)
    return {name: Spread.of(milliseconds) for name, milliseconds in samples.items()}


def environment(device: torch.device) -> dict[str, Any]:
    """Name the machine, the versions and the command of a measurement."""
    return provenance(device_name(device), " ".join(["python -m", _module_name(), *_arguments()]))


def _arguments() -> list[str]:
    """Return the command's arguments without ``--json FILE``."""
    given = sys.argv[1:]
    start = given.index("--json") if "--json" in given else len(given)
    return given[:start] + given[start + 2 :]


def _module_name() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).name


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    if data["commit"] == UNKNOWN:
        print("its commit is unknown: set DSNET_COMMIT where there is no git history")
