"""Read datasets of the Hugging Face Hub, or in its layouts on disk, with the library ``datasets``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from dsnet.data.readers.tables import class_numbers, label_tensor, pick_columns
from dsnet.data.registry import LabeledImages
from dsnet.errors import DsnetError, install_hint, printable

__all__ = ["HubImages", "read_hub"]

SPLIT_NAMES = {"train": ("train",), "test": ("test", "validation", "val", "valid")}


class HubImages:
    """The compressed images of a table of ``datasets``; workers map its files into memory."""

    def __init__(self, rows: Any, column: str, where: str) -> None:  # noqa: ANN401  (a Dataset)
        self.rows, self.column, self.where = rows, column, where

    def __len__(self) -> int:
        return len(self.rows)

    def source(self, index: int) -> str | bytes:
        """Return the bytes of an image file, or its path."""
        image = self.rows[index][self.column] or {}
        return cast(str | bytes, image.get("bytes") or image.get("path") or b"")

    def name(self, index: int) -> str:
        """Return the dataset and the row of an image."""
        return f"{self.where}, row {index}"


def read_hub(name: str, split: str) -> LabeledImages:
    """List the images of a split of ``NAME``, ``NAME:CONFIG`` or a folder.

    The test split is the first of test, validation, val and valid that has labels.
    """
    where = printable(f"hf:{name}", 300)
    try:
        import datasets
    except ImportError:
        raise DsnetError(f"{where} needs the library datasets: {install_hint('datasets')}") from None
    with _load_errors(datasets, where):
        parts, open_part = _open_splits(datasets, name, split)
    candidates = [part for part in SPLIT_NAMES[split] if part in parts]
    if not candidates:
        raise DsnetError(f"{where} has no {split} split; it has {printable(', '.join(parts), 500)}")
    for part in candidates:
        with _load_errors(datasets, where):
            rows = open_part(part)
        images = _labeled_images(datasets, rows, where)
        if not len(images.labels) or images.labels.max() >= 0:  # -1: labels that are not published
            break
    return images


@contextmanager
def _load_errors(datasets: Any, where: str) -> Iterator[None]:  # noqa: ANN401  (a module)
    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DsnetError(f"{where} cannot be loaded: {printable(str(error), 1000)}") from error


def _open_splits(datasets: Any, name: str, split: str) -> tuple[Sequence[str], Callable[[str], Any]]:  # noqa: ANN401
    """Return the names of the splits, and a function that opens one."""
    folder = Path(name)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # by save_to_disk
        saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.DatasetDict):
            return list(saved), saved.__getitem__
        return [str(saved.split or split)], lambda part: saved
    path, config = (
        (name, None) if folder.exists() else (name.partition(":")[0], name.partition(":")[2] or None)
    )
    parts = datasets.get_dataset_split_names(path, config)
    return parts, lambda part: datasets.load_dataset(path, config, split=part)


def _labeled_images(datasets: Any, rows: Any, where: str) -> LabeledImages:  # noqa: ANN401
    image, label = pick_columns(rows.column_names, where)
    feature = rows.features[label]
    labels = label_tensor(rows.select_columns([label])[:][label], where)
    with _load_errors(datasets, where):
        images = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else class_numbers(labels)
    return LabeledImages(items=HubImages(images, image, where), labels=labels, classes=classes)
