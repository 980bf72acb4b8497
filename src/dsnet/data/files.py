"""The binary layouts of the small public sets: CIFAR and IDX."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = ["read_cifar_batch", "read_idx"]


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
    try:
        with path.open("rb") as file:
            data = _ArraysOnly(file, encoding="bytes").load()
        images = torch.from_numpy(np.asarray(data[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
        return images, torch.tensor(data[label_key])
    except (pickle.UnpicklingError, KeyError, ValueError, EOFError, TypeError) as error:
        raise DsnetError(f"{path} is not a CIFAR file: {error}") from error


def read_idx(path: Path) -> Tensor:
    """An array of bytes in the IDX layout of MNIST and its relatives, plain or gzipped."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DsnetError(f"{path} is not an IDX file of bytes")
    shape = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    body = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3])
    if body.size != np.prod(shape):
        raise DsnetError(f"{path} is cut short: {body.size} bytes where {np.prod(shape)} belong")
    return torch.from_numpy(body.reshape(shape).copy())
