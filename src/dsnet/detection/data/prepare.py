"""Preprocessing for a detector: images are stretched to its size and normalised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.data.image_source import ImageSource, list_images, open_rgb
from dsnet.data.transforms.augment import normalise
from dsnet.detection.data.augment import resize
from dsnet.detection.data.dataset import Boxes, stretch_to_square

__all__ = ["Preprocessing", "prepare_images"]


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


def prepare_images(
    images: ImageSource | Sequence[ImageSource],
    preprocessing: Preprocessing,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Preprocess one image or a sequence of images of any sizes, as `SavedDetector.prepare` describes it."""
    pixels = []
    for source in list_images(images):
        with open_rgb(source) as image:
            pixels.append(stretch_to_square(image, preprocessing.size))
    return preprocessing(torch.stack(pixels).to(device))
