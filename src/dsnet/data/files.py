"""The binary layouts of the small public sets: CIFAR and IDX."""

from __future__ import annotations

import gzip
import math
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsnet.data.regular import open_regular
from dsnet.errors import DsnetError, printable, shorten

__all__ = ["read_cifar_batch", "read_idx"]

MAX_BYTES = 2**30  # of one file, unpacked; the largest set in these layouts, EMNIST, has 640 million


class _ArraysOnly(pickle.Unpickler):
    """Reads what the CIFAR files hold and refuses to run anything else."""

    allowed = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR file")
        found: Callable[..., Any] = super().find_class(module, name)
        return found


def read_cifar_batch(path: Path, label_key: bytes) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] and labels of one file of CIFAR-10 or CIFAR-100."""
    with _named(path, "a CIFAR file"), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(size)
        data = _ArraysOnly(file, encoding="bytes").load()
        images, labels = data[b"data"], data[label_key]
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.nbytes > size:
            raise ValueError("its data is not an array of bytes that lies in the file")
        if not isinstance(labels, list) or any(type(label) is not int for label in labels):
            raise ValueError("its labels are not a list of whole numbers")
        if len(labels) * 3 * 32 * 32 != images.size:
            raise ValueError(f"it has {images.size} values of images but {len(labels)} labels")
        return torch.from_numpy(images.reshape(-1, 3, 32, 32)), torch.tensor(labels)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """An array of bytes in the IDX layout of MNIST and its relatives, plain or gzipped.

    No more is unpacked than the header declares, and no more than `MAX_BYTES` may be declared.
    """
    with _named(path, "an IDX file of bytes"), open_regular(path) as packed:
        with gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else nullcontext(packed) as file:
            header = file.read(4)
            if len(header) < 4 or header[:3] != b"\0\0\x08" or header[3] != dimensions:
                raise ValueError(f"it does not begin as one with {dimensions} dimensions")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            count = math.prod(shape)
            _check_size(count)
            body = file.read(count + 1)
        if len(body) != count:
            has = "it has more" if len(body) > count else f"it is cut short at {len(body)}"
            raise ValueError(f"its header declares {' × '.join(map(str, shape))} bytes, but {has}")
        return torch.from_numpy(np.frombuffer(body, dtype=np.uint8).reshape(shape).copy())


@contextmanager
def _named(path: Path, expected: str) -> Iterator[None]:
    """Turn whatever a reader raises about a damaged file into an error that names it."""
    try:
        yield
    except Exception as error:  # gzip, zlib, struct, pickle and numpy each raise their own
        told = "it takes more memory than there is" if isinstance(error, MemoryError) else str(error)
        raise DsnetError(
            f"{printable(str(path))} is damaged or not {expected}: {printable(told, 200) or shorten(error)}"
        ) from error


def _check_size(count: int) -> None:
    if count > MAX_BYTES:
        raise ValueError(f"it has {count:,} bytes, more than the {MAX_BYTES:,} that such a file may have")
