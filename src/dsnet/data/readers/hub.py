"""Sets of the Hugging Face Hub, or in its layouts on disk, through the library ``datasets``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsnet.data.readers.folder import Listing, label_tensor, numbered, pick_columns
from dsnet.errors import DsnetError, install_hint, printable

__all__ = ["HubRows", "list_hub"]

PARTS = {"train": ("train",), "test": ("test", "validation", "val", "valid")}


class HubRows:
    """The images of a table of ``datasets``, as they were compressed; workers map its files into memory."""

    def __init__(self, rows: Any, column: str, where: str) -> None:  # noqa: ANN401  (a Dataset)
        self.rows, self.column, self.where = rows, column, where

    def __len__(self) -> int:
        return len(self.rows)

    def source(self, at: int) -> str | bytes:
        """The bytes of a file, or its path."""
        image = self.rows[at][self.column] or {}
        found: str | bytes = image.get("bytes") or image.get("path") or b""
        return found

    def name(self, at: int) -> str:
        """The set and the row."""
        return f"{self.where}, row {at}"


def list_hub(name: str, split: str) -> Listing:
    """Images of a split of ``NAME``, of ``NAME:CONFIG`` or of a folder.

    The test split is the first of test, validation, val and valid that has labels.
    """
    where = printable(f"hf:{name}", 300)
    try:
        import datasets
    except ImportError:
        raise DsnetError(f"{where} needs the library datasets: {install_hint('datasets')}") from None
    with _told(datasets, where):
        there, open_part = _parts(datasets, name, split)
    chosen = [part for part in PARTS[split] if part in there]
    if not chosen:
        raise DsnetError(f"{where} has no {split} split; it has {printable(', '.join(there), 500)}")
    for part in chosen:
        with _told(datasets, where):
            rows = open_part(part)
        listing = _listing(datasets, rows, where)
        if not len(listing.labels) or listing.labels.max() >= 0:  # -1: labels that are kept secret
            break
    return listing


@contextmanager
def _told(datasets: Any, where: str) -> Iterator[None]:  # noqa: ANN401  (a module)
    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DsnetError(f"{where} cannot be loaded: {printable(str(error), 1000)}") from error


def _parts(datasets: Any, name: str, split: str) -> tuple[Sequence[str], Callable[[str], Any]]:  # noqa: ANN401
    """The splits there are, and what opens one."""
    folder = Path(name)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # by save_to_disk
        saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.DatasetDict):
            return list(saved), saved.__getitem__
        return [str(saved.split or split)], lambda part: saved
    path, config = (
        (name, None) if folder.exists() else (name.partition(":")[0], name.partition(":")[2] or None)
    )
    there = datasets.get_dataset_split_names(path, config)
    return there, lambda part: datasets.load_dataset(path, config, split=part)


def _listing(datasets: Any, rows: Any, where: str) -> Listing:  # noqa: ANN401
    image, label = pick_columns(rows.column_names, where)
    feature = rows.features[label]
    labels = label_tensor(rows.select_columns([label])[:][label], where)
    with _told(datasets, where):
        images = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else numbered(labels)
    return Listing(items=HubRows(images, image, where), labels=labels, classes=classes)
