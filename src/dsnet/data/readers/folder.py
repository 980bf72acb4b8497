"""Lists of compressed images, and the folders of classes that they come from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dsnet.data.decode import Items
from dsnet.errors import DsnetError, printable, shorten

__all__ = ["Listing", "Paths", "label_tensor", "list_class_folders", "numbered", "pick_columns"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff"}
MOST_CLASSES = 10**6
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")
TEST_SHARE = 0.2  # of every class, where a folder of classes is divided


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listing:
    """Images that are there to be decoded, with labels [N] and the names of the classes."""

    items: Items
    labels: Tensor
    classes: tuple[str, ...]


class Paths:
    """Files below a folder.

    Their names are one block of bytes: a million strings would take long to send to every worker.
    """

    def __init__(self, folder: str | Path, files: Iterable[str]) -> None:
        names = [os.fsencode(file) for file in files]
        self.folder = os.path.abspath(folder)  # workers may start elsewhere
        self.block = b"".join(names)
        self.bounds = np.cumsum([0, *map(len, names)])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def source(self, at: int) -> str:
        """The path."""
        start, end = self.bounds[at : at + 2].tolist()
        return os.path.join(self.folder, os.fsdecode(self.block[start:end]))

    def name(self, at: int) -> str:
        """The path."""
        return self.source(at)


def list_class_folders(folder: Path, part: Literal["train", "test"] | None = None) -> Listing:
    """Images of ``folder/CLASS/*.jpg``, and of folders in there; classes in alphabetical order.

    With a ``part`` only those of it: a fifth of every class is for testing, the same ones every time.
    """
    classes = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not classes:
        raise DsnetError(f"{folder} has no folders: one folder a class is needed")
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            (*Path(os.path.relpath(inside, folder)).parts, file)
            for inside, _, names in os.walk(folder / name)
            for file in names
            if os.path.splitext(file)[1].lower() in SUFFIXES and not file.startswith(".")
        )
        if part is not None:
            found = _part(found, part)
        files += [os.path.join(*parts) for parts in found]
        labels += [label] * len(found)
    if not files and part == "test":
        raise DsnetError(f"{folder} has at most one image a class: none is left to test with")
    if not files:
        raise DsnetError(f"{folder} has class folders but no images ({', '.join(sorted(SUFFIXES))}) in them")
    return Listing(items=Paths(folder, files), labels=torch.tensor(labels), classes=tuple(classes))


def _part(files: list[tuple[str, ...]], part: Literal["train", "test"]) -> list[tuple[str, ...]]:
    """The files of a part, by what their names hash to: files that are added later move few others."""
    order = sorted(files, key=lambda parts: hashlib.sha256(os.fsencode("/".join(parts))).digest())
    test = set(order[: max(1, round(TEST_SHARE * len(files)))] if len(files) > 1 else ())
    return [file for file in files if (file in test) == (part == "test")]


def pick_columns(columns: Sequence[str], where: str) -> tuple[str, str]:
    """Which columns of a table hold images and labels."""
    chosen = []
    for names in (IMAGE_COLUMNS, LABEL_COLUMNS):
        found = next((name for name in names if name in columns), None)
        if found is None:
            has = printable(", ".join(columns), 500)
            raise DsnetError(f"{where} has no column {names[0]}; it has {has} (possible: {', '.join(names)})")
        chosen.append(found)
    return chosen[0], chosen[1]


def label_tensor(labels: Sequence[object], where: str) -> Tensor:
    """The labels of a table, which must be whole numbers."""
    for row, label in enumerate(labels):
        if not isinstance(label, int) or not -(2**63) <= label < 2**63:
            raise DsnetError(f"{where}, row {row}: a label must be a whole number, not {shorten(label)}")
    return torch.tensor(labels, dtype=torch.long)


def numbered(labels: Tensor) -> tuple[str, ...]:
    """Names for classes that have none."""
    if len(labels) == 0:
        return ()
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= MOST_CLASSES:
        raise DsnetError(f"labels must lie between 0 and {MOST_CLASSES - 1}, not between {low} and {high}")
    return tuple(map(str, range(high + 1)))
