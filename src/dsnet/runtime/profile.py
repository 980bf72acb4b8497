"""Time the prefix and every segment of a network, or of a plan of it, for a table of latencies.

>>> import dsnet
>>> table = profile(dsnet.create_model("ds_mbnet_tiny"), batches=(1, 4), repeats=1)
>>> table.batches
(1, 4)
>>> table.costs(batch=4).unit  # per image of a batch of four
'ms'
"""

from __future__ import annotations

import copy
import datetime
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from dsnet.core.timer import Progress, silent, time_interleaved, timed_on_device
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.composite import CompositeNetwork
from dsnet.models.members import Member
from dsnet.routing.latency import BatchTimes, DeviceKind, LatencyTable, Time, device_name
from dsnet.runtime.api import compile as make_plan
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors.segment_calls import (
    SegmentCalls,
    calls_of_members,
    calls_of_network,
    segment_paths,
)
from dsnet.runtime.partition.segments import SegmentKey
from dsnet.slicing import KeyState, SplitBatchNorm2d

__all__ = ["profile", "profile_plan"]

WARM_UP = 3  # rounds
VERSIONED = ("onnxruntime", "openvino", "triton")  # backends with a version of their own


def profile(
    model: Supernet,
    *,
    batches: Sequence[int] = (1,),
    repeats: int = 30,
    image_size: int | tuple[int, int] | None = None,
    progress: Progress = silent,
) -> LatencyTable:
    """Time the prefix and every segment of a network in eager PyTorch, on its device and in its precision.

    The segments are timed in turn, round after round. A copy in eval mode runs: the network stays as it is,
    and norms need no statistics.

    Args:
        model: The network.
        batches: Batch sizes.
        repeats: Rounds of timing.
        image_size: Height and width, or one number for both (default: the size that the network is for).
        progress: Progress callback.

    Raises:
        DsnetError: A count is not a positive integer, or the network cannot run on its device.
    """
    weight = model.head.classifier.weight
    if weight.device.type not in get_args(DeviceKind):
        raise DsnetError(
            f"a network on {weight.device} cannot be timed; move it to {' or '.join(get_args(DeviceKind))}"
        )
    copied = _copy_with_statistics(model)
    with torch.inference_mode():
        return _measure(
            functools.partial(_eager_calls, copied),
            model,
            {"backend": "eager", "backend_version": str(torch.__version__), "memory": "shared"},
            device=weight.device,
            dtype=weight.dtype,
            batches=batches,
            repeats=repeats,
            image_size=image_size,
            progress=progress,
        )


def _eager_calls(model: Supernet, x: Tensor) -> SegmentCalls:
    """Return the calls of a network in eager PyTorch; those of several members run whole routes."""
    if not isinstance(model, CompositeNetwork):
        return calls_of_network(model, x)
    prefixes = [functools.partial(_run_prefix, member, x) for member in model.members]
    whole = {route.choices: functools.partial(model.run_route, x, route) for route in model.space}
    return calls_of_members(
        whole, prefixes, [model.member_of(route) for route in model.space], model.has_gate
    )


def _run_prefix(member: Member[Supernet], x: Tensor) -> None:
    member.network.run_prefix(member.images(x))


def profile_plan(
    model: Supernet,
    *,
    backend: str = "auto",
    precision: str | None = None,
    batches: Sequence[int] = (1,),
    repeats: int = 30,
    image_size: int | tuple[int, int] | None = None,
    progress: Progress = silent,
) -> LatencyTable:
    """Compile all routes on the network's device, and time prefix and segments by the executor that serves.

    Batches run as in a plan with the default batch sizes of the backend: a large batch may run as several
    smaller ones. The network stays as it is, and its norms need no statistics.

    Args:
        model: The network.
        backend: Name of a backend; ``"auto"`` takes the one that `compile` takes.
        precision: Precision of the plan (default: that of `compile`).
        batches: Batch sizes.
        repeats: Rounds of timing.
        image_size: Height and width, or one number for both (default: the size that the network is for).
        progress: Progress callback.

    Raises:
        DsnetError: ``model`` is not a supernet, a count is not a positive integer, or the backend cannot be
            used.

    Examples:
        >>> import dsnet
        >>> table = profile_plan(dsnet.create_model("ds_mbnet_tiny"), backend="eager", repeats=1)
        >>> table.backend, table.memory, table.batches
        ('eager', 'packed', (1,))
    """
    if not isinstance(model, Supernet):
        raise DsnetError(f"only a supernet can be profiled, not a {type(model).__name__}")
    _check_counts(batches, repeats)
    copied = _copy_with_statistics(model)
    for network in _members(copied):
        network.bn_key = "stage"  # so that one segment per pair of choices is enough
    make = functools.partial(make_plan, copied, precision=precision, image_size=image_size, progress=progress)
    if backend == "auto":
        backend = make(backend="auto", batch_buckets=(1,), routes=[0]).network.backend
    sizes = get_backend(backend).buckets
    enough = min((size for size in sizes if size >= max(batches)), default=max(sizes))
    buckets = tuple(size for size in sizes if size <= enough)
    compiled = make(backend=backend, batch_buckets=buckets, routes=range(len(model.space))).network
    version = importlib.import_module(backend if backend in VERSIONED else "torch").__version__
    return _measure(
        compiled.executor.segment_calls,
        model,
        {"backend": backend, "backend_version": str(version), "memory": "packed"},
        device=compiled.device,
        dtype=compiled.precision,
        batches=batches,
        repeats=repeats,
        image_size=image_size,
        progress=progress,
    )


