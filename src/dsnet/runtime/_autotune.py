"""Time the backends that can run a network on a device, and remember which is the fastest."""

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
from typing import Any

import torch

from dsnet.core.cuda_graphs import captured_call
from dsnet.core.files import write_text
from dsnet.core.formats import BACKENDS
from dsnet.core.schema import read_json
from dsnet.core.timer import Progress, silent, time_interleaved
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.latency import device_name
from dsnet.runtime.backends.base import get_backend, list_backends
from dsnet.runtime.partition.segments import Segment, pack

__all__ = ["cache_file", "choose_backend"]

BATCHES = {"cpu": (1, 8), "cuda": (1, 64)}
BLOCKS, WARM_UP, ROUNDS = 3, 2, 5  # each backend is timed in several blocks of rounds
PAUSE = 0.05  # seconds before a block: the threads of the backend before it may still be spinning
PACKAGES = ("torch", "triton", "openvino", "onnxruntime")


def cache_file() -> Path:
    """Return the file of measured times: in ``DSNET_CACHE``, or in the user's folder for caches."""
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
) -> str:
    """Return the fastest backend for the largest route, at batches of 1 and 8 (CUDA: 1 and 64).

    Times are cached in `cache_file`, for the same network, machine and versions of the backends.

    Args:
        model: The network.
        device: Where it is to run.
        precision: The precision of its features.
        image_size: Height and width, or one number for both (default: the network's).
        candidates: Names of backends (default: all).
        progress: Progress callback.

    Raises:
        DsnetError: If no candidate can be used, or all of them fail.
    """
    names = list_backends() if candidates is None else list(candidates)
    usable = [name for name in names if get_backend(name).unavailable(device, precision) is None]
    if not usable:
        raise DsnetError(f"none of the backends {', '.join(names)} can be used on {device}")
    shape = model.input_spec.shape(image_size)
    workload = [model.spec.name, list(model.spec.options), list(shape), str(precision)]
    versions = {name: _version(name) for name in PACKAGES}
    machine = [device_name(device), torch.get_num_threads(), versions, usable]
    key = json.dumps([workload, machine], default=str)
    times = _cached_times(key, usable)
    if times is None:
        times = _measure(model, usable, device, precision, image_size, progress)
        _write_cache({**_read_cache(), key: times})
    return min(times, key=times.__getitem__)


def _cached_times(key: str, names: Sequence[str]) -> dict[str, float] | None:
    """Return the times of an earlier call, or None if there are none or the cache is damaged."""
    times = _read_cache().get(key)
    valid = (
        isinstance(times, dict)
        and times
        and set(times) <= set(names)
        and all(isinstance(milliseconds, int | float) for milliseconds in times.values())
    )
    return times if valid else None


@torch.no_grad()
def _measure(
    model: Supernet,
    names: Sequence[str],
    device: torch.device,
    precision: torch.dtype,
    image_size: int | tuple[int, int] | None,
    progress: Progress,
) -> dict[str, float]:
    """Return the milliseconds per image, a mean over the batch sizes, of the backends that work."""
    options = [(choice,) for choice in model.space.largest.choices]
    batches = BATCHES[device.type]
    segments = pack(model, options, image_size=image_size, precision=precision, device=device)
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    failed: dict[str, str] = {}
    for name in progress(names, len(names), "backend"):
        try:
            calls |= _backend_calls(name, list(segments.values()), batches, device, precision)
        except Exception as error:  # a backend that fails here is not the fastest
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not calls:
        raise DsnetError(
            f"no backend works on {device}: " + "; ".join(f"{n}: {e}" for n, e in failed.items())
        )
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(BLOCKS):
        for key, call in calls.items():
            time.sleep(PAUSE)
            samples[key] += time_interleaved({key: call}, device, rounds=ROUNDS, warm_up=WARM_UP)[key]
    return {
        name: round(statistics.mean(statistics.median(samples[name, b]) / b for b in batches), 4)
        for name in names
        if name not in failed
    }


def _backend_calls(
    name: str,
    segments: Sequence[Segment],
    batches: Sequence[int],
    device: torch.device,
    precision: torch.dtype,
) -> dict[tuple[str, int], Callable[[], object]]:
    """Compile segments and return, by batch size, a call that runs all of them."""
    backend = get_backend(name)
    calls: dict[int, list[Callable[[], object]]] = {batch: [] for batch in batches}
    for segment in segments:
        inputs = [torch.randn(batch, *segment.shape, device=device).to(precision) for batch in batches]
        compile_for = backend.convert(segment.module, inputs[0])
        for batch, x in zip(batches, inputs, strict=True):
            call = functools.partial(compile_for(x), x)
            calls[batch].append(captured_call(call, device) if backend.captures(device) else call)
    return {(name, batch): functools.partial(_run_all, calls[batch]) for batch in batches}


def _run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_cache() -> dict[str, Any]:
    try:
        data: dict[str, Any] = read_json(cache_file(), BACKENDS)
    except DsnetError:  # missing or damaged
        return {}
    return data


def _write_cache(times: Mapping[str, Any]) -> None:
    path = cache_file()
    with suppress(OSError, DsnetError):  # then it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(times, indent=1))
