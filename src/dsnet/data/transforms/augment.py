"""Augmentation and normalisation of batches of bytes [B, 3, H, W] on the device, drawn for each image."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.core.ranges import check_range
from dsnet.data.transforms.auto_augment import (
    CIFAR10,
    IMAGENET,
    affine_grid,
    auto_augment,
    brightness,
    color,
    contrast,
    rand_augment,
)
from dsnet.errors import DsnetError, shorten

__all__ = ["Augment", "normalise"]


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalise values in [0, 255] by the mean and deviation of each channel, to float32."""
    scale, shift = _scales(tuple(mean), tuple(std), images.device)
    return (images * scale - shift).float()


@functools.lru_cache(maxsize=64)
def _scales(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Cache the factors on the device: a CUDA graph can read them, but not create them."""
    if len(mean) != len(std) or not all(map(math.isfinite, (*mean, *std))) or not all(s > 0 for s in std):
        raise DsnetError(
            "images are normalised by a finite mean and a deviation above 0 for every channel, not by mean="
            f"{shorten(mean)}, std={shorten(std)}"
        )
    with torch.inference_mode(False):  # a later caller may need gradients
        rows = torch.tensor([(1 / (255 * s), m / s) for m, s in zip(mean, std, strict=True)])
        return rows.to(device)[:, :, None, None].unbind(1)


Policy = Literal["autoaugment_cifar10", "autoaugment_imagenet", "randaugment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Crop, flip, a policy, color jitter and erasing, in this order; all are off by default.

    Attributes:
        padding: Pixels added on each side before a random crop of the original size.
        crop: Range of the share of the area to crop and resize, instead of padding.
        size: Side of the images after ``crop`` (default: unchanged).
        flip: Flip horizontally with probability ½.
        policy: AutoAugment or RandAugment.
        operations: Number of operations of RandAugment.
        magnitude: Magnitude of RandAugment, from 0 to 10.
        magnitude_std: Standard deviation of the magnitude over images.
        jitter: Largest relative change of brightness, contrast and saturation.
        erase: Probability that a box of 2 to 33 % of an image is erased.
        erase_fill: ``black``, or ``noise``: normal noise in the normalised images, as in DeiT.
    """

    padding: int = 0
    crop: tuple[float, float] | None = None
    size: int | None = None
    flip: bool = False
    policy: Policy | None = None
    operations: int = 2
    magnitude: float = 9.0
    magnitude_std: float = 0.0
    jitter: float = 0.0
    erase: float = 0.0
    erase_fill: Literal["black", "noise"] = "black"

    def __post_init__(self) -> None:
        check_range(self, "padding", least=0)
        check_range(self, "operations", least=1)
        check_range(self, "magnitude", least=0, most=10)
        check_range(self, "magnitude_std", "jitter", least=0, below=math.inf)
        check_range(self, "erase", least=0, most=1)
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise DsnetError(f"crop must be two rising shares above 0 and up to 1, not {self.crop}")
        if self.crop is not None and self.padding:
            raise DsnetError(f"crop {self.crop} and padding {self.padding} exclude each other: set one")
        if self.size is not None and (self.crop is None or self.size < 1):
            raise DsnetError(f"size must be at least 1 and needs crop, not {self.size} with crop {self.crop}")
        if self.policy is not None and self.policy not in get_args(Policy):
            raise DsnetError(
                f"policy must be one of {', '.join(get_args(Policy))}, not {shorten(self.policy)}"
            )
        if self.erase_fill not in ("black", "noise"):
            raise DsnetError(f"erase_fill must be black or noise, not {shorten(self.erase_fill)}")

    def __call__(
        self, images: Tensor, generator: torch.Generator | None = None, host: torch.Generator | None = None
    ) -> Tensor:
        """Draw a view of each image.

        Args:
            images: Bytes [B, 3, H, W].
            generator: Source of randomness, on the images' device.
            host: Source of randomness of policies, on the CPU (default: ``generator`` if it is on the CPU).
        """
        if host is None and generator is not None and generator.device.type == "cpu":
            host = generator
        if self.padding:
            images = _random_crop(images, self.padding, generator)
        if self.crop is not None:
            images = _resized_crop(images, self.crop, self.size, generator)
        if self.flip:
            flipped = torch.rand(len(images), device=images.device, generator=generator) < 0.5
            images = torch.where(flipped[:, None, None, None], images.flip(3), images)
        match self.policy:
            case "autoaugment_cifar10":
                images = auto_augment(images, CIFAR10, host)
            case "autoaugment_imagenet":
                images = auto_augment(images, IMAGENET, host)
            case "randaugment":
                images = rand_augment(images, self.operations, self.magnitude, self.magnitude_std, host)
        if self.jitter:
            images = _jitter(images, self.jitter, generator)
        if self.erase and self.erase_fill == "black":
            images = images.masked_fill(_erase_mask(images, self.erase, generator), 0)
        return images

    def fill_with_noise(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill erased boxes of normalised images with standard normal noise, if ``erase_fill`` says so."""
        if not self.erase or self.erase_fill != "noise":
            return images
        inside = _erase_mask(images, self.erase, generator)
        noise = torch.randn(images.shape, device=images.device, dtype=images.dtype, generator=generator)
        return torch.where(inside, noise, images)


def _random_crop(images: Tensor, padding: int, generator: torch.Generator | None) -> Tensor:
    count, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, count, 1), device=images.device, generator=generator)
    rows = (top + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (left + torch.arange(width, device=images.device))[:, None, None, :]
    index = torch.arange(count, device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return padded[index, channels, rows, columns]


def _resized_crop(
    images: Tensor, shares: tuple[float, float], size: int | None, generator: torch.Generator | None
) -> Tensor:
    """Crop boxes of a random area and an aspect ratio of 3/4 to 4/3 where that fits; resize bilinearly."""
    count, _, height, width = images.shape
    draws = torch.rand(4, count, device=images.device, generator=generator)
    share = shares[0] + (shares[1] - shares[0]) * draws[0]
    # Relative to the sides, a box of aspect r has the aspect r·H/W; its area limits the aspects that fit.
    low = share.clamp(min=3 / 4 * height / width).log()
    high = share.reciprocal().clamp(max=4 / 3 * height / width).log()
    aspect = torch.lerp(low, high, draws[1]).exp()
    box_width, box_height = (share * aspect).sqrt().clamp(max=1), (share / aspect).sqrt().clamp(max=1)
    zero = torch.zeros_like(share)
    x, y = (1 - box_width) * (2 * draws[2] - 1), (1 - box_height) * (2 * draws[3] - 1)
    thetas = torch.stack((box_width, zero, x, zero, box_height, y), 1).view(count, 2, 3)
    grid = affine_grid(thetas, size or height, size or width)
    sampled = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return sampled.round_().to(torch.uint8)


def _jitter(images: Tensor, strength: float, generator: torch.Generator | None) -> Tensor:
    draws = torch.rand(3, len(images), device=images.device, generator=generator)
    low = max(0.0, 1 - strength)
    factors = low + (1 + strength - low) * draws
    return color(contrast(brightness(images, factors[0]), factors[1]), factors[2])


def _erase_mask(images: Tensor, probability: float, generator: torch.Generator | None) -> Tensor:
    """Return the mask [N, 1, H, W] of a random box in each image that is drawn for erasing."""
    count, _, height, width = images.shape
    draws = torch.rand(5, count, device=images.device, generator=generator)
    area = (0.02 + 0.31 * draws[0]) * height * width
    aspect = torch.exp((2 * draws[1] - 1) * 1.2)  # about 0.3 to 3.3
    box_height = (area * aspect).sqrt().clamp(max=height)
    box_width = (area / aspect).sqrt().clamp(max=width)
    top, left = draws[2] * (height - box_height), draws[3] * (width - box_width)
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    x = torch.arange(width, device=images.device) + 0.5
    sides = (top, left, top + box_height, left + box_width, draws[4] < probability)
    top, left, bottom, right, erased = (side[:, None, None, None] for side in sides)
    return (y > top) & (y < bottom) & (x > left) & (x < right) & erased
