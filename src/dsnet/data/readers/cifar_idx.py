"""Read CIFAR and IDX files, the binary layouts of small public datasets."""

from __future__ import annotations

import gzip
import math
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dsnet.core.files import open_regular
from dsnet.data.registry import read_errors
from dsnet.errors import printable, shorten

__all__ = ["read_cifar_batch", "read_idx"]

MAX_BYTES = 2**30  # of one file, unpacked; EMNIST, the largest dataset in these layouts, has 640 million
MAX_RATIO = 100  # unpacked bytes per byte of a gzipped file; MNIST has five
MIN_BYTES = 64 * 2**20  # that any file may unpack to


class _Array:
    """The parts of a pickled array. NumPy would allocate memory for any shape that a file declares."""

    def __init__(self, *args: object) -> None:
        self.args = args
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def values(self) -> bytes:
        """Return the data of an array of bytes in row-major order."""
        match self.state:
            case (_, _, _Array(args=("u1" | b"u1", *_)), False, bytes(raw)):
                return raw
        raise ValueError("its data is not an array of bytes")


def _encoded(text: str, encoding: str) -> bytes:
    """Decode bytes that Python 3 pickled for Python 2; other encodings could make them longer."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the encoding {shorten(encoding)} has no place in a CIFAR file")
    return text.encode(encoding)


class _ArraysOnly(pickle._Unpickler):
    """An unpickler that reads what CIFAR files hold and refuses anything else.

    It is the one in Python: that in C allocates as many memo entries as a file of ten bytes declares.
    """

    # A bytearray is allocated before it is known to be in the file.
    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != ord(pickle.BYTEARRAY8)
    }
    allowed: Mapping[tuple[str, str], Callable[..., Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Array,
        ("_codecs", "encode"): _encoded,
    }

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR file")
        return self.allowed[module, name]


def read_cifar_batch(path: Path, label_key: bytes) -> tuple[Tensor, Tensor]:
    """Read images [N, 3, 32, 32] and labels [N] of a file of CIFAR-10 or CIFAR-100."""
    with read_errors(f"{printable(str(path))} is damaged or not a CIFAR file"), open_regular(path) as file:
        _check_size(os.fstat(file.fileno()).st_size)
        data = _ArraysOnly(file, encoding="bytes").load()
        images, labels = data[b"data"], data[label_key]
        if not isinstance(images, _Array):
            raise ValueError("its data is not an array")
        pixels = images.values()
        if not isinstance(labels, list) or any(type(label) is not int for label in labels):
            raise ValueError("its labels are not a list of whole numbers")
        if len(labels) * 3 * 32 * 32 != len(pixels):
            raise ValueError(f"it has {len(pixels)} bytes of images but {len(labels)} labels")
        return _bytes(pixels).reshape(-1, 3, 32, 32), torch.tensor(labels)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an array of bytes in the IDX layout of MNIST, plain or gzipped.

    At most the size that the header declares is unpacked. That size is limited by `MAX_BYTES` and by the
    size of the file.
    """
    with (
        read_errors(f"{printable(str(path))} is damaged or not an IDX file of bytes"),
        open_regular(path) as packed,
    ):
        size = os.fstat(packed.fileno()).st_size
        with gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else nullcontext(packed) as file:
            header = file.read(4)
            if len(header) < 4 or header[:3] != b"\0\0\x08" or header[3] != dimensions:
                raise ValueError(f"it does not begin as one with {dimensions} dimensions")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            count = math.prod(shape)
            _check_size(count)
            if count > max(MIN_BYTES, MAX_RATIO * size):
                raise ValueError(f"it declares {count:,} bytes in a file of {size:,}")
            body = file.read(count + 1)
        if len(body) != count:
            has = "it has more" if len(body) > count else f"it is cut short at {len(body)}"
            raise ValueError(f"its header declares {' × '.join(map(str, shape))} bytes, but {has}")
        return _bytes(body).reshape(shape)


def _bytes(raw: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())


def _check_size(count: int) -> None:
    if count > MAX_BYTES:
        raise ValueError(f"it has {count:,} bytes, more than the {MAX_BYTES:,} that such a file may have")
