"""The sets by name: ``load("cifar10", "train")``.

Files are looked for under ``root``, else under the folder that the environment variable DSNET_DATA names, in
the layout that their publishers give them. ``digits`` comes with scikit-learn and needs no files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dsnet.data.dataset import check_ratio
from dsnet.data.decode import decode_all
from dsnet.data.in_memory import ImageSet
from dsnet.data.lazy import LazySet
from dsnet.data.readers.folder import Listing, list_class_folders
from dsnet.data.readers.hub import list_hub
from dsnet.data.readers.parquet import list_parquet
from dsnet.data.readers.small_sets import (
    cifar10,
    cifar100,
    data_root,
    digits,
    existing,
    fashion_mnist,
    some_digits,
)
from dsnet.errors import DsnetError, shorten

__all__ = ["SETS", "Split", "Wanted", "data_root", "is_undivided", "load"]

Split = Literal["train", "test"]

LARGEST = 4 * 2**30  # bytes of decoded images that are held in memory unless told otherwise
PARTS = {"train": ("train",), "test": ("test", "val", "validation")}

IMAGENETTE = (
    "tench",
    "English springer",
    "cassette player",
    "chain saw",
    "church",
    "French horn",
    "garbage truck",
    "gas pump",
    "golf ball",
    "parachute",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What `load` was asked for."""

    split: Split
    root: str | Path | None = None
    size: int | None = None
    default_size: int | None = None
    ratio: float = 1.0
    lazy: bool | None = None

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise DsnetError(f"unknown split {shorten(self.split)}; possible: train, test")
        for size in (self.size, self.default_size):
            if size is not None and size < 1:
                raise DsnetError(f"images must have a size of at least 1, not {size}")
        check_ratio("ratio", self.ratio)


def load(
    name: str,
    split: Split,
    *,
    root: str | Path | None = None,
    size: int | None = None,
    default_size: int | None = None,
    ratio: float = 1.0,
    lazy: bool | None = None,
) -> ImageSet | LazySet:
    """A set by its name in `SETS`, or by where it is.

    - a folder with ``train`` and ``test`` (or ``val``) inside, one folder a class in them;
    - a folder with one folder a class right in it: a fifth of every class is the test split;
    - a Parquet file, or a folder of ``train*.parquet`` and ``test*.parquet`` (or ``val*``);
    - ``hf:NAME`` or ``hf:NAME:CONFIG`` of the Hugging Face Hub, ``hf:FOLDER`` in its layouts.

    ``size`` is the side of the images. Without one, files are decoded to ``default_size`` (128, for
    ``imagenet`` 224), and small images of a fixed size keep theirs; with one, these stay in memory as they
    are and batches of them are resized (see `ImageSet`).

    ``ratio`` is what ``size`` is of the shorter side that files are resized to before their centre is cut
    out. A ``lazy`` set is decoded on demand by worker processes; by default one that would take more than
    4 GiB in memory. Sets of a fixed size use neither.
    """
    name = os.fspath(name)
    wanted = Wanted(split=split, root=root, size=size, default_size=default_size, ratio=ratio, lazy=lazy)
    if name in SETS:
        return SETS[name](wanted)
    if name.startswith("hf:"):
        return _made(name, list_hub(name.removeprefix("hf:"), split), wanted)
    path = Path(name)
    if os.path.isdir(name):  # unlike Path.is_dir this takes a name that no file can have
        return _made(name, _in_folder(name, path, split), wanted)
    if path.suffix == ".parquet" and os.path.isfile(name):
        return _made(name, _table(path, split), wanted)
    raise DsnetError(
        f"there is no data set {shorten(name, 500)}: neither a folder, a .parquet file or hf:NAME, "
        f"nor one of {', '.join(SETS)}"
    )


