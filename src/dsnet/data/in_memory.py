"""Images held in memory as bytes: what small sets are, and what every loader of one gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.data.dataset import Crops, channel_statistics, check_labels, divided, epoch_order, held_out
from dsnet.errors import DsnetError

__all__ = ["ImageSet"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageSet:
    """Images [N, 3, H, W] of bytes, with labels [N] and the names of the classes.

    With ``resize`` they stay as small as they are, and every batch is resized when it is given out, where the
    images are: read them by `batches` or `epoch`.
    """

    crops_in_workers: ClassVar[bool] = False

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    resize: int | None = None  # pixels a side that batches are given out with; none: as the images lie
    ratio: float = 1.0  # that files were decoded with (see `load`); images of a fixed size are not cropped
    damaged: int = 0  # images that could not be read and are not among these

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            shape = list(self.images.shape)
            raise DsnetError(
                f"{self.name}: images must be bytes [N, 3, H, W], not {self.images.dtype} {shape}"
            )
        if self.resize is not None and self.resize < 1:
            raise DsnetError(f"{self.name}: images must have a size of at least 1, not {self.resize}")
        check_labels(self.name, len(self.images), self.labels, self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> int:
        """Side of the images as batches have them, in pixels."""
        return self.images.shape[-1] if self.resize is None else self.resize

    def to(self, device: torch.device | str) -> Self:
        """The same set on a device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def take(self, positions: Tensor) -> Self:
        """Some of the images."""
        at = positions.to(self.images.device)
        return replace(self, images=self.images[at], labels=self.labels[at])

    def hold_out(self, share: float = 0.1, *, seed: int = 0) -> tuple[Self, Self]:
        """(the rest, the held-out share), drawn within every class, the same for the same seed."""
        rest, held = held_out(self.labels.cpu(), len(self.classes), share, seed)
        return self.take(rest), self.take(held)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel, of values in [0, 1], before resizing."""
        return channel_statistics(divided(self.images, 4096))

    def batches(
        self, order: Sequence[Tensor], *, crops: Crops | None = None, full: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images [1, B, 3, H, W], labels [B]) for every tensor of positions in ``order``."""
        if crops is not None:
            raise DsnetError(f"{self.name} is in memory: crop its batches on the device, not while loading")
        return self._batches(order)

    def _batches(self, order: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for positions in order:
            at = positions.to(self.images.device)
            yield self._resized(self.images[at])[None], self.labels[at]

    def _resized(self, images: Tensor) -> Tensor:
        """Bytes [B, 3, H, W] with as many pixels as are asked for."""
        sides = images.shape[2:]
        if self.resize is None or sides == (self.resize, self.resize):
            return images
        smaller = self.resize < max(sides)
        size = (self.resize, self.resize)
        made = F.interpolate(images.float(), size, mode="bilinear", align_corners=False, antialias=smaller)
        return made.round_().to(torch.uint8)

    def epoch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (images, labels): shuffled and of equal size with a generator, else all in order."""
        for images, labels in self.batches(epoch_order(len(self), batch_size, generator)):
            yield images[0], labels
