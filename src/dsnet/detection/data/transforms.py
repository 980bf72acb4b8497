"""Preprocessing, and SSD's augmentation on the device: colours, zooming out, crops and flips.

Zooming out and cropping are one operation: a window, as shares of the image, is cut out and resized. The area
around an image has the channels' mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.data.transforms.augment import normalise
from dsnet.data.transforms.auto_augment import brightness, color, contrast, to_device
from dsnet.detection.boxes import iou
from dsnet.detection.data.dataset import Boxes

__all__ = [
    "AugmentationDraws",
    "Preprocessing",
    "augment",
    "crop_windows",
    "draw_augmentation",
    "draw_windows",
    "resize",
]

MAX_ZOOM = 4.0  # the largest side of a zoomed-out canvas, in sides of the image
MIN_OVERLAPS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.0)  # of a crop with some box; the last one allows any crop
ATTEMPTS = 20  # windows drawn for an image; if none of them fits, it is not cropped
JITTER = 0.5  # of brightness, contrast and saturation


class AugmentationDraws(NamedTuple):
    """The random draws for B images."""

    windows: Tensor  # [B, 4]
    flip: Tensor  # [B]
    factors: Tensor  # [3, B]: of brightness, contrast and saturation

    def to(self, device: torch.device) -> AugmentationDraws:
        """Copy to a device without waiting for it."""
        return AugmentationDraws(*(to_device(tensor, device) for tensor in self))


def draw_augmentation(boxes: Boxes, generator: torch.Generator) -> AugmentationDraws:
    """Draw the augmentation of the images with these boxes, from a CPU generator for any device."""
    count = len(boxes.classes)
    windows = draw_windows(boxes, generator)
    flip = torch.rand(count, generator=generator) < 0.5
    factors = 1 + JITTER * (2 * torch.rand(3, count, generator=generator) - 1)
    factors = torch.where(torch.rand(3, count, generator=generator) < 0.5, factors, 1.0)
    return AugmentationDraws(windows, flip, factors)


def augment(
    images: Tensor, boxes: Boxes, draws: AugmentationDraws, size: int, mean: tuple[float, ...]
) -> tuple[Tensor, Boxes]:
    """Augment images.

    Args:
        images: Bytes [B, 3, S, S].
        boxes: The boxes in them.
        draws: What `draw_augmentation` returns for them.
        size: The side of the results.
        mean: The channels' mean, of values from 0 to 1.

    Returns:
        Values from 0 to 255 [B, 3, size, size], and the boxes that are still in the images.
    """
    bright, contrasted, saturated = draws.factors
    images = color(contrast(brightness(images, bright), contrasted), saturated)
    return crop_windows(images, boxes, draws.windows, draws.flip, size, mean)


def resize(images: Tensor, boxes: Boxes, size: int, mean: tuple[float, ...]) -> tuple[Tensor, Boxes]:
    """Resize whole images, as `augment` does without any draws."""
    windows = torch.tensor([0.0, 0.0, 1.0, 1.0], device=images.device).expand(len(images), 4)
    return crop_windows(images, boxes, windows, torch.zeros_like(windows[:, 0], dtype=torch.bool), size, mean)


def draw_windows(boxes: Boxes, generator: torch.Generator) -> Tensor:
    """Draw windows [B, 4], corners as shares of the image: a zoomed-out canvas, a crop, or the whole image.

    Every other image is zoomed out. A canvas is then kept, or cropped to 0.3 to 1 of its sides with an aspect
    ratio from 0.5 to 2. A crop overlaps some box by at least a drawn value and contains the centre of one.
    """
    corners, present = boxes.corners.cpu(), boxes.classes.cpu() >= 0
    count = len(corners)

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    side = torch.where(uniform(count) < 0.5, uniform(count, low=1.0, high=MAX_ZOOM), 1.0)
    left_top = uniform(count, 2) * (1 - side[:, None])  # of the canvas, from 1 - side to 0
    width, height = uniform(2, count, ATTEMPTS, low=0.3)
    start = uniform(count, ATTEMPTS, 2) * (1 - torch.stack([width, height], 2))
    windows = torch.cat([start, start + torch.stack([width, height], 2)], 2)
    windows = left_top[:, None].repeat(1, 1, 2) + side[:, None, None] * windows  # [B, ATTEMPTS, 4]
    minimum = torch.tensor(MIN_OVERLAPS)[torch.randint(0, len(MIN_OVERLAPS), (count,), generator=generator)]
    valid = (width / height >= 0.5) & (width / height <= 2)
    valid &= ((iou(windows, corners) >= minimum[:, None, None]) & present[:, None]).any(2)
    valid &= (_contains_centre(windows, corners) & present[:, None]).any(2)
    cropped = valid.any(1) & (uniform(count) >= 1 / (len(MIN_OVERLAPS) + 1))
    first = windows[torch.arange(count), valid.to(torch.uint8).argmax(1)]
    canvas = torch.cat([left_top, left_top + side[:, None]], 1)
    return torch.where(cropped[:, None], first, canvas)


def _contains_centre(windows: Tensor, corners: Tensor) -> Tensor:
    """Return which windows [B, t, 4] contain the centres of which boxes [B, n, 4]: [B, t, n]."""
    centre = ((corners[..., :2] + corners[..., 2:]) / 2)[:, None]
    return ((centre > windows[:, :, None, :2]) & (centre < windows[:, :, None, 2:])).all(3)


def crop_windows(
    images: Tensor, boxes: Boxes, windows: Tensor, flip: Tensor, size: int, mean: tuple[float, ...]
) -> tuple[Tensor, Boxes]:
    """Cut windows out of images, resize them and flip some; keep the boxes whose centre is inside.

    Args:
        images: Values from 0 to 255 [B, 3, S, S].
        boxes: The boxes in them.
        windows: Corners as shares of the images [B, 4]; they may extend beyond them.
        flip: Which of the results are mirrored [B].
        size: The side of the results.
        mean: The channels' mean, of values from 0 to 1, which fills the area around an image.

    Returns:
        Values from 0 to 255 [B, 3, size, size] and their boxes, the others of class -1.
    """
    centred = normalise(images, mean, (1 / 255,) * 3)  # grid_sample pads with 0, which is the mean now
    span, middle = windows[:, 2:] - windows[:, :2], windows[:, 2:] + windows[:, :2] - 1
    sign = torch.where(flip, -1.0, 1.0)
    zero = torch.zeros_like(sign)
    theta = torch.stack([span[:, 0] * sign, zero, middle[:, 0], zero, span[:, 1], middle[:, 1]], 1)
    grid = F.affine_grid(theta.view(-1, 2, 3), [len(images), 3, size, size], align_corners=False)
    cropped = F.grid_sample(centred, grid, align_corners=False)
    cropped = normalise(cropped, tuple(-m for m in mean), (1 / 255,) * 3)
    inside = _contains_centre(windows[:, None], boxes.corners)[:, 0] & (boxes.classes >= 0)
    corners = (boxes.corners - windows[:, None, :2].repeat(1, 1, 2)) / span[:, None].repeat(1, 1, 2)
    corners = corners.clamp(0, 1)
    mirrored = torch.stack([1 - corners[..., 2], corners[..., 1], 1 - corners[..., 0], corners[..., 3]], 2)
    corners = torch.where(flip[:, None, None], mirrored, corners)
    kept = Boxes(torch.where(inside[..., None], corners, 0.0), torch.where(inside, boxes.classes, -1))
    return cropped, kept


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
