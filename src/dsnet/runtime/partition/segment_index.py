"""Which part serves images of which choices."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from dsnet.routes import Route
from dsnet.runtime.partition.segments import SegmentKey, segment_key

__all__ = ["SegmentIndex"]


class SegmentIndex:
    """The parts that there are, gate by gate.

    A part belongs to a gate's choice and the one before it, or stands in for all choices before. A *pair* is
    both as one number, by their places among those held; or, where parts stand in, the gate's own alone.
    """

    def __init__(self, parts: Collection[SegmentKey], choices: Sequence[Sequence[int]]) -> None:
        behind = [[part for part in parts if len(part) == gates] for gates in range(1, len(choices) + 1)]
        self.options = [sorted({part[-1] for part in own}) for own in behind]  # that there are parts for
        self.before = [sorted({part[-2] if part[1:] else 0 for part in own}) for own in behind]  # as made
        self.held = [sorted({*own, *some}) for own, some in zip(self.options, choices, strict=True)]
        self._of_pairs = [self._find_pairs(number) for number in range(len(choices))]

    def stands_in(self, number: int) -> bool:
        """Whether parts behind this gate are the same for all choices before it."""
        return len(self.before[number]) == 1

    def part(self, number: int, previous: int, choice: int) -> SegmentKey:
        """The one for images that took these choices."""
        return segment_key(number, self.before[number][0] if self.stands_in(number) else previous, choice)

    def of_pairs(self, number: int) -> list[SegmentKey]:
        """The part of every pair of a gate; there may be no such part."""
        return self._of_pairs[number]

    def _find_pairs(self, number: int) -> list[SegmentKey]:
        before = [0] if not number or self.stands_in(number) else self.held[number - 1]
        return [self.part(number, *pair) for pair in itertools.product(before, self.held[number])]

    def pair(self, part: SegmentKey) -> int:
        """Of the images that a part serves."""
        number = len(part) - 1
        own = self.held[number].index(part[-1])
        if self.stands_in(number):
            return own
        return self.held[number - 1].index(part[-2]) * len(self.held[number]) + own

    def way(self, route: Route) -> list[SegmentKey]:
        """The parts of a route."""
        pairs = zip((0, *route.choices[:-1]), route.choices, strict=True)
        return [self.part(number, *pair) for number, pair in enumerate(pairs)]
