"""Datasets whose images are decoded on demand by worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from dsnet.core.cpus import available_cpus
from dsnet.core.ranges import check_range
from dsnet.data._decode_workers import BatchDecoder, decode_batches
from dsnet.data.dataset import Crops, ImageDataset, channel_statistics, check_labels, check_ratio, chunks
from dsnet.data.decode import DecodeErrors, ImageList, pillow
from dsnet.errors import DsnetError

__all__ = ["LazyDataset", "default_workers"]

CPU = torch.device("cpu")
STATISTICS_SAMPLE = 2000  # images


def default_workers() -> int:
    """Return the default number of workers, which leaves one CPU to the training process."""
    return min(8, available_cpus() - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LazyDataset(ImageDataset):
    """Images that worker processes read and decode batch by batch; labels [N] are on the CPU.

    An image that cannot be decoded is replaced, with its label, by the next good image of its batch, so that
    batches keep their size. It is reported once, and too many such images stop the run (`DecodeErrors`).

    Workers start anew for each pass and import the main script. A script that uses them therefore needs
    the guard ``if __name__ == "__main__":``.
    """

    crops_in_workers: ClassVar[bool] = True

    name: str
    items: ImageList = field(repr=False)
    labels: Tensor = field(repr=False)
    classes: tuple[str, ...]
    size: int = field()
    ratio: float = 1.0  # size / the shorter side that images are resized to; 0.875 is usual for ImageNet
    workers: int = field(default_factory=default_workers)  # 0: decode in this process
    prefetch: int = 2  # batches that each worker decodes ahead
    device: torch.device = CPU
    indices: Tensor | None = field(default=None, repr=False)  # [N] into items; None: all, in order
    decode_errors: DecodeErrors = field(default_factory=DecodeErrors, repr=False)  # shared with subsets

    def __post_init__(self) -> None:
        count = len(self.items) if self.indices is None else len(self.indices)
        check_labels(self.name, count, self.labels, self.classes)
        check_ratio(f"{self.name}: ratio", self.ratio)
        check_range(self, "size", "prefetch", least=1)
        check_range(self, "workers", least=0)

    @property
    def num_decode_errors(self) -> int:
        """Number of images that could not be decoded, of those read so far."""
        return len(self.decode_errors.reasons)

    def to(self, device: torch.device | str) -> Self:
        """Return the same dataset with batches on ``device``."""
        return replace(self, device=torch.device(device))

    def subset(self, indices: Tensor) -> Self:
        """Return the dataset of these images."""
        indices = indices.cpu()
        return replace(self, indices=self._item_indices(indices), labels=self.labels[indices])

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Compute mean and standard deviation of each channel from at most 2,000 evenly spaced images."""
        count = min(len(self), STATISTICS_SAMPLE)
        sample = torch.linspace(0, len(self) - 1, count, dtype=torch.float64).round().long()
        return channel_statistics(images[0] for images, _ in self.to("cpu").batches(chunks(sample, 64)))

    def batches(
        self, order: Sequence[Tensor], *, crops: Crops | None = None, full: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images [V, B, 3, size, size] and labels [B] for each tensor of indices in ``order``.

        V is 1 without ``crops``. The crops of an image depend on their seed and on its index among the
        items, not on workers or batches. Without ``full`` images that cannot be decoded are left out.
        """
        pillow()  # raises here rather than in the workers
        order = [indices.cpu() for indices in order]
        decoded = decode_batches(
            BatchDecoder(self.items, self.size, self.ratio, crops),
            [self._item_indices(indices).tolist() for indices in order],
            workers=self.workers,
            prefetch=self.prefetch,
            pin_memory=self.device.type == "cuda",
        )
        for indices, (images, shown, errors) in zip(order, decoded, strict=True):
            for item, reason in errors:
                self.decode_errors.add(self.items.name(item), reason)
            if len(indices) and not shown:
                names = ", ".join(self.items.name(item) for item, _ in errors[:5])
                raise DsnetError(f"none of the {len(indices)} images of a batch can be read: {names}")
            if not full:
                shown = [position for position, source in enumerate(shown) if position == source]
                images = images[:, shown]
            labels = self.labels[indices[shown]]
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _item_indices(self, indices: Tensor) -> Tensor:
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            span = f"{int(indices.min())} to {int(indices.max())}"
            raise DsnetError(f"{self.name} has {len(self)} images; there are no indices {span}")
        return indices if self.indices is None else self.indices[indices]
