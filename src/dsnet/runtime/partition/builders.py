"""Parts as programs of a backend, one for every batch size, each timed on the device."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsnet.core.timer import Progress, silent, time_interleaved
from dsnet.runtime.backends.base import Backend, Executable
from dsnet.runtime.executors.host import BucketedProgram
from dsnet.runtime.partition.segments import Segment, SegmentKey, SharedHead

__all__ = ["make_calls", "make_end", "bucketed_programs"]

WARM_UP, ROUNDS = 2, 7  # of timing


def bucketed_programs(
    parts: Mapping[SegmentKey, Segment],
    backend: Backend,
    buckets: Sequence[int],
    *,
    device: torch.device,
    precision: torch.dtype,
    progress: Progress = silent,
) -> dict[SegmentKey, BucketedProgram]:
    """Every part for any number of images, in batches of these sizes."""
    jobs = [(history, bucket) for history in parts for bucket in buckets]
    examples: dict[tuple[SegmentKey, int], tuple[Tensor, ...]] = {}
    made: dict[SegmentKey, dict[int, Executable]] = {history: {} for history in parts}
    any_batch = backend.any_batch(device)
    choose = len(buckets) > 1 or not any_batch  # else there is nothing to measure
    generator = torch.Generator().manual_seed(0)
    makers = {}
    for history, bucket in progress(jobs, len(jobs), "program"):
        part = parts[history]
        example = _placed(part.example(bucket if choose else 1, generator), device, precision)
        if history not in makers:
            makers[history] = backend.convert(part.module, *example)
        made[history][bucket] = makers[history](*example)
        examples[history, bucket] = example
    calls: dict[Any, Callable[[], object]]
    calls = {job: functools.partial(made[job[0]][job[1]], *examples[job]) for job in jobs}
    times = _milliseconds(calls, device, progress) if choose else dict.fromkeys(calls, 1.0)
    return {
        history: BucketedProgram(
            executables,
            {bucket: times[history, bucket] for bucket in buckets},
            any_batch=any_batch,
            by_history=parts[history].histories > 1,
        )
        for history, executables in made.items()
    }


def make_calls(
    parts: Mapping[SegmentKey, Segment],
    backend: Backend,
    *,
    device: torch.device,
    precision: torch.dtype,
    progress: Progress = silent,
) -> dict[SegmentKey, Executable]:
    """Every part for any number of images, by a backend that makes such."""
    calls = {}
    for history in progress(list(parts), len(parts), "part"):
        example = _placed(parts[history].example(2), device, precision)
        calls[history] = backend.convert(parts[history].module, *example)(*example)
    return calls


def make_end(
    end: SharedHead, backend: Backend, *, device: torch.device, precision: torch.dtype
) -> Executable:
    """The same for what is behind all parts."""
    row, which = torch.randn(2, end.numbers), torch.zeros(2, dtype=torch.long)
    example = _placed((row, which), device, precision)
    return backend.convert(end.module, *example)(*example)


def _placed(example: tuple[Tensor, ...], device: torch.device, precision: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(device, precision if x.is_floating_point() else x.dtype) for x in example)


def _milliseconds(
    calls: dict[Any, Callable[[], object]], device: torch.device, progress: Progress
) -> dict[Any, float]:
    """Return the median time of each."""
    label = "timing of programs, round"
    samples = time_interleaved(calls, device, rounds=ROUNDS, warm_up=WARM_UP, progress=progress, label=label)
    return {job: statistics.median(times) for job, times in samples.items()}
