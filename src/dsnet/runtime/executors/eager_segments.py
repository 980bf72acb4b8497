"""The segments of a graph executor one by one, outside its programs: for sessions with a cap, and timing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.runtime.backends.base import Executable
from dsnet.runtime.executors.host import BucketedProgram
from dsnet.runtime.partition.segments import Segment, SegmentKey

__all__ = ["SegmentWithHead", "programs_of", "unshared"]


class _PaddedSegment(Executable):
    """A shared segment for images of one choice before: pads their features, extends their histories."""

    def __init__(self, segment: Executable, channels: int, choices: int, index: int) -> None:
        self.segment, self.channels, self.choices, self.index = segment, channels, choices, index

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x, *history = inputs
        keys = (number * self.choices + self.index for number in history)
        return self.segment(F.pad(x, (0, 0, 0, 0, 0, self.channels - x.shape[1])), *keys)


class SegmentWithHead(Executable):
    """The last segment with the head behind it, for images of one choice."""

    def __init__(self, segment: Executable, head: Executable, index: int) -> None:
        self.segment, self.head, self.index = segment, head, index

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the head."""
        (row,) = self.segment(*inputs)
        return self.head(row, torch.full((len(row),), self.index, dtype=torch.long, device=row.device))


def unshared(
    executables: Mapping[SegmentKey, Executable],
    segments: Mapping[SegmentKey, Segment],
    shared_segments: Mapping[SegmentKey, SegmentKey],
) -> dict[SegmentKey, Executable]:
    """Return executables for the keys that a shared segment serves."""
    padded: dict[SegmentKey, Executable] = {}
    for key, other in shared_segments.items():
        previous = sorted({k[-2] for k in shared_segments if len(k) == len(key)})
        channels = segments[other].shape.channels
        padded[key] = _PaddedSegment(executables[other], channels, len(previous), previous.index(key[-2]))
    return padded


def programs_of(
    executables: Mapping[SegmentKey, Executable], buckets: Sequence[int], keyed: Collection[SegmentKey] = ()
) -> dict[SegmentKey, BucketedProgram]:
    """Wrap executables that take any batch size as the programs of a plan."""
    size = buckets[-1]
    return {
        key: BucketedProgram({size: executable}, {size: 1.0}, any_batch=True, by_history=key in keyed)
        for key, executable in executables.items()
    }
