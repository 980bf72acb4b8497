"""Load a dataset by its registered name, or by the path of its files, and map its classes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from dsnet.data.in_memory import InMemoryDataset
from dsnet.data.lazy import LazyDataset
from dsnet.data.readers import public_datasets  # noqa: F401  (registers datasets)
from dsnet.data.readers.folder import read_class_folders
from dsnet.data.readers.hub import read_hub
from dsnet.data.readers.parquet import read_parquet
from dsnet.data.registry import DatasetRequest, LabeledImages, Split, dataset_reader, list_datasets
from dsnet.errors import DsnetError, printable, shorten

__all__ = ["has_no_splits", "load_dataset", "map_classes"]

SPLIT_NAMES = {"train": ("train",), "test": ("test", "val", "validation")}


def load_dataset(
    name: str,
    split: Split,
    *,
    root: str | Path | None = None,
    size: int | None = None,
    default_size: int | None = None,
    ratio: float = 1.0,
    lazy: bool | None = None,
) -> InMemoryDataset | LazyDataset:
    """Load a split of a dataset.

    Args:
        name: A name of `list_datasets`, or where the images are:

            - a folder with ``train`` and ``test`` (or ``val``) inside, each with one folder a class;
            - a folder with one folder a class: a fifth of each class is the test split;
            - a Parquet file, or a folder of ``train*.parquet`` and ``test*.parquet`` (or ``val*``);
            - ``hf:NAME`` or ``hf:NAME:CONFIG`` of the Hugging Face Hub, ``hf:FOLDER`` in its layouts.
        split: ``train`` or ``test``.
        root: Folder of a named dataset's files (default: the environment variable DSNET_DATA), in the layout
            that its publisher gives them. ``digits`` needs no files, but scikit-learn.
        size: Side of the images. Small images of a fixed size are resized batch by batch.
        default_size: Side of images decoded from files if ``size`` is None (default: 128, for ``imagenet``
            224). Images of a fixed size then keep theirs.
        ratio: Files are resized to ``size / ratio`` on the shorter side, then center-cropped to ``size``.
        lazy: Whether worker processes decode images on demand (default: if they would take more than 4 GiB
            in memory). Images of a fixed size are always in memory.

    Raises:
        DsnetError: There is no such dataset or split, or its files cannot be read.

    Examples:
        >>> load_dataset("digits", "test").images.shape
        torch.Size([359, 3, 16, 16])
    """
    name = os.fspath(name)
    request = DatasetRequest(
        split=split, root=root, size=size, default_size=default_size, ratio=ratio, lazy=lazy
    )
    if reader := dataset_reader(name):
        return reader(request)
    path = Path(name)
    if name.startswith("hf:"):
        images = read_hub(name.removeprefix("hf:"), split)
    elif os.path.isdir(name):  # unlike Path.is_dir it accepts names that are too long for a file
        images = _read_folder(name, path, split)
    elif path.suffix == ".parquet" and os.path.isfile(name):
        images = _read_table(path, split)
    else:
        raise DsnetError(
            f"there is no data set {shorten(name, 500)}: neither a folder, a .parquet file or hf:NAME, "
            f"nor one of {', '.join(list_datasets())}"
        )
    return images.to_dataset(name, request)


def _read_folder(name: str, folder: Path, split: Split) -> LabeledImages:
    for part in SPLIT_NAMES[split]:
        if (folder / part).is_dir():
            return read_class_folders(folder / part)
        if tables := _tables(folder, part):
            return read_parquet(tables)
    if has_no_splits(folder):
        return read_class_folders(folder, split)
    tried = " or ".join(f"{part}/ or {part}*.parquet" for part in SPLIT_NAMES[split])
    hint = f"{folder} has neither these nor folders of classes"
    if (folder / "train").is_dir():
        hint = f"a folder of classes without splits, as {folder / 'train'} is, would be divided"
    raise DsnetError(f"the {split} split of {name} is not there; looked for {tried} in {folder}: {hint}")


def _tables(folder: Path, part: str) -> list[Path]:
    """List the Parquet files of a split; repositories of the Hub have them in ``data``."""
    return sorted(folder.glob(f"{part}*.parquet")) or sorted((folder / "data").glob(f"{part}*.parquet"))


def has_no_splits(folder: Path) -> bool:
    """Tell whether a folder holds folders of classes directly, and no splits."""
    parts = (part for names in SPLIT_NAMES.values() for part in names)
    if any((folder / part).is_dir() or _tables(folder, part) for part in parts):
        return False
    return any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())


def _read_table(path: Path, split: Split) -> LabeledImages:
    """Read a file as the split asked for, unless its name says that it is the other."""
    words = re.split("[^a-z]+", path.stem.lower())
    if any(word in SPLIT_NAMES["test" if split == "train" else "train"] for word in words):
        raise DsnetError(f"{path} is not the {split} split by its name; give a folder that has both splits")
    return read_parquet([path])


D = TypeVar("D", bound=InMemoryDataset | LazyDataset)


def map_classes(dataset: D, classes: tuple[str, ...], owner: str) -> D:
    """Return the dataset with labels that are indices of ``classes``, matched by name.

    Labels stay as they are if only one of the two has class names and the other plain numbers.

    Args:
        dataset: The dataset to map.
        classes: Names of the classes to map to.
        owner: What these classes belong to, for the error message.

    Raises:
        DsnetError: The dataset has a class that is not in ``classes``.
    """
    if dataset.classes == classes:
        return dataset
    numbered, target_numbered = (all(name.isdigit() for name in c) for c in (dataset.classes, classes))
    if numbered != target_numbered and len(dataset.classes) <= len(classes):
        return replace(dataset, classes=classes)
    unknown = sorted(set(dataset.classes) - set(classes))
    if unknown:
        raise DsnetError(
            f"{dataset.name} has classes that {owner} does not have: {first_names(unknown)} "
            f"(it has {first_names(classes)})"
        )
    indices = torch.tensor([classes.index(name) for name in dataset.classes], device=dataset.labels.device)
    return replace(dataset, labels=indices[dataset.labels], classes=classes)


def first_names(names: Sequence[str]) -> str:
    """Format at most five names for a message."""
    return ", ".join(printable(name, 60) for name in names[:5]) + ", …" * (len(names) > 5)
