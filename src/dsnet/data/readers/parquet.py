"""Read Parquet tables of images in the layout of Hugging Face ``datasets``."""

from __future__ import annotations

import bisect
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsnet.core.files import open_regular
from dsnet.data.readers.tables import class_numbers, label_tensor, pick_columns
from dsnet.data.registry import LabeledImages, read_errors
from dsnet.errors import DsnetError, install_hint, printable, shorten

__all__ = ["PackedImages", "read_parquet"]

# A few hundred bytes of dictionaries and run lengths can expand to terabytes. Images are compressed already,
# so the ratio of unpacked bytes and of rows to the bytes of the file is limited.
MAX_RATIO = 100  # unpacked bytes per byte of the file
MIN_BYTES = 64 * 2**20  # that any file may unpack to
MIN_ROWS = 100_000  # that any file may have; larger files one per byte
BATCH_ROWS = 4  # rows that are unpacked together
BYTES_TYPES = ("binary", "large_binary", "binary_view", "null")
INTEGER_TYPES = ("int", "uint", "null", "dictionary<values=int", "dictionary<values=uint")
_BOMB = "that is more than a table of compressed images can hold"


class PackedImages:
    """The compressed images of tables, copied to one temporary file.

    A row of a Parquet table can only be read with the hundreds around it. From the copy each worker reads
    single images, and the page cache holds as many as memory has room for. The file is removed with this
    object, or at exit.
    """

    def __init__(self, tables: Iterable[tuple[str, Iterable[bytes]]]) -> None:
        handle, self.path = tempfile.mkstemp(prefix="dsnet-", suffix=".images")
        remove = weakref.finalize(self, _remove, self.path, os.getpid())
        self.tables: list[str] = []
        self.starts: list[int] = []
        bounds = [0]
        try:
            with open(handle, "wb") as file:
                for name, images in tables:
                    self.tables.append(name)
                    self.starts.append(len(bounds) - 1)
                    for image in images:
                        file.write(image)
                        bounds.append(bounds[-1] + len(image))
        except BaseException:
            remove()
            raise
        self.bounds = np.array(bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def source(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        start, end = self.bounds[index : index + 2].tolist()
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def name(self, index: int) -> str:
        """Return the table and the row of an image."""
        table = bisect.bisect_right(self.starts, index) - 1
        return f"{self.tables[table]}, row {index - self.starts[table]}"


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a process forked from it
        Path(path).unlink(missing_ok=True)


def read_parquet(paths: Sequence[Path]) -> LabeledImages:
    """Read the images of tables with the columns ``image`` {bytes, path} and ``label``, in order.

    Class names are those that ``datasets`` stores in the first table, else numbers.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise DsnetError(f"reading Parquet needs pyarrow: {install_hint('train')}") from None
    tables = [_Table(path, parquet.ParquetFile) for path in paths]
    labels = torch.cat([table.labels() for table in tables])
    try:
        items = PackedImages((table.name, table.images()) for table in tables)
    except OSError as error:
        folder = tempfile.gettempdir()
        raise DsnetError(f"cannot copy images to {folder} (TMPDIR names another folder): {error}") from error
    classes = _stored_classes(tables[0].metadata, tables[0].label)
    return LabeledImages(items=items, labels=labels, classes=classes or class_numbers(labels))


class _Table:
    """A table that may unpack to a bounded multiple of the size of its file."""

    def __init__(self, path: Path, open_file: Callable[[Path], Any]) -> None:
        self.name = printable(str(path))
        self.problem = f"{self.name} cannot be read as Parquet"
        with read_errors(self.problem):
            open_regular(path).close()  # pyarrow would wait at a FIFO
            self.file, size = open_file(path), os.path.getsize(path)
            schema = self.file.schema_arrow
            self.metadata: dict[bytes, bytes] = schema.metadata or {}
            self.image, self.label = pick_columns(schema.names, self.name)
            self.limit, self.rows = max(MIN_BYTES, MAX_RATIO * size), self.file.metadata.num_rows
        if self.rows > max(MIN_ROWS, size):
            raise DsnetError(f"{self.name} declares {self.rows:,} rows in a file of {size:,} bytes; {_BOMB}")
        with read_errors(self.problem):
            self._check_types(schema)
            declared = self._declared()
        if declared > self.limit:
            raise DsnetError(f"{self.name} declares {declared:,} bytes in a file of {size:,}; {_BOMB}")

    def labels(self) -> Tensor:
        """Return the labels of all rows.

        They are read in parts and counted: row groups can hold more rows than the file declares.
        """
        labels: list[int] = []
        with read_errors(self.problem):
            for rows in self.file.iter_batches(columns=[self.label]):
                labels += rows.column(0).to_pylist()
                self._check_rows(len(labels))
            self._check_rows(len(labels), complete=True)
            return label_tensor(labels, self.name)

    def images(self) -> Iterator[bytes]:
        """Yield the image bytes of each row, empty for a row without an image."""
        budget, count = self.limit, 0
        batches = iter(self.file.iter_batches(batch_size=BATCH_ROWS, columns=[self.leaf]))
        while True:
            with read_errors(self.problem):
                rows = next(batches, None)
                count += 0 if rows is None else len(rows)
                self._check_rows(count, complete=rows is None)
                if rows is None:
                    return
                column = rows.column(0)
                images = (column.field("bytes") if self.leaf != self.image else column).to_pylist()
            for image in images:
                budget -= len(image or b"")
                if budget < 0:
                    raise DsnetError(f"{self.name} unpacks to more than {self.limit:,} bytes; {_BOMB}")
                yield image or b""

    def _check_rows(self, count: int, *, complete: bool = False) -> None:
        if count > self.rows or (complete and count < self.rows):
            has = f"only {count:,}" if complete else "more"
            raise ValueError(f"it declares {self.rows:,} rows, but a column has {has}")

    def _check_types(self, schema: Any) -> None:  # noqa: ANN401  (a schema of pyarrow)
        """Check that the columns hold bytes and integers; a row of another type may be of any size."""
        kind = schema.field(self.image).type
        members = [kind.field(i).name for i in range(kind.num_fields)] if str(kind)[:6] == "struct" else []
        inner = kind.field("bytes").type if "bytes" in members else kind
        self.leaf = f"{self.image}.bytes" if "bytes" in members else self.image
        if str(inner) not in BYTES_TYPES:
            raise DsnetError(
                f"{self.name}: column {self.image} holds {shorten(str(kind))}, expected bytes of image "
                "files, or a struct {bytes, path}"
            )
        kind = schema.field(self.label).type
        if not str(kind).startswith(INTEGER_TYPES):
            raise DsnetError(
                f"{self.name}: column {self.label} holds {shorten(str(kind))}, expected whole numbers"
            )

    def _declared(self) -> int:
        """Return the unpacked bytes of all columns that the file declares.

        Row groups are asked, since pyarrow ends the process over a damaged description of a column.
        """
        metadata = self.file.metadata
        return sum(int(metadata.row_group(i).total_byte_size) for i in range(metadata.num_row_groups))


def _stored_classes(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(n, str) for n in names) else ()
