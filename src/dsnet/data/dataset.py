"""What a training loop needs of a set of images, whether it is held in memory or decoded on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from dsnet.errors import DsnetError, shorten

__all__ = [
    "Crops",
    "Source",
    "channel_statistics",
    "check_labels",
    "check_ratio",
    "divided",
    "epoch_order",
    "held_out",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crops:
    """Random resized crops of every image: how many, which share of its area, and the seed.

    The draws of an image depend on the seed and on the image alone; give every epoch a seed of its own.
    """

    views: int = 1
    area: tuple[float, float] = (0.08, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.views < 1:
            raise DsnetError(f"views must be at least 1, not {self.views}")
        low, high = self.area
        if not 0 < low <= high <= 1:
            raise DsnetError(f"area must be two shares with 0 < low <= high <= 1, not {low} and {high}")
        if self.seed < 0:
            raise DsnetError(f"the seed of crops must be at least 0, not {self.seed}")


class Source(Protocol):
    """Images with labels, given out in batches of bytes on one device."""

    @property
    def name(self) -> str:
        """What it was loaded as."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""

    @property
    def size(self) -> int:
        """Side of the images, in pixels."""

    @property
    def ratio(self) -> float:
        """What the side is of the shorter side that files are resized to before their centre is kept."""

    @property
    def labels(self) -> Tensor:
        """[N]: where the images are, or on the CPU where they are decoded on demand."""

    @property
    def damaged(self) -> int:
        """Images that could not be read, as far as is known."""

    @property
    def crops_in_workers(self) -> bool:
        """Whether `batches` takes crops; a set in memory does not, its views are made on the device."""

    def __len__(self) -> int: ...

    def take(self, positions: Tensor) -> Self:
        """Some of the images."""

    def hold_out(self, share: float = 0.1, *, seed: int = 0) -> tuple[Self, Self]:
        """(the rest, the held-out share), drawn within every class, the same for the same seed."""

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel, of values in [0, 1]."""

    def to(self, device: torch.device | str) -> Self:
        """The same set, its batches on a device."""

    def batches(
        self, order: Sequence[Tensor], *, crops: Crops | None = None, full: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images [V, B, 3, H, W] of bytes, labels [B]) for every tensor of positions in ``order``.

        Without ``full`` a batch lacks images that cannot be read; else others stand in for them.
        """

    def epoch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(images [B, 3, H, W], labels [B]): shuffled and of equal size with a generator, else in order."""


def epoch_order(count: int, batch_size: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Positions of every batch: shuffled and of equal size with a generator, else all in order."""
    if batch_size < 1:
        raise DsnetError(f"a batch has at least 1 image, not {batch_size}")
    if generator is None:
        return divided(torch.arange(count), batch_size)
    end = count - count % batch_size if count >= batch_size else count
    return divided(torch.randperm(count, generator=generator)[:end], batch_size)


def divided(positions: Tensor, size: int) -> list[Tensor]:
    """Parts of this size, and what is left."""
    return [positions[start : start + size] for start in range(0, len(positions), size)]


def held_out(labels: Tensor, classes: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Positions of (the rest, the held-out share), drawn within every class."""
    if not 0 < share < 1:
        raise DsnetError(f"the held-out share must lie between 0 and 1, not {share}")
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(classes):
        members = (labels == label).nonzero()[:, 0]
        order = members[torch.randperm(len(members), generator=generator)]
        held[order[: round(share * len(members))]] = True
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def channel_statistics(images: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel of images [B, 3, H, W] of bytes, as values in [0, 1]."""
    count, total, squares = 0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for some in images:
        values = some.cpu().double() / 255
        count += values.numel() // 3
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
    if count == 0:
        raise DsnetError("a set without images has no statistics")
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    std[std == 0] = 1  # a channel that is the same everywhere says nothing
    return tuple(mean.tolist()), tuple(std.tolist())


def check_ratio(name: str, ratio: float) -> None:
    """Raises unless images can be resized to ``size / ratio`` and cropped to ``size``."""
    number = isinstance(ratio, int | float) and not isinstance(ratio, bool)  # it may come from a file
    if not number or not 0 < ratio <= 1:
        raise DsnetError(f"{name} must lie above 0 and be at most 1, not {shorten(ratio)}")


def check_labels(name: str, count: int, labels: Tensor, classes: tuple[str, ...]) -> None:
    """One label an image, each of them a class."""
    if len(labels) != count:
        raise DsnetError(f"{name}: {count} images but {len(labels)} labels")
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        span = f"{int(labels.min())} to {int(labels.max())}"
        raise DsnetError(f"{name}: labels {span} do not fit {len(classes)} classes")
