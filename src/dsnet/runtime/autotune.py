"""Which backend is the fastest for a network on this device: measured once, remembered in a file."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsnet.core.cuda_graphs import stream_pool
from dsnet.core.files import write_text
from dsnet.core.formats import BACKENDS
from dsnet.core.schema import read_json
from dsnet.core.timer import Progress, silent, timed
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.latency import device_name
from dsnet.runtime.backends.base import get_backend, list_backends
from dsnet.runtime.partition.segments import pack

__all__ = ["Choice", "choose_backend", "remembered_in"]

BATCHES = {"cpu": (1, 8), "cuda": (1, 64)}
TURNS, WARM_UP, ROUNDS = 3, 2, 5
PACKAGES = ("torch", "triton", "openvino", "onnxruntime")


class Choice(NamedTuple):
    """The fastest backend, and what all of them took: milliseconds an image at the largest route."""

    name: str
    milliseconds: Mapping[str, float]
    measured: bool  # now, and not in an earlier call


def remembered_in() -> Path:
    """The file of choices: in ``DSNET_CACHE``, or where the user's caches are."""
    folder = os.environ.get("DSNET_CACHE")
    if folder is None:
        folder = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsnet")
    return Path(folder) / "backends.json"


def choose_backend(
    model: Supernet,
    *,
    device: torch.device,
    precision: torch.dtype,
    image_size: int | tuple[int, int] | None = None,
    candidates: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Choice:
    """Times the largest route on every backend that can be used here, at batches of 1 and 8 (CUDA: 64)."""
    asked = list_backends() if candidates is None else list(candidates)
    usable = [name for name in asked if get_backend(name).unavailable(device, precision) is None]
    if not usable:
        raise DsnetError(f"none of the backends {', '.join(asked)} can be used on {device}")
    shape = model.input_spec.shape(image_size)
    versions = {name: _version(name) for name in PACKAGES}
    what = [model.spec.name, list(model.spec.options), list(shape), str(precision)]
    where = [device_name(device), torch.get_num_threads(), versions, usable]
    key = json.dumps([what, where], default=str)
    known = _read()
    found = known.get(key)
    if (
        isinstance(found, dict)
        and found
        and set(found) <= set(usable)
        and all(isinstance(taken, int | float) for taken in found.values())
    ):
        return Choice(min(found, key=lambda name: found[name]), found, measured=False)
    took = _measure(model, usable, device, precision, image_size, progress)
    _write({**_read(), key: took})
    return Choice(min(took, key=lambda name: took[name]), took, measured=True)


@torch.no_grad()
def _measure(
    model: Supernet,
    names: Sequence[str],
    device: torch.device,
    precision: torch.dtype,
    image_size: int | tuple[int, int] | None,
    progress: Progress,
) -> dict[str, float]:
    options = [(choice,) for choice in model.space.largest.choices]
    batches = BATCHES[device.type]
    parts = pack(model, options, image_size=image_size, precision=precision, device=device)
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    failed: dict[str, str] = {}
    for name in progress(names, len(names), "backend"):
        ready: list[list[Callable[[], object]]] = []
        try:
            for part in parts.values():
                backend = get_backend(name)
                inputs = [torch.randn(batch, *part.shape, device=device).to(precision) for batch in batches]
                make = backend.convert(part.module, inputs[0])
                calls_of_part: list[Callable[[], object]] = [functools.partial(make(x), x) for x in inputs]
                if backend.captures(device):
                    calls_of_part = [_recorded(call, device) for call in calls_of_part]
                ready.append(calls_of_part)
        except Exception as error:  # one that does not work here is not the fastest
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        for i, batch in enumerate(batches):
            calls[name, batch] = functools.partial(_run_all, [part[i] for part in ready])
    if not calls:
        raise DsnetError(
            f"no backend works on {device}: " + "; ".join(f"{n}: {e}" for n, e in failed.items())
        )
    # In blocks: threads of one backend wait busily for a while, on the cores that the next one needs.
    taken: dict[tuple[str, int], list[float]] = {job: [] for job in calls}
    for _ in range(TURNS):
        for job, call in calls.items():
            time.sleep(0.05)
            for number in range(WARM_UP + ROUNDS):
                took = timed(call, device)
                if number >= WARM_UP:
                    taken[job].append(took)
    return {
        name: round(sum(statistics.median(taken[name, batch]) / batch for batch in batches) / len(batches), 4)
        for name in names
        if name not in failed
    }


def _recorded(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    def body() -> None:
        call()

    return stream_pool(device, 1).capture(body, 0)


def _run_all(ready: Sequence[Callable[[], object]]) -> None:
    for call in ready:
        call()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read() -> dict[str, Any]:
    try:
        data: dict[str, Any] = read_json(remembered_in(), BACKENDS)
    except DsnetError:  # none, or damaged: it is measured again
        return {}
    return data


def _write(choices: Mapping[str, Any]) -> None:
    path = remembered_in()
    with suppress(OSError, DsnetError):  # it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(choices, indent=1))
