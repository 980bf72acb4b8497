"""Images held in memory as bytes: what small sets are, and what every loader of one gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = ["ImageSet"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageSet:
    """Images [N, 3, H, W] of bytes, with labels [N] and the names of the classes."""

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            shape = list(self.images.shape)
            raise DsnetError(
                f"{self.name}: images must be bytes [N, 3, H, W], not {self.images.dtype} {shape}"
            )
        if len(self.labels) != len(self.images):
            raise DsnetError(f"{self.name}: {len(self.images)} images but {len(self.labels)} labels")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            span = f"{int(self.labels.min())} to {int(self.labels.max())}"
            raise DsnetError(f"{self.name}: labels {span} do not fit {len(self.classes)} classes")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set on a device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def take(self, positions: Tensor) -> ImageSet:
        """Some of the images."""
        at = positions.to(self.images.device)
        return replace(self, images=self.images[at], labels=self.labels[at])

    def hold_out(self, share: float = 0.1, *, seed: int = 0) -> tuple[ImageSet, ImageSet]:
        """(the rest, the held-out share), drawn within every class, the same for the same seed."""
        if not 0 < share < 1:
            raise DsnetError(f"the held-out share must lie between 0 and 1, not {share}")
        generator = torch.Generator().manual_seed(seed)
        labels = self.labels.cpu()
        held = torch.zeros(len(labels), dtype=torch.bool)
        for label in range(len(self.classes)):
            members = (labels == label).nonzero()[:, 0]
            order = members[torch.randperm(len(members), generator=generator)]
            held[order[: round(share * len(members))]] = True
        return self.take((~held).nonzero()[:, 0]), self.take(held.nonzero()[:, 0])

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel, of values in [0, 1]."""
        count, total, squares = 0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        for start in range(0, len(self), 4096):
            values = self.images[start : start + 4096].cpu().double() / 255
            count += values.numel() // 3
            total += values.sum((0, 2, 3))
            squares += values.square().sum((0, 2, 3))
        mean = total / count
        return tuple(mean.tolist()), tuple((squares / count - mean.square()).clamp(min=0).sqrt().tolist())

    def epoch(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (images, labels): shuffled and of equal size with a generator, else all in order."""
        count = len(self)
        order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        end = count if generator is None else count - count % batch_size if count >= batch_size else count
        for start in range(0, end, batch_size):
            at = order[start : start + batch_size].to(self.images.device)
            yield self.images[at], self.labels[at]
