"""The images that a network takes."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsnet.counts import Shape
from dsnet.errors import DsnetError

__all__ = ["InputSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The images that a network takes.

    Attributes:
        image_size: Default side in pixels.
        stride: Both sides must be multiples of it.
        smallest: Both sides must be at least this long (0: one stride).
        channels: Number of channels.
        fixed: Whether ``image_size`` is the only possible side.

    Examples:
        >>> InputSpec(image_size=224, stride=32).shape((160, 192))
        Shape(channels=3, height=160, width=192)
    """

    image_size: int
    stride: int
    smallest: int = 0
    channels: int = 3
    fixed: bool = False

    def check(self, height: int, width: int) -> None:
        """Raise an error that names the nearest possible size, unless this one is."""
        if self.fixed and (height, width) != (self.image_size, self.image_size):
            raise DsnetError(
                f"image size {height} × {width} does not run: this network takes {self.image_size} × "
                f"{self.image_size} only"
            )
        nearest = (self._nearest(height), self._nearest(width))
        if nearest != (height, width):
            raise DsnetError(
                f"image size {height} × {width} does not run: both sides must be multiples of {self.stride}, "
                f"at least {self._minimum}; the nearest that runs is {nearest[0]} × {nearest[1]}"
            )

    @property
    def _minimum(self) -> int:
        return max(self.smallest, self.stride)

    def _nearest(self, side: int) -> int:
        return max(self._minimum, (side + self.stride // 2) // self.stride * self.stride)

    def shape(self, image_size: int | tuple[int, int] | None = None) -> Shape:
        """Return the shape of an image.

        Args:
            image_size: Side of the image, or (height, width) (default: the side in ``image_size``).

        Raises:
            DsnetError: The network does not run at this size; the message names the nearest that runs.
        """
        size = self.image_size if image_size is None else image_size
        try:
            height, width = map(operator.index, size if isinstance(size, tuple | list) else (size, size))
        except (TypeError, ValueError):
            raise DsnetError(f"an image size is one number or (height, width), not {image_size!r}") from None
        self.check(height, width)
        return Shape(self.channels, height, width)

    def check_images(self, x: Tensor, name: str, weight: Tensor) -> None:
        """Raise unless ``x`` are images that the network ``name`` takes, on the device of ``weight``."""
        takes = f"{name} takes images [batch, {self.channels}, height, width]"
        if not isinstance(x, Tensor):
            raise DsnetError(f"{takes} as a tensor, not a {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            kind = "nested tensor" if x.is_nested else f"{x.layout} tensor"
            raise DsnetError(f"{takes} as a dense tensor, not a {kind}; convert it (to_dense, torch.stack)")
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise DsnetError(f"{takes}, not a tensor of shape {list(x.shape)}")
        self.check(x.shape[2], x.shape[3])
        if x.device != weight.device:
            raise DsnetError(f"the images are on {x.device}, {name} is on {weight.device}; move one of them")
        if x.dtype != weight.dtype and not (
            x.is_floating_point() and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
        ):
            raise DsnetError(f"the images are {x.dtype}, {name} is {weight.dtype}; convert one of them")
