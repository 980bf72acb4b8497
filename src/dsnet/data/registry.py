"""Datasets by name: the decorator that registers a reader, and the request that a reader gets.

>>> @register_dataset("noise")
... def noise(request: DatasetRequest) -> InMemoryDataset:
...     generator = torch.Generator().manual_seed(0 if request.split == "train" else 1)
...     images = torch.randint(256, (20, 3, 8, 8), generator=generator, dtype=torch.uint8)
...     labels = torch.arange(20) % 2
...     return InMemoryDataset(name="noise", images=images, labels=labels, classes=("a", "b"))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor

from dsnet.core.ranges import check_range
from dsnet.data.dataset import check_ratio
from dsnet.data.decode import ImageList, decode_all
from dsnet.data.in_memory import InMemoryDataset
from dsnet.data.lazy import LazyDataset
from dsnet.errors import DsnetError, printable, shorten

__all__ = [
    "DatasetReader",
    "DatasetRequest",
    "LabeledImages",
    "MAX_IN_MEMORY_BYTES",
    "Split",
    "dataset_reader",
    "existing_path",
    "list_datasets",
    "read_errors",
    "register_dataset",
]

MAX_IN_MEMORY_BYTES = 4 * 2**30  # of decoded images; larger datasets are lazy by default

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """The arguments of `load_dataset`, as a reader gets them."""

    split: Split
    root: str | Path | None = None  # folder of the files
    size: int | None = None  # side of the images; None: the default
    default_size: int | None = None  # side of images that are decoded from files, where ``size`` is None
    ratio: float = 1.0  # size / the shorter side that files are resized to
    lazy: bool | None = None  # decode on demand; None: datasets that would take much memory

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise DsnetError(f"unknown split {shorten(self.split)}; possible: train, test")
        check_range(self, "size", "default_size", least=1)
        check_ratio("ratio", self.ratio)

    @property
    def folder(self) -> Path:
        """The folder of data files: ``root``, else that of the environment variable DSNET_DATA."""
        root = self.root if self.root is not None else os.environ.get("DSNET_DATA")
        if root is None:
            raise DsnetError(
                "where is the data? Give a folder, or set the environment variable DSNET_DATA to it"
            )
        return Path(root)


DatasetReader = Callable[[DatasetRequest], InMemoryDataset | LazyDataset]
R = TypeVar("R", bound=DatasetReader)

_READERS: dict[str, DatasetReader] = {}


def register_dataset(name: str) -> Callable[[R], R]:
    """Register a reader, a function (request) → dataset, under the name that `load_dataset` takes."""

    def register(reader: R) -> R:
        if name in _READERS:
            raise DsnetError(f"a dataset named {shorten(name)} is registered already")
        _READERS[name] = reader
        return reader

    return register


def list_datasets() -> list[str]:
    """Return the names of all registered datasets, sorted."""
    return sorted(_READERS)


def dataset_reader(name: str) -> DatasetReader | None:
    """Return the reader registered as ``name``, or None."""
    return _READERS.get(name)


def existing_path(candidates: list[Path], what: str) -> Path:
    """Return the first of these paths that exists."""
    for path in candidates:
        if os.path.exists(path):
            return path
    paths = printable(" and ".join(map(str, candidates)), 1000)
    raise DsnetError(f"{what} is not there; looked for {paths}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabeledImages:
    """Images to decode, with labels [N] and the names of the classes."""

    items: ImageList
    labels: Tensor
    classes: tuple[str, ...]

    def to_dataset(
        self, name: str, request: DatasetRequest, *, default_size: int = 128
    ) -> InMemoryDataset | LazyDataset:
        """Decode all images, or return a dataset that decodes them on demand, as the request says."""
        size = request.size or request.default_size or default_size
        lazy = request.lazy
        if lazy is None:
            lazy = len(self.items) * 3 * size * size > MAX_IN_MEMORY_BYTES
        if lazy:
            return LazyDataset(
                name=name,
                items=self.items,
                labels=self.labels,
                classes=self.classes,
                size=size,
                ratio=request.ratio,
            )
        images, indices = decode_all(self.items, size, ratio=request.ratio)
        return InMemoryDataset(
            name=name,
            images=images,
            labels=self.labels[indices],
            classes=self.classes,
            ratio=request.ratio,
            num_decode_errors=len(self.items) - len(indices),
        )


@contextmanager
def read_errors(problem: str) -> Iterator[None]:
    """Turn any exception about a damaged file into a `DsnetError` that begins with ``problem``.

    For damaged files gzip, zlib, struct, pickle, NumPy and pyarrow each raise their own exceptions.
    """
    try:
        yield
    except DsnetError:
        raise
    except Exception as error:
        reason = "it takes more memory than there is" if isinstance(error, MemoryError) else str(error)
        raise DsnetError(f"{problem}: {printable(reason, 300) or type(error).__name__}") from error
