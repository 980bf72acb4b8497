"""Images from files: folders of classes, Parquet tables, and the binary layouts of the small public sets."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = ["Decoder", "read_cifar_batch", "read_class_folders", "read_idx", "read_parquet"]

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff"}


class Decoder:
    """Decodes images to one size; reports what it cannot read and skips it, up to a limit."""

    def __init__(self, size: int, *, limit: int = 100) -> None:
        self.size, self.limit = size, limit
        self.failures: list[str] = []

    def __call__(self, source: str | Path | bytes, name: str) -> Tensor | None:
        """The image [3, size, size] in bytes: shorter side resized, centre kept. None where it is damaged."""
        image_module = _pillow()
        try:
            opened = image_module.open(io.BytesIO(source) if isinstance(source, bytes) else source)
            image = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for damaged files
            self._failed(name, error)
            return None
        width, height = image.size
        scale = self.size / min(width, height)
        if scale != 1:
            image = image.resize(
                (max(self.size, round(width * scale)), max(self.size, round(height * scale))), 3
            )
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        image = image.crop((left, top, left + self.size, top + self.size))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def _failed(self, name: str, error: Exception) -> None:
        self.failures.append(name)
        if len(self.failures) > self.limit:
            shown = ", ".join(self.failures[:5])
            raise DsnetError(f"more than {self.limit} images cannot be read, the first: {shown}") from error
        warnings.warn(f"skipped {name}: {error}", stacklevel=3)


def _pillow() -> Any:  # noqa: ANN401  (a module)
    try:
        from PIL import Image
    except ImportError:
        raise DsnetError("reading image files needs Pillow: pip install 'dsnet[train]'") from None
    return Image


def _decode_all(
    items: Iterable[tuple[str | Path | bytes, str, int]], decode: Decoder
) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for source, name, label in items:
        image = decode(source, name)
        if image is not None:
            images.append(image)
            labels.append(label)
    if not images:
        raise DsnetError("no image could be read")
    return torch.stack(images), torch.tensor(labels)


def read_class_folders(folder: Path, decode: Decoder) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images of ``folder/CLASS/*.jpg``; classes in alphabetical order."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise DsnetError(f"{folder} has no folders: one folder a class is needed")
    items = [
        (path, str(path), label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not items:
        raise DsnetError(f"{folder} has class folders but no images ({', '.join(sorted(SUFFIXES))}) in them")
    return *_decode_all(items, decode), tuple(classes)


def read_parquet(path: Path, decode: Decoder) -> tuple[Tensor, Tensor]:
    """Images and labels of a table with the columns ``image`` {bytes, path} and ``label``."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise DsnetError("reading Parquet needs pyarrow: pip install 'dsnet[train]'") from None
    table = parquet.read_table(path)
    missing = {"image", "label"} - set(table.column_names)
    if missing:
        has = ", ".join(table.column_names)
        raise DsnetError(f"{path} has no column {' or '.join(sorted(missing))}; it has {has}")
    rows = zip(table["image"].to_pylist(), table["label"].to_pylist(), strict=True)
    items = [(image["bytes"], f"{path}, row {i}", int(label)) for i, (image, label) in enumerate(rows)]
    return _decode_all(items, decode)


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
