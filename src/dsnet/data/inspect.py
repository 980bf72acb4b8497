"""What a data set has, before it is decoded: how many images of which classes, and how large they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dsnet.data.decode import DamagedError, Items, decode, open_header
from dsnet.data.lazy import LazySet
from dsnet.data.registry import SETS, Split, is_undivided, load
from dsnet.errors import DsnetError, printable
from dsnet.routes import evenly

__all__ = ["Survey", "survey"]

SPLITS: tuple[Split, Split] = ("train", "test")
SAMPLE = 100  # images whose size is looked at
TIMED = 1.0  # seconds at most that are spent on decoding a few


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a data set has."""

    name: str
    classes: tuple[str, ...]
    counts: tuple[int, ...]  # training images of every class
    test: int
    side: int  # shorter side of the images, in pixels: the median of a sample
    files: bool = True  # whether they are decoded to a size; else they have theirs
    divided: bool = False  # whether the test images were taken out of the same folders of classes
    decoding: float = 0.0  # seconds that one takes

    @property
    def images(self) -> int:
        """Of the training split."""
        return sum(self.counts)

    def check(self) -> None:
        """Raises where nothing can be learnt from it."""
        if len(self.classes) < 2:
            only = printable(", ".join(self.classes), 60) or "none"
            raise DsnetError(f"{self.name} has one class ({only}); telling apart takes at least two")
        empty = [name for name, count in zip(self.classes, self.counts, strict=True) if count == 0]
        if empty and Path(self.name).is_dir():  # tables may name classes that they have none of
            named = ", ".join(printable(name, 60) for name in empty[:5]) + ", …" * (len(empty) > 5)
            raise DsnetError(
                f"{self.name} has classes without training images: {named}; add some, or remove the classes"
            )


def survey(name: str, root: str | Path | None = None) -> Survey:
    """Looks at a data set as `load` takes it; of files only the beginnings are read, and a few decoded."""
    train, test = (load(name, split, root=root, lazy=True) for split in SPLITS)
    counts = tuple(train.labels.bincount(minlength=len(train.classes)).tolist())
    found = Survey(
        name=name, classes=train.classes, counts=counts, test=len(test), side=train.size, files=False
    )
    if not isinstance(train, LazySet):
        return found
    divided = name not in SETS and Path(name).is_dir() and is_undivided(Path(name))
    side, decoding = _side(train.items, name), _decoding(train.items)
    return replace(found, side=side, files=True, divided=divided, decoding=decoding)


def _side(items: Items, name: str) -> int:
    sides = [side for at in evenly(len(items), SAMPLE) if (side := _shorter(items.source(at)))]
    if not sides:
        raise DsnetError(f"{name}: no image of a sample of {min(SAMPLE, len(items))} could be read")
    return round(statistics.median(sides))


def _shorter(source: str | bytes) -> int | None:
    """The shorter side, from the beginning of a file; none where it is damaged."""
    try:
        with open_header(source) as opened:
            return int(min(opened.size))
    except DamagedError:
        return None


def _decoding(items: Items) -> float:
    taken = list(_times(items))
    return statistics.median(taken) if taken else 0.0


def _times(items: Items) -> Iterator[float]:
    end = time.perf_counter() + TIMED
    for at in evenly(len(items), 9):
        start = time.perf_counter()
        if start > end:
            return
        try:
            decode(items.source(at), 128)
        except DamagedError:
            continue
        yield time.perf_counter() - start