def _made(name: str, listing: Listing, wanted: Wanted, *, size: int = 128) -> ImageSet | LazySet:
    size, classes = wanted.size or wanted.default_size or size, listing.classes
    lazy = len(listing.items) * 3 * size * size > LARGEST if wanted.lazy is None else wanted.lazy
    if lazy:
        return LazySet(
            name=name,
            items=listing.items,
            labels=listing.labels,
            classes=classes,
            size=size,
            ratio=wanted.ratio,
        )
    images, at = decode_all(listing.items, size, ratio=wanted.ratio)
    damaged = len(listing.items) - len(at)
    return ImageSet(
        name=name,
        images=images,
        labels=listing.labels[at],
        classes=classes,
        ratio=wanted.ratio,
        damaged=damaged,
    )


def _in_folder(name: str, folder: Path, split: Split) -> Listing:
    for part in PARTS[split]:
        if (folder / part).is_dir():
            return list_class_folders(folder / part)
        for place in (folder, folder / "data"):  # data: where repositories of the Hub have them
            if tables := sorted(place.glob(f"{part}*.parquet")):
                return list_parquet(tables)
    if is_undivided(folder):
        return list_class_folders(folder, split)
    tried = " or ".join(f"{part}/ or {part}*.parquet" for part in PARTS[split])
    hint = f"{folder} has neither these nor folders of classes"
    if (folder / "train").is_dir():
        hint = f"a folder of classes without splits, as {folder / 'train'} is, would be divided"
    raise DsnetError(f"the {split} split of {name} is not there; looked for {tried} in {folder}: {hint}")


def is_undivided(folder: Path) -> bool:
    """Whether a folder has folders of classes right in it, and no splits."""
    for part in (part for parts in PARTS.values() for part in parts):
        tables = (table for place in (folder, folder / "data") for table in place.glob(f"{part}*.parquet"))
        if (folder / part).is_dir() or any(tables):
            return False
    return any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())


def _table(path: Path, split: Split) -> Listing:
    """One file is the split that was asked for, unless its name says that it is another."""
    words = re.split("[^a-z]+", path.stem.lower())
    if any(word in PARTS["test" if split == "train" else "train"] for word in words):
        raise DsnetError(f"{path} is not the {split} split by its name; give a folder that has both splits")
    return list_parquet([path])


def _imagenette(wanted: Wanted) -> ImageSet | LazySet:
    """A Parquet file a split, or the published folders (imagenette2, imagenette2-160, imagenette2-320)."""
    base, part = data_root(wanted.root), "train" if wanted.split == "train" else "val"
    tables = [base / f"imagenette{s}-{part}.parquet" for s in ("128", "")]
    folders = [base / f"imagenette2{s}" / part for s in ("-160", "-320", "")]
    path = existing([*tables, *folders], "Imagenette")
    found = list_class_folders(path) if path.is_dir() else list_parquet([path])
    return _made("imagenette", Listing(items=found.items, labels=found.labels, classes=IMAGENETTE), wanted)


def _imagenet(wanted: Wanted) -> ImageSet | LazySet:
    """``{train,val}/WNID/*.JPEG`` in the root, or in ``imagenet`` or ``ILSVRC2012`` there."""
    base, part = data_root(wanted.root), "train" if wanted.split == "train" else "val"
    path = existing([base / "imagenet" / part, base / "ILSVRC2012" / part, base / part], "ImageNet")
    return _made("imagenet", list_class_folders(path), wanted, size=224)


SETS: dict[str, Callable[[Wanted], ImageSet | LazySet]] = {
    "digits": lambda wanted: replace(digits(wanted.split), resize=wanted.size),
    "cifar10": lambda wanted: replace(cifar10(wanted.split, wanted.root), resize=wanted.size),
    "cifar100": lambda wanted: replace(cifar100(wanted.split, wanted.root), resize=wanted.size),
    "fashion_mnist": lambda wanted: replace(fashion_mnist(wanted.split, wanted.root), resize=wanted.size),
    "digits_0_to_6": lambda wanted: replace(some_digits(wanted.split, 0, 6), resize=wanted.size),
    "digits_7_to_9": lambda wanted: replace(some_digits(wanted.split, 7, 9), resize=wanted.size),
    "imagenette": _imagenette,
    "imagenet": _imagenet,
}
