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
from typing import get_args

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models import State, Supernet
from dsnet.routing.latency import BatchTimes, DeviceKind, LatencyTable, Time, device_name
from dsnet.slicing import KeyState, SplitBatchNorm2d

__all__ = ["profile"]

WARM_UP = 3  # rounds: kernels are chosen and memory is taken in the first ones

Progress = Callable[[Iterable[int], int, str], Iterable[int]]
"""(rounds, how many, what they are) → the rounds, passed on one by one; as `dsnet.cli.progress` does."""


def _silent(items: Iterable[int], total: int, label: str) -> Iterable[int]:
    return items


def profile(
    model: Supernet,
    *,
    batches: Sequence[int] = (1,),
    repeats: int = 30,
    image_size: int | tuple[int, int] | None = None,
    progress: Progress = _silent,
) -> LatencyTable:
    """Times every part of the network, eager and in eval mode, on the device and in the precision it has.

    The parts take turns, so that a slow moment of the machine hits all of them. What runs is a copy: the
    network stays as it is, and statistics that its norms lack, for some routes or for all, do not matter.
    """
    weight = model.head.classifier.weight
    device, image = weight.device, model.geometry.shape(image_size)
    if device.type not in get_args(DeviceKind):
        raise DsnetError(
            f"a network on {device} cannot be timed; move it to {' or '.join(get_args(DeviceKind))}"
        )
    for what, counts in (("batches", tuple(batches)), ("repeats", (repeats,))):
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise DsnetError(
                f"{what} must be positive integers, not {', '.join(map(repr, counts)) or 'none'}"
            )
    copied = _copy_to_time(model)
    entries = []
    for batch in sorted(set(batches)):
        drawn = torch.randn(batch, *image, generator=torch.Generator().manual_seed(0))
        rounds = progress(range(WARM_UP + repeats), WARM_UP + repeats, f"batch {batch}: round")
        entries.append(_measure(copied, drawn.to(device, weight.dtype), rounds))
    return LatencyTable(
        model=model.spec,
        image_size=(image.height, image.width),
        kind="cuda" if device.type == "cuda" else "cpu",
        device=device_name(device),
        backend="eager",
        dtype=str(weight.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),  # a class of its own, which is no plain data
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        entries=tuple(entries),
    )


def _copy_to_time(model: Supernet) -> Supernet:
    """In eval mode, all norm keys as if fresh: those with statistics and those without then run alike."""
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        if isinstance(module, SplitBatchNorm2d):
            module.states = [KeyState.FRESH] * module.keys
    return copied


@torch.inference_mode()
def _measure(model: Supernet, x: Tensor, rounds: Iterable[int]) -> BatchTimes:
    calls = _calls(model, x)
    samples: dict[tuple[int, ...], list[float]] = {history: [] for history in calls}
    for number in rounds:
        for history, call in calls.items():
            taken = _milliseconds(call, x.device)
            if number >= WARM_UP:
                samples[history].append(taken)
    times = {history: _summary(taken) for history, taken in samples.items()}
    sizes = [len(row) for row in model.slice_table]
    segments = []
    for gate, size in enumerate(sizes):
        row = [times[history] for history in _histories(sizes, gate)]
        segments.append(tuple(tuple(row[i : i + size]) for i in range(0, len(row), size)))
    return BatchTimes(batch=len(x), prefix=times[()], segments=tuple(segments))


def _histories(sizes: Sequence[int], gate: int) -> list[tuple[int, ...]]:
    """Every pair of a gate's choice and the one before it, each behind the first way that leads there."""
    pairs = (range(1 if earlier < gate - 1 else size) for earlier, size in enumerate(sizes[: gate + 1]))
    return list(itertools.product(*pairs))


def _calls(model: Supernet, x: Tensor) -> dict[tuple[int, ...], Callable[[], object]]:
    """The prefix and every segment, by the choices that lead through it, on what stands in front of it."""
    calls: dict[tuple[int, ...], Callable[[], object]] = {(): functools.partial(model.enter, x)}
    states: dict[tuple[int, ...], State] = {(): model.enter(x)}
    sizes = [len(row) for row in model.slice_table]
    for gate in range(len(sizes)):
        for history in _histories(sizes, gate):
            before = states[history[:-1]]
            if gate == len(sizes) - 1:
                calls[history] = functools.partial(model.finish, before, history)
                continue
            calls[history] = functools.partial(model.advance, before, history)
            if not any(history[:-1]):  # the first way to this choice: what is behind it starts here
                states[history] = model.advance(before, history)
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
