"""Images of Parquet tables in the layout of Hugging Face ``datasets``."""

from __future__ import annotations

import bisect
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsnet.core.open_file import open_regular
from dsnet.data.readers.folder import Listing, label_tensor, numbered, pick_columns
from dsnet.errors import DsnetError, install_hint, printable, shorten

__all__ = ["Packed", "list_parquet"]

# A few hundred bytes of dictionaries and run lengths can stand for terabytes. Images are compressed already:
# what they take beyond their file is bounded, and so is how many rows a byte of it may stand for.
RATIO = 100  # bytes of images for every byte of the file
LEAST_BYTES = 64 * 2**20  # that any file may unpack to
LEAST_ROWS = 100_000  # that any file may have; beyond, one for every byte
BATCH = 4  # rows that are unpacked together
BYTES = ("binary", "large_binary", "binary_view", "null")
WHOLE = ("int", "uint", "null", "dictionary<values=int", "dictionary<values=uint")
_BOMB = "that is more than a table of compressed images can hold"


class Packed:
    """The images of tables, as they were compressed, in one temporary file.

    A row of a Parquet table cannot be read alone, only with the hundreds around it. Once copied out, every
    worker reads single images, and memory holds what the system's cache has room for. The file is removed
    with this object, or at exit.
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
        raise DsnetError(f"reading Parquet needs pyarrow: {install_hint('train')}") from None
    tables = [_Table(path, parquet.ParquetFile) for path in paths]
    labels = torch.cat([table.labels() for table in tables])
    try:
        items = Packed((table.place, table.images()) for table in tables)
    except OSError as error:
        folder = tempfile.gettempdir()
        raise DsnetError(f"cannot copy images to {folder} (TMPDIR names another folder): {error}") from error
    classes = _noted_classes(tables[0].metadata, tables[0].label)
    return Listing(items=items, labels=labels, classes=classes or numbered(labels))


class _Table:
    """A table whose contents are bounded by the size of its file."""

    def __init__(self, path: Path, open_file: Callable[[Path], Any]) -> None:
        self.place = printable(str(path))
        with self._named():
            open_regular(path).close()  # pyarrow would wait at a FIFO
            self.file, size = open_file(path), os.path.getsize(path)
            schema = self.file.schema_arrow
            self.metadata: dict[bytes, bytes] = schema.metadata or {}
            self.image, self.label = pick_columns(schema.names, self.place)
            self.limit, self.rows = max(LEAST_BYTES, RATIO * size), self.file.metadata.num_rows
        if self.rows > max(LEAST_ROWS, size):
            raise DsnetError(f"{self.place} declares {self.rows:,} rows in a file of {size:,} bytes; {_BOMB}")
        with self._named():
            self._check_types(schema)
            declared = self._declared()
        if declared > self.limit:
            raise DsnetError(f"{self.place} declares {declared:,} bytes in a file of {size:,}; {_BOMB}")

    def labels(self) -> Tensor:
        """Labels of all rows."""
        with self._named():
            return label_tensor(self.file.read([self.label])[self.label].to_pylist(), self.place)

    def images(self) -> Iterator[bytes]:
        """Bytes of every row; none where the row has none."""
        left = self.limit
        batches = iter(self.file.iter_batches(batch_size=BATCH, columns=[self.leaf]))
        while True:
            with self._named():
                rows = next(batches, None)
                if rows is None:
                    return
                column = rows.column(0)
                images = (column.field("bytes") if self.leaf != self.image else column).to_pylist()
            for image in images:
                left -= len(image or b"")
                if left < 0:
                    raise DsnetError(f"{self.place} unpacks to more than {self.limit:,} bytes; {_BOMB}")
                yield image or b""

    def _check_types(self, schema: Any) -> None:  # noqa: ANN401  (a schema of pyarrow)
        """Only bytes and whole numbers are read: a row of anything else may be of any size."""
        kind = schema.field(self.image).type
        members = [kind.field(i).name for i in range(kind.num_fields)] if str(kind)[:6] == "struct" else []
        inner = kind.field("bytes").type if "bytes" in members else kind
        self.leaf = f"{self.image}.bytes" if "bytes" in members else self.image
        if str(inner) not in BYTES:
            raise DsnetError(
                f"{self.place}: column {self.image} holds {shorten(str(kind))}, expected bytes of image "
                "files, or a struct {bytes, path}"
            )
        kind = schema.field(self.label).type
        if not str(kind).startswith(WHOLE):
            raise DsnetError(
                f"{self.place}: column {self.label} holds {shorten(str(kind))}, expected whole numbers"
            )

    def _declared(self) -> int:
        """Bytes that all columns take when they are unpacked, as the file says.

        Of row groups, not of columns: pyarrow ends the process over a damaged description of a column.
        """
        about = self.file.metadata
        return sum(int(about.row_group(i).total_byte_size) for i in range(about.num_row_groups))

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except DsnetError:
            raise
        except Exception as error:  # pyarrow has many of its own, and damaged files reach most of them
            told = printable(str(error), 300) or type(error).__name__
            raise DsnetError(f"{self.place} cannot be read as Parquet: {told}") from error


def _noted_classes(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(n, str) for n in names) else ()
