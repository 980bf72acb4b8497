"""Preprocessing for a detector: images are stretched to its size and normalised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsnet.data.decode import DecodeError, catch_decode_errors, open_image, pillow
from dsnet.data.transforms.augment import normalise
from dsnet.detection.data.augment import resize
from dsnet.detection.data.dataset import Boxes, stretch_to_square
from dsnet.errors import DsnetError, printable

__all__ = ["Preprocessing", "prepare_images"]

SOURCES = "a path, a Pillow image, an array [H, W, 3] or a tensor [3, H, W] of bytes or of values from 0 to 1"


class Preprocessing(NamedTuple):
    """The size of a detector's images, and the mean and standard deviation of each channel."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise values from 0 to 255 [B, 3, H, W]."""
        return normalise(images, self.mean, self.std)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Resize and normalise squares of bytes [B, 3, S, S]."""
        count = len(pixels)
        boxes = Boxes(torch.zeros(count, 1, 4), torch.full((count, 1), -1)).to(pixels.device)
        return self.normalise(resize(pixels, boxes, self.size, self.mean)[0])


def prepare_images(images: Any, preprocessing: Preprocessing, device: torch.device | str = "cpu") -> Tensor:  # noqa: ANN401
    """Preprocess one image or a sequence of images of any sizes, as `SavedDetector.prepare` describes it."""
    if isinstance(images, np.ndarray | Tensor):
        sources = list(images) if images.ndim == 4 else [images]
    else:
        sources = list(images) if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    if not sources:
        raise DsnetError("there is no image to prepare")
    pixels = [_square(source, preprocessing.size) for source in sources]
    return preprocessing(torch.stack(pixels).to(device))


def _square(source: Any, side: int) -> Tensor:  # noqa: ANN401
    name = f"{source}: " if isinstance(source, str | Path) else "an image cannot be read: "
    try:
        with catch_decode_errors():  # a lazy Pillow image is decoded here
            return stretch_to_square(_open(source), side)
    except DecodeError as error:
        raise DsnetError(f"{printable(name, 300)}{error}") from error


def _open(source: Any) -> Any:  # noqa: ANN401  (any image type, and a Pillow image)
    """Return an upright RGB image of Pillow."""
    images = pillow()
    if isinstance(source, str | Path):
        return open_image(str(source))
    if isinstance(source, images.Image):
        from PIL import ImageOps

        if source.mode.startswith("I"):  # 16 bits
            return _open((np.asarray(source).clip(0, 65535) // 257).astype(np.uint8))
        return ImageOps.exif_transpose(source).convert("RGB")
    if isinstance(source, Tensor):
        source = source.detach().cpu()
        source = (source.permute(1, 2, 0) if source.ndim == 3 else source).numpy()
    if not isinstance(source, np.ndarray):
        raise DsnetError(f"an image is {SOURCES}, not {type(source).__name__}")
    if source.ndim == 2:  # greyscale
        source = np.repeat(source[..., None], 3, 2)
    if source.ndim != 3 or source.shape[2] != 3 or not source.size:
        raise DsnetError(f"an image is {SOURCES}, not one of shape {tuple(source.shape)}")
    return images.fromarray(np.ascontiguousarray(_as_bytes(source)))


def _as_bytes(image: Any) -> Any:  # noqa: ANN401  (arrays)
    if image.dtype == np.uint8:
        return image
    if not np.issubdtype(image.dtype, np.floating):
        raise DsnetError(f"an image is {SOURCES}, not of {image.dtype}")
    low, high = float(image.min()), float(image.max())
    if not (low >= 0 and high <= 1):  # also true for NaN
        raise DsnetError(
            f"values of an image in floating point are in 0…1, not from {low:g} to {high:g}: give bytes "
            "(uint8) for 0…255, and images that are not normalised"
        )
    return (image * 255).round().astype(np.uint8)
