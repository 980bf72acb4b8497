"""Datasets whose images are held in memory as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.core.ranges import check_range
from dsnet.data.dataset import Crops, ImageDataset, channel_statistics, check_labels, chunks
from dsnet.errors import DsnetError

__all__ = ["InMemoryDataset"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InMemoryDataset(ImageDataset):
    """Images [N, 3, H, W] of bytes, with labels [N] and the names of the classes.

    With ``resize`` each batch is resized on its device when it is read; ``images`` keep their size.
    """

    crops_in_workers: ClassVar[bool] = False

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    resize: int | None = None  # side of the images of a batch; None: as they are stored
    ratio: float = 1.0  # that files were decoded with (see `load_dataset`); unused for stored pixels
    num_decode_errors: int = 0

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            shape = list(self.images.shape)
            raise DsnetError(
                f"{self.name}: images must be bytes [N, 3, H, W], not {self.images.dtype} {shape}"
            )
        check_range(self, "resize", least=1)
        check_labels(self.name, len(self.images), self.labels, self.classes)

    @property
    def size(self) -> int:
        """Side of the images of a batch in pixels."""
        return self.images.shape[-1] if self.resize is None else self.resize

    def to(self, device: torch.device | str) -> Self:
        """Return the dataset with its images on ``device``."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, indices: Tensor) -> Self:
        """Return the dataset of these images."""
        indices = indices.to(self.images.device)
        return replace(self, images=self.images[indices], labels=self.labels[indices])

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Compute mean and standard deviation of each channel, of values in [0, 1] before resizing."""
        return channel_statistics(chunks(self.images, 4096))

    def batches(
        self, order: Sequence[Tensor], *, crops: Crops | None = None, full: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images [1, B, 3, H, W] and labels [B] for each tensor of indices in ``order``."""
        if crops is not None:
            raise DsnetError(f"{self.name} is in memory: crop its batches on the device, not while loading")
        return self._batches(order)

    def _batches(self, order: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in order:
            indices = indices.to(self.images.device)
            yield self._resized(self.images[indices])[None], self.labels[indices]

    def _resized(self, images: Tensor) -> Tensor:
        if self.resize is None or images.shape[2:] == (self.resize, self.resize):
            return images
        size, antialias = (self.resize, self.resize), self.resize < max(images.shape[2:])
        resized = F.interpolate(
            images.float(), size, mode="bilinear", align_corners=False, antialias=antialias
        )
        return resized.round_().to(torch.uint8)
