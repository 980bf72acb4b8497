"""Which segment serves images of which choices."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from dsnet.runtime.partition.segments import SegmentKey, segment_key

__all__ = ["SegmentIndex"]


class SegmentIndex:
    """The segments of a plan, gate by gate.

    A segment serves a choice of its gate and the choice before it, or is shared by all choices before. A
    *pair* is both as one index among the choices that occur; where segments are shared, it is the index of
    the gate's own choice.

    Args:
        keys: Keys of the segments.
        scored: Choices that every gate scores.
    """

    def __init__(self, keys: Collection[SegmentKey], scored: Sequence[Sequence[int]]) -> None:
        by_gate = [[key for key in keys if len(key) == gates] for gates in range(1, len(scored) + 1)]
        self.compiled = [sorted({key[-1] for key in own}) for own in by_gate]  # choices with a segment
        self.previous = [sorted({key[-2] if key[1:] else 0 for key in own}) for own in by_gate]
        self.choices = [sorted({*own, *some}) for own, some in zip(self.compiled, scored, strict=True)]
        self._keys = [self._keys_of(gate) for gate in range(len(scored))]

    def is_shared(self, gate: int) -> bool:
        """Return whether the segments behind a gate are the same for all choices before it."""
        return len(self.previous[gate]) == 1

    def key(self, gate: int, previous: int, choice: int) -> SegmentKey:
        """Return the key of the segment for images of these two choices."""
        return segment_key(gate, self.previous[gate][0] if self.is_shared(gate) else previous, choice)

    def keys(self, gate: int) -> list[SegmentKey]:
        """Return the key of every pair of a gate; some may have no segment."""
        return self._keys[gate]

    def _keys_of(self, gate: int) -> list[SegmentKey]:
        previous = [0] if not gate or self.is_shared(gate) else self.choices[gate - 1]
        return [self.key(gate, *pair) for pair in itertools.product(previous, self.choices[gate])]

    def pair(self, key: SegmentKey) -> int:
        """Return the pair that a segment serves."""
        gate = len(key) - 1
        index = self.choices[gate].index(key[-1])
        if self.is_shared(gate):
            return index
        return self.choices[gate - 1].index(key[-2]) * len(self.choices[gate]) + index

    def path(self, choices: Sequence[int]) -> list[SegmentKey]:
        """Return the keys of the segments behind the prefix, for the choices of the first gates."""
        return [self.key(gate, *pair) for gate, pair in enumerate(zip((0, *choices), choices, strict=False))]
