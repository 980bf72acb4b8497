"""Programs of segments: compiled by a backend for batch sizes, and timed on the device."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsnet.core.timer import Progress, silent, time_interleaved
from dsnet.runtime.backends.base import Backend, Executable
from dsnet.runtime.executors.host import BucketedProgram
from dsnet.runtime.partition.segments import Segment, SegmentKey, SharedHead

__all__ = ["bucketed_programs", "compile_head", "compile_segments"]

WARM_UP, ROUNDS = 2, 7  # of timing


def bucketed_programs(
    segments: Mapping[SegmentKey, Segment],
    backend: Backend,
    buckets: Sequence[int],
    *,
    device: torch.device,
    precision: torch.dtype,
    progress: Progress = silent,
) -> dict[SegmentKey, BucketedProgram]:
    """Compile segments for batches of any size, which are split into ``buckets`` by measured times."""
    any_batch = backend.any_batch(device)
    measure = len(buckets) > 1 or not any_batch
    jobs = [(key, bucket) for key in segments for bucket in buckets]
    generator = torch.Generator().manual_seed(0)
    compilers, executables, calls = {}, {}, {}
    for key, bucket in progress(jobs, len(jobs), "program"):
        images = bucket if measure else 1
        example = _converted(segments[key].example(images, generator), device, precision)
        if key not in compilers:
            compilers[key] = backend.convert(segments[key].module, *example)
        executables[key, bucket] = compilers[key](*example)
        calls[key, bucket] = functools.partial(executables[key, bucket], *example)
    times = dict.fromkeys(calls, 1.0)
    if measure:
        samples = time_interleaved(
            calls,
            device,
            rounds=ROUNDS,
            warm_up=WARM_UP,
            progress=progress,
            label="timing of programs, round",
        )
        times = {job: statistics.median(milliseconds) for job, milliseconds in samples.items()}
    return {
        key: BucketedProgram(
            {bucket: executables[key, bucket] for bucket in buckets},
            {bucket: times[key, bucket] for bucket in buckets},
            any_batch=any_batch,
            by_history=segment.histories > 1,
        )
        for key, segment in segments.items()
    }


def compile_segments(
    segments: Mapping[SegmentKey, Segment],
    backend: Backend,
    *,
    device: torch.device,
    precision: torch.dtype,
    progress: Progress = silent,
) -> dict[SegmentKey, Executable]:
    """Compile segments by a backend whose executables take any batch size."""
    executables = {}
    for key in progress(list(segments), len(segments), "segment"):
        example = _converted(segments[key].example(2), device, precision)
        executables[key] = backend.convert(segments[key].module, *example)(*example)
    return executables


def compile_head(
    head: SharedHead, backend: Backend, *, device: torch.device, precision: torch.dtype
) -> Executable:
    """Compile the head behind all segments, for any batch size."""
    rows, choices = torch.randn(2, head.numbers), torch.zeros(2, dtype=torch.long)
    example = _converted((rows, choices), device, precision)
    return backend.convert(head.module, *example)(*example)


def _converted(
    example: tuple[Tensor, ...], device: torch.device, precision: torch.dtype
) -> tuple[Tensor, ...]:
    return tuple(x.to(device, precision if x.is_floating_point() else x.dtype) for x in example)
