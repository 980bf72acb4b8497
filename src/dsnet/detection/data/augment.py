"""SSD's augmentation on the device, every image by its own draw: colours, zooming out, crops, flips.

Zooming out and cropping are one window: a box, as shares of the image, that is cut out and resized. Around an
image there is its channels' mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.data.transforms.augment import normalise
from dsnet.data.transforms.auto_augment import brightness, color, contrast, to_device
from dsnet.detection.boxes import area
from dsnet.detection.data.dataset import Boxes

__all__ = ["Draws", "changed", "cut", "draw_changes", "draw_windows", "whole"]

OUT = 4.0  # an image is zoomed out to at most so many times its side, every other time
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.0)  # that a crop shares at least with some box; the last: whatever
TRIES = 20  # windows that are drawn for an image; where none will do it stays whole
JITTER = 0.5  # of brightness, contrast and saturation


class Draws(NamedTuple):
    """What is drawn for B images."""

    windows: Tensor  # [B, 4]
    flip: Tensor  # [B]
    factors: Tensor  # [3, B]: of brightness, contrast and saturation

    def to(self, device: torch.device) -> Draws:
        """The same on a device, without waiting for it."""
        return Draws(*(to_device(drawn, device) for drawn in self))


def draw_changes(boxes: Boxes, draws: torch.Generator) -> Draws:
    """For images with these boxes. ``draws`` is on the CPU: the same on every device."""
    count = len(boxes.classes)
    windows = draw_windows(boxes, draws)
    flip = torch.rand(count, generator=draws) < 0.5
    factors = 1 + JITTER * (2 * torch.rand(3, count, generator=draws) - 1)
    return Draws(windows, flip, torch.where(torch.rand(3, count, generator=draws) < 0.5, factors, 1.0))


def changed(
    images: Tensor, boxes: Boxes, drawn: Draws, size: int, mean: tuple[float, ...]
) -> tuple[Tensor, Boxes]:
    """Bytes [B, 3, S, S] → values in [0, 255] [B, 3, size, size], and the boxes that are still in them."""
    bright, contrasted, saturated = drawn.factors
    images = color(contrast(brightness(images, bright), contrasted), saturated)
    return cut(images, boxes, drawn.windows, drawn.flip, size, mean)


def whole(images: Tensor, boxes: Boxes, size: int, mean: tuple[float, ...]) -> tuple[Tensor, Boxes]:
    """Images as they are, resized."""
    windows = torch.tensor([0.0, 0.0, 1.0, 1.0], device=images.device).expand(len(images), 4)
    return cut(images, boxes, windows, torch.zeros_like(windows[:, 0], dtype=torch.bool), size, mean)


def draw_windows(boxes: Boxes, draws: torch.Generator) -> Tensor:
    """Windows [B, 4], corners as shares of the image: larger than it, a crop, or the image itself.

    Every other image is zoomed out. Then it stays whole or is cropped to 0.3 to 1 of its sides, half to twice
    as wide as high, so that the crop shares at least a drawn part with some box and holds the centre of one.
    """
    corners, there = boxes.corners.cpu(), boxes.classes.cpu() >= 0
    count = len(corners)

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=draws)

    side = torch.where(uniform(count) < 0.5, uniform(count, low=1.0, high=OUT), 1.0)
    left_top = uniform(count, 2) * (1 - side[:, None])  # of the canvas, from 1 - side to 0
    width, height = uniform(2, count, TRIES, low=0.3)
    start = uniform(count, TRIES, 2) * (1 - torch.stack([width, height], 2))
    tried = torch.cat([start, start + torch.stack([width, height], 2)], 2)
    tried = left_top[:, None].repeat(1, 1, 2) + side[:, None, None] * tried  # [B, TRIES, 4]
    least = torch.tensor(SHARES)[torch.randint(0, len(SHARES), (count,), generator=draws)]
    good = (width / height >= 0.5) & (width / height <= 2)
    good &= ((_shared(tried, corners) >= least[:, None, None]) & there[:, None]).any(2)
    good &= (_holds(tried, corners) & there[:, None]).any(2)
    crop = good.any(1) & (uniform(count) >= 1 / (len(SHARES) + 1))
    chosen = tried[torch.arange(count), good.to(torch.uint8).argmax(1)]
    canvas = torch.cat([left_top, left_top + side[:, None]], 1)
    return torch.where(crop[:, None], chosen, canvas)


def _shared(windows: Tensor, corners: Tensor) -> Tensor:
    """Intersection over union of windows [B, t, 4] and boxes [B, n, 4]: [B, t, n]."""
    low = torch.maximum(windows[:, :, None, :2], corners[:, None, :, :2])
    high = torch.minimum(windows[:, :, None, 2:], corners[:, None, :, 2:])
    common = (high - low).clamp(min=0).prod(3)
    return common / (area(windows)[:, :, None] + area(corners)[:, None] - common).clamp(min=1e-12)


def _holds(windows: Tensor, corners: Tensor) -> Tensor:
    """Whether windows [B, t, 4] hold the centres of boxes [B, n, 4]: [B, t, n]."""
    centre = ((corners[..., :2] + corners[..., 2:]) / 2)[:, None]
    return ((centre > windows[:, :, None, :2]) & (centre < windows[:, :, None, 2:])).all(3)


def cut(
    images: Tensor, boxes: Boxes, windows: Tensor, flip: Tensor, size: int, mean: tuple[float, ...]
) -> tuple[Tensor, Boxes]:
    """Cuts windows [B, 4] out of images [B, 3, S, S], some [B] mirrored; boxes whose centre is inside stay.

    Images are values in [0, 255]; what lies beyond them is ``mean``, of values in [0, 1].
    """
    around = normalise(images, mean, (1 / 255,) * 3)  # the mean is 0 now, as what lies beyond
    span, middle = windows[:, 2:] - windows[:, :2], windows[:, 2:] + windows[:, :2] - 1
    sign = torch.where(flip, -1.0, 1.0)
    zero = torch.zeros_like(sign)
    grid = F.affine_grid(
        torch.stack([span[:, 0] * sign, zero, middle[:, 0], zero, span[:, 1], middle[:, 1]], 1).view(
            -1, 2, 3
        ),
        [len(images), 3, size, size],
        align_corners=False,
    )
    found = F.grid_sample(around, grid, align_corners=False)
    found = normalise(found, tuple(-m for m in mean), (1 / 255,) * 3)
    inside = _holds(windows[:, None], boxes.corners)[:, 0] & (boxes.classes >= 0)
    moved = (boxes.corners - windows[:, None, :2].repeat(1, 1, 2)) / span[:, None].repeat(1, 1, 2)
    moved = moved.clamp(0, 1)
    mirrored = torch.stack([1 - moved[..., 2], moved[..., 1], 1 - moved[..., 0], moved[..., 3]], 2)
    moved = torch.where(flip[:, None, None], mirrored, moved)
    kept = torch.where(inside[..., None], moved, 0.0)
    return found, Boxes(kept, torch.where(inside, boxes.classes, -1))
