"""Into which batches images are divided, by measured times."""

from __future__ import annotations

import threading
from collections.abc import Mapping

__all__ = ["Division"]

EXACT = 256  # images up to which the best division is worked out, at least


class Division:
    """Batch sizes that hold any number of images in the least time; worked out as far as it was asked for."""

    def __init__(self, milliseconds: Mapping[int, float]) -> None:
        self.milliseconds = dict(milliseconds)
        self.best = min(milliseconds, key=lambda size: milliseconds[size] / size)
        self.exact = max(EXACT, 2 * max(milliseconds))
        self._least, self._last = [0.0], [0]  # by number of images: time of all batches, size of the last
        self._divided: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()  # threads share plans

    def __call__(self, images: int) -> tuple[int, ...]:
        """Largest first; the last may have room left, never as much as any batch holds."""
        found = self._divided.get(images)
        if found is None:
            with self._lock:
                found = self._divided[images] = self._divide(images)
        return found

    def _divide(self, images: int) -> tuple[int, ...]:
        whole = -(-max(0, images - self.exact) // self.best)  # far from the end only the best size counts
        left = images - whole * self.best
        self._work_out(left)
        sizes = [self.best] * whole
        while left > 0:
            sizes.append(self._last[left])
            left -= self._last[left]
        return tuple(sorted(sizes, reverse=True))

    def time(self, images: int) -> float:
        """Of all of them together."""
        return sum(self.milliseconds[size] for size in self(images))

    def _work_out(self, images: int) -> None:
        for n in range(len(self._least), images + 1):
            taken, size = min((self._least[max(0, n - s)] + ms, s) for s, ms in self.milliseconds.items())
            self._least.append(taken)
            self._last.append(size)
