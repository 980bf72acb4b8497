"""Images as users hold them (paths, Pillow images, arrays, tensors), opened as RGB images of Pillow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsnet.data.decode import DecodeError, catch_decode_errors, open_image, pillow, upright_rgb
from dsnet.errors import DsnetError, printable

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageSource", "list_images", "open_rgb"]

ImageSource: TypeAlias = "str | Path | Image | NDArray[Any] | Tensor"
FORMS = "a path, a Pillow image, an array [H, W, 3] or a tensor [3, H, W] of bytes or of values from 0 to 1"


def list_images(images: ImageSource | Sequence[ImageSource]) -> list[ImageSource]:
    """Return one image, a batch or a sequence of images as a list; raise if there is none."""
    if isinstance(images, np.ndarray | Tensor):
        sources = list(images) if images.ndim == 4 else [images]
    else:
        sources = list(images) if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    if not sources:
        raise DsnetError("there is no image to prepare")
    return cast("list[ImageSource]", sources)


@contextmanager
def open_rgb(source: ImageSource) -> Iterator[Image]:
    """Open an image as an upright RGB image of Pillow.

    Raises:
        DsnetError: The image cannot be read or decoded, also where that shows in the ``with`` block.
    """
    name = f"{source}: " if isinstance(source, str | Path) else "an image cannot be read: "
    try:
        with catch_decode_errors():  # a lazy Pillow image is decoded here
            yield _open(source)
    except DecodeError as error:
        raise DsnetError(f"{printable(name, 300)}{error}") from error


def _open(source: ImageSource) -> Image:
    images = pillow()
    if isinstance(source, str | Path):
        return cast("Image", open_image(str(source)))
    if isinstance(source, images.Image):
        return cast("Image", upright_rgb(source))
    if isinstance(source, Tensor):
        source = source.detach().cpu()
        source = (source.permute(1, 2, 0) if source.ndim == 3 else source).numpy()
    if not isinstance(source, np.ndarray):
        raise DsnetError(f"an image is {FORMS}, not {type(source).__name__}")
    if source.ndim == 2:  # greyscale
        source = np.repeat(source[..., None], 3, 2)
    if source.ndim != 3 or source.shape[2] != 3 or not source.size:
        raise DsnetError(f"an image is {FORMS}, not one of shape {tuple(source.shape)}")
    return cast("Image", images.fromarray(np.ascontiguousarray(_as_bytes(source))))


def _as_bytes(image: NDArray[Any]) -> NDArray[np.uint8]:
    if image.dtype == np.uint8:
        return image
    if not np.issubdtype(image.dtype, np.floating):
        raise DsnetError(f"an image is {FORMS}, not of {image.dtype}")
    low, high = float(image.min()), float(image.max())
    if not (low >= 0 and high <= 1):  # also true for NaN
        raise DsnetError(
            f"values of an image in floating point are in 0…1, not from {low:g} to {high:g}: give bytes "
            "(uint8) for 0…255, and images that are not normalised"
        )
    return (image * 255).round().astype(np.uint8)
