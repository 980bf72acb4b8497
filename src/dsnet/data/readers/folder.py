"""Read images from folders of classes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from dsnet.data.registry import LabeledImages
from dsnet.errors import DsnetError

__all__ = ["SUFFIXES", "ImagePaths", "is_image_file", "read_class_folders"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff"}
TEST_SHARE = 0.2  # of each class, where a folder has no splits


def is_image_file(name: str) -> bool:
    """Tell whether a file is an image by its suffix, and not hidden."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


class ImagePaths:
    """Image files below a folder.

    Their names are stored as one block of bytes: sending a million strings to each worker would be slow.
    """

    def __init__(self, folder: str | Path, files: Iterable[str]) -> None:
        names = [os.fsencode(file) for file in files]
        self.folder = os.path.abspath(folder)  # workers may start elsewhere
        self.block = b"".join(names)
        self.bounds = np.cumsum([0, *map(len, names)])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def source(self, index: int) -> str:
        """Return the path of an image."""
        start, end = self.bounds[index : index + 2].tolist()
        return os.path.join(self.folder, os.fsdecode(self.block[start:end]))

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return self.source(index)


def read_class_folders(folder: Path, part: Literal["train", "test"] | None = None) -> LabeledImages:
    """List the images of ``folder/CLASS`` and of folders inside; classes are in alphabetical order.

    With ``part`` only those of a split: a fifth of each class is the test split, always the same.
    """
    classes = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not classes:
        raise DsnetError(f"{folder} has no folders: one folder a class is needed")
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        members = sorted(
            (*Path(os.path.relpath(inside, folder)).parts, file)
            for inside, _, names in os.walk(folder / name)
            for file in names
            if is_image_file(file)
        )
        if part is not None:
            members = _split(members, part)
        files += [os.path.join(*parts) for parts in members]
        labels += [label] * len(members)
    if not files and part == "test":
        raise DsnetError(f"{folder} has at most one image a class: none is left to test with")
    if not files:
        raise DsnetError(f"{folder} has class folders but no images ({', '.join(sorted(SUFFIXES))}) in them")
    return LabeledImages(items=ImagePaths(folder, files), labels=torch.tensor(labels), classes=tuple(classes))


def _split(files: list[tuple[str, ...]], part: Literal["train", "test"]) -> list[tuple[str, ...]]:
    """Select the files of a split by hashes of their names, so that adding files moves few others."""
    order = sorted(files, key=lambda parts: hashlib.sha256(os.fsencode("/".join(parts))).digest())
    test = set(order[: max(1, round(TEST_SHARE * len(files)))] if len(files) > 1 else ())
    return [file for file in files if (file in test) == (part == "test")]
