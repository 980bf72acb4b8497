"""Times every part of a network, for a table of latencies.

>>> import dsnet
>>> table = profile(dsnet.create_model("ds_mbnet_tiny"), batches=(1, 4), repeats=1)
>>> table.batches
(1, 4)
>>> table.costs(batch=4).unit  # an image's share of a batch of four
'ms'
"""

from __future__ import annotations

import copy
import datetime
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.group_by_route import Routable, Standing
from dsnet.models.supernet import ModelSpec
from dsnet.routing.latency import BatchTimes, DeviceKind, LatencyTable, Time, Weights, device_name
from dsnet.slicing import KeyState, SplitBatchNorm2d

__all__ = ["Progress", "check_counts", "copy_to_time", "measure", "profile", "silent"]

WARM_UP = 3  # rounds: kernels are chosen and memory is taken in the first ones

Progress = Callable[[Iterable[int], int, str], Iterable[int]]
"""(rounds, how many, what they are) → the rounds, passed on one by one; as `dsnet.cli.progress` does."""


def silent(items: Iterable[int], total: int, label: str) -> Iterable[int]:
    """Tells nobody."""
    return items


def profile(
    model: Supernet,
    *,
    batches: Sequence[int] = (1,),
    repeats: int = 30,
    image_size: int | tuple[int, int] | None = None,
    progress: Progress = silent,
) -> LatencyTable:
    """Times every part of the network, eager and in eval mode, on the device and in the precision it has.

    The parts take turns, so that a slow moment of the machine hits all of them. What runs is a copy: the
    network stays as it is, and statistics that its norms lack, for some routes or for all, do not matter.
    """
    weight = model.head.classifier.weight
    device, image = weight.device, model.input_spec.shape(image_size)
    if device.type not in get_args(DeviceKind):
        raise DsnetError(
            f"a network on {device} cannot be timed; move it to {' or '.join(get_args(DeviceKind))}"
        )
    check_counts(batches, repeats)
    copied = copy_to_time(model)
    with torch.inference_mode():
        return measure(
            copied,
            spec=model.spec,
            image=image,
            device=device,
            dtype=weight.dtype,
            backend="eager",
            backend_version=str(torch.__version__),
            memory="shared",
            batches=batches,
            repeats=repeats,
            progress=progress,
        )


def check_counts(batches: Sequence[int], repeats: int) -> None:
    """Raises where batch sizes or repeats are no positive integers."""
    for what, counts in (("batches", tuple(batches)), ("repeats", (repeats,))):
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise DsnetError(
                f"{what} must be positive integers, not {', '.join(map(repr, counts)) or 'none'}"
            )


def copy_to_time(model: Supernet) -> Supernet:
    """In eval mode, all norm keys as if fresh: those with statistics and those without then run alike."""
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        if isinstance(module, SplitBatchNorm2d):
            module.states = [KeyState.FRESH] * module.keys
    return copied


def measure(
    network: Routable[Any],
    *,
    spec: ModelSpec,
    image: Shape,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    backend_version: str,
    memory: Weights,
    batches: Sequence[int],
    repeats: int,
    progress: Progress = silent,
) -> LatencyTable:
    """Times every part of a network, or of what a runtime made of it, in turns.

    Each pair of a gate's choice and the one before it is timed behind the first way that leads there.
    """
    entries = []
    for batch in sorted(set(batches)):
        drawn = torch.randn(batch, *image, generator=torch.Generator().manual_seed(0))
        rounds = progress(range(WARM_UP + repeats), WARM_UP + repeats, f"batch {batch}: round")
        entries.append(_time_batch(network, drawn.to(device, dtype), rounds))
    return LatencyTable(
        model=spec,
        image_size=(image.height, image.width),
        kind="cuda" if device.type == "cuda" else "cpu",
        device=device_name(device),
        backend=backend,
        backend_version=backend_version,
        memory=memory,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),  # a class of its own, which is no plain data
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        entries=tuple(entries),
    )


def _time_batch(network: Routable[Any], x: Tensor, rounds: Iterable[int]) -> BatchTimes:
    calls = _calls(network, x)
    samples: dict[tuple[int, ...], list[float]] = {history: [] for history in calls}
    for number in rounds:
        for history, call in calls.items():
            taken = _milliseconds(call, x.device)
            if number >= WARM_UP:
                samples[history].append(taken)
    times = {history: _summary(taken) for history, taken in samples.items()}
    segments = []
    for gate, size in enumerate(network.choices):
        row = [times[history] for history in _histories(network.choices, gate)]
        segments.append(tuple(tuple(row[i : i + size]) for i in range(0, len(row), size)))
    return BatchTimes(batch=len(x), prefix=times[()], segments=tuple(segments))


def _histories(sizes: Sequence[int], gate: int) -> list[tuple[int, ...]]:
    """Every pair of a gate's choice and the one before it, each behind the first way that leads there."""
    pairs = (range(1 if earlier < gate - 1 else size) for earlier, size in enumerate(sizes[: gate + 1]))
    return list(itertools.product(*pairs))


def _calls(network: Routable[Any], x: Tensor) -> dict[tuple[int, ...], Callable[[], object]]:
    """The prefix and every segment, by the choices that lead through it, on what stands in front of it."""
    calls: dict[tuple[int, ...], Callable[[], object]] = {(): functools.partial(network.run_prefix, x)}
    states: dict[tuple[int, ...], Standing] = {(): network.run_prefix(x)}
    gates = len(network.choices)
    for gate in range(gates):
        for history in _histories(network.choices, gate):
            before = states[history[:-1]]
            if gate == gates - 1:
                calls[history] = functools.partial(network.run_last_segment, before, history)
                continue
            calls[history] = functools.partial(network.run_segment, before, history)
            if not any(history[:-1]):  # the first way to this choice: what is behind it starts here
                states[history] = network.run_segment(before, history)
    return calls


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begun)
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)  # nothing is queued: what the host takes to launch is then timed too
    start.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end))


def _summary(samples: list[float]) -> Time:
    at = torch.tensor([0.5, 0.95], dtype=torch.float64)
    p50, p95 = torch.tensor(samples, dtype=torch.float64).quantile(at).tolist()
    return Time(round(p50, 6), round(p95, 6))
