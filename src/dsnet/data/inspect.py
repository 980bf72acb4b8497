"""Summarize a dataset without decoding it: its classes, counts and image sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dsnet.data.decode import DecodeError, ImageList, decode, open_header
from dsnet.data.lazy import LazyDataset
from dsnet.data.loading import first_names, has_no_splits, load_dataset
from dsnet.data.registry import Split, list_datasets
from dsnet.errors import DsnetError, printable
from dsnet.routes import evenly_spaced

__all__ = ["DatasetSummary", "inspect_dataset"]

SPLITS: tuple[Split, Split] = ("train", "test")
SIZE_SAMPLE = 100  # images whose headers are read
TIMING_SAMPLE = 9  # images that are decoded
MAX_SECONDS = 1.0  # for decoding them


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """Classes, counts and sizes of a dataset."""

    name: str
    classes: tuple[str, ...]
    counts: tuple[int, ...]  # training images of each class
    test: int  # number of test images
    side: int  # shorter side of the images in pixels, the median of a sample
    files: bool = True  # whether images are decoded from files; else they have a fixed size
    divided: bool = False  # whether the test split is taken from the same folders of classes
    decoding: float = 0.0  # seconds to decode one image

    @property
    def images(self) -> int:
        """Number of training images."""
        return sum(self.counts)

    def check(self) -> None:
        """Raise if a classifier cannot be trained on this dataset."""
        if len(self.classes) < 2:
            classes = printable(", ".join(self.classes), 60) or "none"
            raise DsnetError(f"{self.name} has one class ({classes}); telling apart takes at least two")
        empty = [name for name, count in zip(self.classes, self.counts, strict=True) if count == 0]
        if empty and Path(self.name).is_dir():  # tables may name classes without images
            raise DsnetError(
                f"{self.name} has classes without training images: {first_names(empty)}; add some, or remove "
                "the classes"
            )


def inspect_dataset(name: str, root: str | Path | None = None) -> DatasetSummary:
    """Summarize a dataset that `load_dataset` accepts, from the headers of its files and a few images."""
    train, test = (load_dataset(name, split, root=root, lazy=True) for split in SPLITS)
    counts = tuple(train.labels.bincount(minlength=len(train.classes)).tolist())
    summary = DatasetSummary(
        name=name, classes=train.classes, counts=counts, test=len(test), side=train.size, files=False
    )
    if not isinstance(train, LazyDataset):
        return summary
    divided = name not in list_datasets() and Path(name).is_dir() and has_no_splits(Path(name))
    seconds = list(_decode_seconds(train.items))
    return replace(
        summary,
        side=_median_side(train.items, name),
        files=True,
        divided=divided,
        decoding=statistics.median(seconds) if seconds else 0.0,
    )


def _median_side(items: ImageList, name: str) -> int:
    sides = []
    for index in evenly_spaced(len(items), SIZE_SAMPLE):
        try:
            with open_header(items.source(index)) as image:
                sides.append(int(min(image.size)))
        except DecodeError:
            continue
    if not sides:
        raise DsnetError(f"{name}: no image of a sample of {min(SIZE_SAMPLE, len(items))} could be read")
    return round(statistics.median(sides))


def _decode_seconds(items: ImageList) -> Iterator[float]:
    end = time.perf_counter() + MAX_SECONDS
    for index in evenly_spaced(len(items), TIMING_SAMPLE):
        start = time.perf_counter()
        if start > end:
            return
        try:
            decode(items.source(index), 128)
        except DecodeError:
            continue
        yield time.perf_counter() - start
