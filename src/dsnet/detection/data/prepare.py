"""Images as a detector takes them: stretched to its size, normalised by its mean and deviation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsnet.data.decode import DecodeError, catch_decode_errors, open_image, pillow
from dsnet.data.transforms.augment import normalise
from dsnet.detection.data.augment import whole
from dsnet.detection.data.dataset import Boxes, shrunk
from dsnet.errors import DsnetError, printable

__all__ = ["Prepared", "inputs_of", "prepare", "prepare_images"]

POSSIBLE = "a path, an image of Pillow, an array [H, W, 3] or a tensor [3, H, W] of bytes or of values in 0…1"


class Prepared(NamedTuple):
    """How images are made ready: their side, and mean and deviation of every channel."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def prepare(images: Tensor, prepared: Prepared) -> Tensor:
    """Values in [0, 255] [B, 3, size, size] as the network wants them."""
    return normalise(images, prepared.mean, prepared.std)


def inputs_of(pixels: Tensor, prepared: Prepared) -> Tensor:
    """Squares of bytes [B, 3, S, S] as the network wants them."""
    nothing = Boxes(torch.zeros(len(pixels), 1, 4), torch.full((len(pixels), 1), -1)).to(pixels.device)
    x, _ = whole(pixels, nothing, prepared.size, prepared.mean)
    return prepare(x, prepared)


def prepare_images(images: Any, prepared: Prepared, device: torch.device | str = "cpu") -> Tensor:  # noqa: ANN401
    """One image, or several of any sizes: [B, 3, size, size] on a device."""
    if isinstance(images, np.ndarray | Tensor):
        several = list(images) if images.ndim == 4 else [images]
    else:
        several = list(images) if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    if not several:
        raise DsnetError("there is no image to prepare")
    pixels = [_square(image, prepared.size) for image in several]
    return inputs_of(torch.stack(pixels).to(device), prepared)


def _square(image: Any, side: int) -> Tensor:  # noqa: ANN401
    named = f"{image}: " if isinstance(image, str | Path) else "an image cannot be read: "
    try:
        with catch_decode_errors():  # an image of Pillow, too, may be decoded only now
            return shrunk(_opened(image), side)
    except DecodeError as error:
        raise DsnetError(f"{printable(named, 300)}{error}") from error


def _opened(image: Any) -> Any:  # noqa: ANN401  (what users have, and an image of Pillow)
    """An image of Pillow in RGB, upright."""
    images = pillow()
    if isinstance(image, str | Path):
        return open_image(str(image))
    if isinstance(image, images.Image):
        from PIL import ImageOps

        if image.mode.startswith("I"):  # 16 bits
            return _opened((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
        return ImageOps.exif_transpose(image).convert("RGB")
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()
    if not isinstance(image, np.ndarray):
        raise DsnetError(f"an image is {POSSIBLE}, not {type(image).__name__}")
    if image.ndim == 2:  # grey
        image = np.repeat(image[..., None], 3, 2)
    if image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise DsnetError(f"an image is {POSSIBLE}, not one of shape {tuple(image.shape)}")
    return images.fromarray(np.ascontiguousarray(_bytes(image)))


def _bytes(image: Any) -> Any:  # noqa: ANN401  (arrays)
    if image.dtype == np.uint8:
        return image
    if not np.issubdtype(image.dtype, np.floating):
        raise DsnetError(f"an image is {POSSIBLE}, not of {image.dtype}")
    low, high = float(image.min()), float(image.max())
    if not (low >= 0 and high <= 1):  # not a number is neither
        raise DsnetError(
            f"values of an image in floating point are in 0…1, not from {low:g} to {high:g}: give bytes "
            "(uint8) for 0…255, and images that are not normalised"
        )
    return (image * 255).round().astype(np.uint8)
