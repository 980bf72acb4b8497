"""Images of Parquet tables in the layout of Hugging Face ``datasets``."""

from __future__ import annotations

import bisect
import json
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsnet.data.items import Listing, label_tensor, numbered, pick_columns
from dsnet.errors import DsnetError

__all__ = ["Packed", "list_parquet"]


class Packed:
    """The images of tables, as they were compressed, in one temporary file.

    A row of a Parquet table cannot be read alone, only with the hundreds around it. Once copied out, every
    worker reads single images, and memory holds what the system's cache has room for. The file is removed
    with this object, or at exit.
    """

    def __init__(self, tables: Iterable[tuple[str, Iterable[bytes]]]) -> None:
        handle, self.path = tempfile.mkstemp(prefix="dsnet-", suffix=".images")
        weakref.finalize(self, _remove, self.path, os.getpid())
        self.tables: list[str] = []
        self.starts: list[int] = []
        bounds = [0]
        with open(handle, "wb") as file:
            for name, images in tables:
                self.tables.append(name)
                self.starts.append(len(bounds) - 1)
                for image in images:
                    file.write(image)
                    bounds.append(bounds[-1] + len(image))
        self.bounds = np.array(bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def source(self, at: int) -> bytes:
        """The bytes of one image."""
        start, end = self.bounds[at : at + 2].tolist()
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def name(self, at: int) -> str:
        """The table and the row."""
        table = bisect.bisect_right(self.starts, at) - 1
        return f"{self.tables[table]}, row {at - self.starts[table]}"


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a process forked from it
        Path(path).unlink(missing_ok=True)


def list_parquet(paths: Sequence[Path]) -> Listing:
    """Images of tables with the columns ``image`` {bytes, path} and ``label``, one table after the other.

    Class names are those that ``datasets`` notes in the first table, else numbers.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise DsnetError("reading Parquet needs pyarrow: pip install 'dsnet[train]'") from None
    tables = []
    for path in paths:
        try:
            tables.append(parquet.ParquetFile(path))
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise DsnetError(f"{path} cannot be read as Parquet: {error}") from error
    places = [str(path) for path in paths]
    columns = [pick_columns(t.schema_arrow.names, place) for t, place in zip(tables, places, strict=True)]
    labels = torch.cat(
        [
            label_tensor(table.read([label])[label].to_pylist(), place)
            for table, place, (_, label) in zip(tables, places, columns, strict=True)
        ]
    )
    images = [_compressed(table, image) for table, (image, _) in zip(tables, columns, strict=True)]
    try:
        items = Packed(zip(places, images, strict=True))
    except OSError as error:
        folder = tempfile.gettempdir()
        raise DsnetError(f"cannot copy images to {folder} (TMPDIR names another folder): {error}") from error
    classes = _noted_classes(tables[0].schema_arrow.metadata or {}, columns[0][1])
    return Listing(items=items, labels=labels, classes=classes or numbered(labels))


def _compressed(table: Any, column: str) -> Iterator[bytes]:  # noqa: ANN401  (a ParquetFile)
    """Bytes of every row; none where the row has none."""
    for rows in table.iter_batches(batch_size=256, columns=[column]):
        for image in rows.column(0).to_pylist():
            value = image.get("bytes") if isinstance(image, dict) else image
            yield value if isinstance(value, bytes) else b""


def _noted_classes(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    try:
        return tuple(json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return ()
