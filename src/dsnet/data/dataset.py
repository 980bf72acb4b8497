"""The interface of image datasets, and what its implementations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dsnet.core.ranges import check_range
from dsnet.errors import DsnetError, shorten

__all__ = [
    "Crops",
    "ImageDataset",
    "channel_statistics",
    "check_class_names",
    "check_labels",
    "check_ratio",
    "chunks",
    "epoch_order",
    "stratified_split",
]

MAX_CLASS_NAME = 1000  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Crops:
    """Random resized crops: the number of views of an image, the range of their area, and the seed.

    The draws of an image depend on the seed and its index only. Use another seed in every epoch.
    """

    views: int = 1
    area: tuple[float, float] = (0.08, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(self, "views", least=1)
        check_range(self, "seed", least=0)
        low, high = self.area
        if not 0 < low <= high <= 1:
            raise DsnetError(f"area must be two shares with 0 < low <= high <= 1, not {low} and {high}")


class ImageDataset(ABC):
    """Labeled images, returned in batches of bytes on one device.

    Attributes:
        name: The name that it was loaded by.
        classes: Names of the classes.
        labels: Labels [N], on the device of the images, or on the CPU where images are decoded on demand.
        ratio: ``size`` divided by the shorter side to which files are resized before the center crop.
        crops_in_workers: Whether `batches` takes ``crops``. If not, crops are made on the device.
    """

    __slots__ = ()

    name: str
    classes: tuple[str, ...]
    labels: Tensor
    ratio: float
    crops_in_workers: ClassVar[bool]

    @property
    @abstractmethod
    def size(self) -> int:
        """Side of the images in pixels."""

    @property
    @abstractmethod
    def num_decode_errors(self) -> int:
        """Number of images that could not be decoded, as far as is known."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def subset(self, indices: Tensor) -> Self:
        """Return the dataset of these images."""

    @abstractmethod
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Compute the mean and the standard deviation of each channel, of values in [0, 1]."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """Return the same dataset with batches on ``device``."""

    @abstractmethod
    def batches(
        self, order: Sequence[Tensor], *, crops: Crops | None = None, full: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one batch for each tensor of indices in ``order``.

        Args:
            order: Indices of the images of each batch.
            crops: Random crops to take, V views of each image (default: one center crop).
            full: Replace images that cannot be decoded by others of the batch. Otherwise leave them out.

        Yields:
            Images [V, B, 3, H, W] of bytes, and labels [B].
        """

    def hold_out(self, share: float = 0.1, *, seed: int = 0) -> tuple[Self, Self]:
        """Split into (the rest, the held-out share), stratified by class and reproducible by ``seed``."""
        rest, held_out = stratified_split(self.labels.cpu(), len(self.classes), share, seed)
        return self.subset(rest), self.subset(held_out)

    def epoch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (images [B, 3, H, W], labels [B]) of one epoch.

        With a generator they are shuffled and of equal size, else in order and complete.
        """
        order = epoch_order(len(self), batch_size, generator)
        for images, labels in self.batches(order, full=generator is not None):
            yield images[0], labels


def epoch_order(count: int, batch_size: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Return the indices of each batch: shuffled and of equal size with a generator, else all in order."""
    if batch_size < 1:
        raise DsnetError(f"a batch has at least 1 image, not {batch_size}")
    if generator is None:
        return chunks(torch.arange(count), batch_size)
    end = count - count % batch_size if count >= batch_size else count
    return chunks(torch.randperm(count, generator=generator)[:end], batch_size)


def chunks(values: Tensor, size: int) -> list[Tensor]:
    """Split along the first dimension into chunks of ``size``; the last may be smaller."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def stratified_split(labels: Tensor, classes: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw a share of each class; return the indices of (the rest, that share)."""
    if not 0 < share < 1:
        raise DsnetError(f"the held-out share must lie between 0 and 1, not {share}")
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(classes):
        members = (labels == label).nonzero()[:, 0]
        order = members[torch.randperm(len(members), generator=generator)]
        held_out[order[: round(share * len(members))]] = True
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def channel_statistics(images: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation of each channel of bytes [B, 3, H, W], as values in [0, 1]."""
    count, total, squares = 0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for batch in images:
        values = batch.cpu().double() / 255
        count += values.numel() // 3
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
    if count == 0:
        raise DsnetError("cannot compute the channel statistics of a dataset without images")
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    std[std == 0] = 1  # constant channels are not scaled
    return tuple(mean.tolist()), tuple(std.tolist())


def check_ratio(name: str, ratio: float) -> None:
    """Raise unless images can be resized to ``size / ratio`` and cropped to ``size``."""
    number = isinstance(ratio, int | float) and not isinstance(ratio, bool)  # it may come from a file
    if not number or not 0 < ratio <= 1:
        raise DsnetError(f"{name} must lie above 0 and be at most 1, not {shorten(ratio)}")


def check_class_names(where: str, classes: Sequence[str]) -> None:
    """Raise if a name is too long for a checkpoint, before a network is trained."""
    longest = max(classes, key=len, default="")
    if len(longest) > MAX_CLASS_NAME:
        raise DsnetError(
            f"{where}: the class {shorten(longest, 80)} has a name of {len(longest):,} characters, "
            f"expected at most {MAX_CLASS_NAME}"
        )


def check_labels(name: str, count: int, labels: Tensor, classes: tuple[str, ...]) -> None:
    """Raise unless each of ``count`` images has a label that is the index of a class with a usable name."""
    check_class_names(name, classes)
    if len(labels) != count:
        raise DsnetError(f"{name}: {count} images but {len(labels)} labels")
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        span = f"{int(labels.min())} to {int(labels.max())}"
        raise DsnetError(f"{name}: labels {span} do not fit {len(classes)} classes")
