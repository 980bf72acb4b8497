"""Which images a network takes."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from dsnet.counts import Shape
from dsnet.errors import DsnetError

__all__ = ["InputSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Which images a network takes."""

    image_size: int  # the size it is made for
    stride: int  # both sides must be multiples of this
    smallest: int = 0  # and at least this long; 0: one stride
    channels: int = 3

    def check(self, height: int, width: int) -> None:
        """Raises an error that names the nearest size that runs."""
        near = (self._nearest(height), self._nearest(width))
        if near != (height, width):
            least = max(self.smallest, self.stride)
            raise DsnetError(
                f"image size {height} × {width} does not run: both sides must be multiples of {self.stride}, "
                f"at least {least}; the nearest that runs is {near[0]} × {near[1]}"
            )

    def _nearest(self, side: int) -> int:
        least = max(self.smallest, self.stride)
        return max(least, (side + self.stride // 2) // self.stride * self.stride)

    def shape(self, image_size: int | tuple[int, int] | None = None) -> Shape:
        """Shape of an image of this size (by default the one the network is made for), checked."""
        size = self.image_size if image_size is None else image_size
        try:
            height, width = map(operator.index, size if isinstance(size, tuple | list) else (size, size))
        except (TypeError, ValueError):
            raise DsnetError(f"an image size is one number or (height, width), not {image_size!r}") from None
        self.check(height, width)
        return Shape(self.channels, height, width)
