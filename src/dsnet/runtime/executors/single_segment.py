"""Recorded parts for whoever asks for them one by one: a session with a cap, a cascade that is timed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.runtime.backends.base import Executable
from dsnet.runtime.executors.host import BucketedProgram
from dsnet.runtime.partition.segments import Segment, SegmentKey

__all__ = ["Ended", "any_number", "widened"]


class _Widened(Executable):
    """A part by its stand-in: features get channels of zeros, and keys the choice before."""

    def __init__(self, call: Executable, channels: int, choices: int, place: int) -> None:
        self.call, self.channels, self.choices, self.place = call, channels, choices, place

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x, *earlier = inputs
        keys = (number * self.choices + self.place for number in earlier)
        return self.call(F.pad(x, (0, 0, 0, 0, 0, self.channels - x.shape[1])), *keys)


class Ended(Executable):
    """A part with what is behind all parts, for images of one choice."""

    def __init__(self, call: Executable, end: Executable, place: int) -> None:
        self.call, self.end, self.place = call, end, place

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the detector answers."""
        (row,) = self.call(*inputs)
        return self.end(row, torch.full((len(row),), self.place, dtype=torch.long, device=row.device))


def widened(
    calls: Mapping[SegmentKey, Executable],
    parts: Mapping[SegmentKey, Segment],
    shared_segments: Mapping[SegmentKey, SegmentKey],
) -> dict[SegmentKey, Executable]:
    """Every part that has a stand-in."""
    made: dict[SegmentKey, Executable] = {}
    for history, other in shared_segments.items():
        before = sorted({part[-2] for part in shared_segments if len(part) == len(history)})
        channels = parts[other].shape.channels
        made[history] = _Widened(calls[other], channels, len(before), before.index(history[-2]))
    return made


def any_number(
    calls: Mapping[SegmentKey, Executable], buckets: Sequence[int], keyed: Collection[SegmentKey] = ()
) -> dict[SegmentKey, BucketedProgram]:
    """For whoever asks part by part (a session with a cap): all images at once."""
    most = buckets[-1]
    return {
        history: BucketedProgram({most: call}, {most: 1.0}, any_batch=True, by_history=history in keyed)
        for history, call in calls.items()
    }
