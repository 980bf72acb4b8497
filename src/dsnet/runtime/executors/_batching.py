"""How many images are split into batches of the sizes that programs were compiled for."""

from __future__ import annotations

import threading
from collections.abc import Mapping

__all__ = ["BatchSplitter"]

EXACT = 256  # up to this number of images, at least, the split is optimal


class BatchSplitter:
    """Finds batch sizes that hold a number of images in the least time, by dynamic programming.

    Args:
        milliseconds: Time of one batch, by batch size.
    """

    def __init__(self, milliseconds: Mapping[int, float]) -> None:
        self.milliseconds = dict(milliseconds)
        self.best = min(milliseconds, key=lambda size: milliseconds[size] / size)
        self.exact = max(EXACT, 2 * max(milliseconds))
        self._time, self._last = [0.0], [0]  # by number of images: total time, size of the last batch
        self._splits: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()  # threads share plans

    def __call__(self, images: int) -> tuple[int, ...]:
        """Return the batch sizes, largest first; the last batch may be padded."""
        sizes = self._splits.get(images)
        if sizes is None:
            with self._lock:
                sizes = self._splits[images] = self._split(images)
        return sizes

    def time(self, images: int) -> float:
        """Return the milliseconds of all batches together."""
        return sum(self.milliseconds[size] for size in self(images))

    def _split(self, images: int) -> tuple[int, ...]:
        whole = -(-max(0, images - self.exact) // self.best)  # of many images, most run at the best size
        left = images - whole * self.best
        for n in range(len(self._time), left + 1):
            time, size = min((self._time[max(0, n - s)] + ms, s) for s, ms in self.milliseconds.items())
            self._time.append(time)
            self._last.append(size)
        sizes = [self.best] * whole
        while left > 0:
            sizes.append(self._last[left])
            left -= self._last[left]
        return tuple(sorted(sizes, reverse=True))
