"""Compressed images with labels, as readers of files return them, and the dataset of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsnet.data.decode import ImageList, decode_all
from dsnet.data.in_memory import InMemoryDataset
from dsnet.data.lazy import LazyDataset
from dsnet.data.registry import DatasetRequest

__all__ = ["MAX_IN_MEMORY_BYTES", "LabeledImages"]

MAX_IN_MEMORY_BYTES = 4 * 2**30  # of decoded images; larger datasets are lazy by default


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabeledImages:
    """Images to decode, with labels [N] and the names of the classes."""

    items: ImageList
    labels: Tensor
    classes: tuple[str, ...]

    def to_dataset(
        self, name: str, request: DatasetRequest, *, default_size: int = 128
    ) -> InMemoryDataset | LazyDataset:
        """Decode all images, or return a dataset that decodes them on demand, as the request says."""
        size = request.size or request.default_size or default_size
        lazy = request.lazy
        if lazy is None:
            lazy = len(self.items) * 3 * size * size > MAX_IN_MEMORY_BYTES
        if lazy:
            return LazyDataset(
                name=name,
                items=self.items,
                labels=self.labels,
                classes=self.classes,
                size=size,
                ratio=request.ratio,
            )
        images, indices = decode_all(self.items, size, ratio=request.ratio)
        return InMemoryDataset(
            name=name,
            images=images,
            labels=self.labels[indices],
            classes=self.classes,
            ratio=request.ratio,
            num_decode_errors=len(self.items) - len(indices),
        )
