"""Pictures to decode, and a set that is decoded on demand."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from dsnet.data import load_dataset
from dsnet.data.lazy import LazyDataset

SIZE = 16


def picture(seed: int, kind: str = "PNG", side: int = 40) -> bytes:
    """Smooth noise, so that resizing by different filters or from different boxes shows."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8))
    out = io.BytesIO()
    small.resize((side, side + 3 * (seed % 5)), Image.Resampling.BICUBIC).save(out, kind)
    return out.getvalue()


def resized_then_cropped(data: bytes, size: int, shorter: int) -> np.ndarray:
    """The whole image resized by Pillow, then its centre: what `decode` does, without its code."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = shorter / min(image.size)
    width, height = (max(shorter, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


def lazy(root: Path, *, workers: int = 0) -> LazyDataset:
    found = load_dataset("imagenet", "train", root=root, size=SIZE, lazy=True)
    assert isinstance(found, LazyDataset)
    return replace(found, workers=workers)


def write_cifar(path: Path, images: np.ndarray, **labels: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {b"data": images.reshape(len(images), -1)} | {key.encode(): value for key, value in labels.items()}
    path.write_bytes(pickle.dumps(data))