def _members(model: Supernet) -> list[Supernet]:
    return [member.network for member in model.members] if isinstance(model, CompositeNetwork) else [model]


def _check_counts(batches: Sequence[int], repeats: int) -> None:
    for name, counts in (("batches", tuple(batches)), ("repeats", (repeats,))):
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise DsnetError(
                f"{name} must be positive integers, not {', '.join(map(repr, counts)) or 'none'}"
            )


def _copy_with_statistics(model: Supernet) -> Supernet:
    """Copy a network in eval mode, with norms that run whether they have statistics or not."""
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        if isinstance(module, SplitBatchNorm2d):
            module.states = [KeyState.FRESH] * module.keys
    return copied


def _measure(
    segment_calls: Callable[[Tensor], SegmentCalls],
    model: Supernet,
    facts: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    batches: Sequence[int],
    repeats: int,
    image_size: int | tuple[int, int] | None,
    progress: Progress,
) -> LatencyTable:
    _check_counts(batches, repeats)
    image, entries = model.input_spec.shape(image_size), []
    for batch in sorted(set(batches)):
        images = torch.randn(batch, *image, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        calls = segment_calls(images)
        members = {(-1, number): prefix for number, prefix in enumerate(calls.prefixes)}
        samples = time_interleaved(
            {**calls.calls, **members},
            device,
            rounds=repeats,
            warm_up=WARM_UP,
            clock=timed_on_device,
            progress=progress,
            label=f"batch {batch}: round",
        )
        times = {path: _summary(milliseconds) for path, milliseconds in samples.items()}
        prefixes = tuple(times.pop(path) for path in members)
        if calls.cumulative:
            segments = {
                path: times[path] if path in calls.restarts else _difference(times[path], times[path[:-1]])
                for path in times
                if path
            }
            times = {(): times[()], **segments}
        choices = [len(options) for options in model.space.choices]
        entries.append(replace(_batch_times(batch, times, choices), prefixes=prefixes))
    return LatencyTable(
        **facts,
        model=model.spec,
        image_size=(image.height, image.width),
        kind="cuda" if device.type == "cuda" else "cpu",
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        entries=tuple(entries),
        members=tuple(map(model.member_of, model.space)) if isinstance(model, CompositeNetwork) else (),
    )


def _batch_times(batch: int, times: Mapping[SegmentKey, Time], choices: Sequence[int]) -> BatchTimes:
    segments = []
    for gate, count in enumerate(choices):
        row = [times[path] for path in segment_paths(choices, gate)]
        segments.append(tuple(tuple(row[i : i + count]) for i in range(0, len(row), count)))
    return BatchTimes(batch=batch, prefix=times[()], segments=tuple(segments))


def _summary(samples: Sequence[float]) -> Time:
    quantiles = torch.tensor([0.5, 0.95], dtype=torch.float64)
    p50, p95 = torch.tensor(samples, dtype=torch.float64).quantile(quantiles).tolist()
    return Time(round(p50, 6), round(p95, 6))


def _difference(whole: Time, before: Time) -> Time:
    """Return what a segment adds to the time of the path before it; noise must not make it negative."""
    p50 = max(0.0, whole.p50 - before.p50)
    return Time(p50, max(p50, whole.p95 - before.p95))
