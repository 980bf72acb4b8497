"""Augmentation on the device, every image by its own draw.

Bytes [B, 3, H, W] go in; what a network sees comes out. `Augment` draws crop, flip, policy, jitter and
erasing anew for every view; `Mixing` draws partners, ratio and box once a step, so that all views of a step
are mixed alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

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

__all__ = ["Augment", "Mixing", "check_channels", "draw_mixing", "normalise"]


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Bytes, or values in [0, 255], → float32 with this mean and deviation per channel."""
    scale, shift = _scales(tuple(mean), tuple(std), images.device)
    return (images * scale - shift).float()


def check_channels(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Raise where these are no means and deviations of channels: pixels would become NaN or infinite."""
    if len(mean) != len(std) or not all(map(math.isfinite, (*mean, *std))) or not all(s > 0 for s in std):
        raise DsnetError(
            "images are normalised by a finite mean and a deviation above 0 for every channel, not by mean="
            f"{shorten(mean)}, std={shorten(std)}"
        )


@functools.lru_cache(maxsize=64)
def _scales(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Kept on the device: a CUDA graph can read them, not make them."""
    check_channels(mean, std)
    with torch.inference_mode(False):  # whoever asks next may want gradients
        rows = torch.tensor([(1 / (255 * s), m / s) for m, s in zip(mean, std, strict=True)])
        return rows.to(device)[:, :, None, None].unbind(1)


Policy = Literal["autoaugment_cifar10", "autoaugment_imagenet", "randaugment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment:
    """Crop, flip, a policy, colour jitter and erasing, in this order; off by default."""

    padding: int = 0  # pixels added on every side before a crop of the old size
    crop: tuple[float, float] | None = None  # shares of the area to cut out and resize, instead of padding
    size: int | None = None  # pixels a side after ``crop``; as many as before by default
    flip: bool = False
    policy: Policy | None = None
    operations: int = 2  # of RandAugment, per image
    magnitude: float = 9.0  # of RandAugment, from 0 to 10
    magnitude_std: float = 0.0  # how far magnitudes deviate from image to image
    jitter: float = 0.0  # brightness, contrast and saturation change by up to this share
    erase: float = 0.0  # probability that a box of 2 to 33 % of an image is erased
    erase_fill: Literal["black", "noise"] = "black"  # noise: normal, per pixel, in normalised images (DeiT)

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise DsnetError(f"padding must be at least 0, not {self.padding}")
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
        if self.operations < 1:
            raise DsnetError(f"operations must be at least 1, not {self.operations}")
        if not 0 <= self.magnitude <= 10:
            raise DsnetError(f"magnitude must lie in [0, 10], not {self.magnitude}")
        if not 0 <= self.magnitude_std < math.inf:
            raise DsnetError(f"magnitude_std must be at least 0 and finite, not {self.magnitude_std}")
        if not 0 <= self.jitter < math.inf:
            raise DsnetError(f"jitter must be at least 0 and finite, not {self.jitter}")
        if not 0 <= self.erase <= 1:
            raise DsnetError(f"erase is a probability, not {self.erase}")
        if self.erase_fill not in ("black", "noise"):
            raise DsnetError(f"erase_fill must be black or noise, not {shorten(self.erase_fill)}")

    def __call__(
        self, images: Tensor, generator: torch.Generator | None = None, host: torch.Generator | None = None
    ) -> Tensor:
        """A view of every image; draws from ``generator``, which lives on the images' device.

        A policy draws from ``host``, on the CPU; without one from ``generator`` if that is there.
        """
        if host is None and generator is not None and generator.device.type == "cpu":
            host = generator
        if self.padding:
            images = _random_crop(images, self.padding, generator)
        if self.crop is not None:
            images = _resized_crop(images, self.crop, self.size, generator)
        if self.flip:
            chosen = torch.rand(len(images), device=images.device, generator=generator) < 0.5
            images = torch.where(chosen[:, None, None, None], images.flip(3), images)
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
            images = images.masked_fill(_erased(images, self.erase, generator), 0)
        return images

    def fill_with_noise(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Erase boxes of normalised images, where they are to hold noise: its mean is 0, its deviation 1."""
        if not self.erase or self.erase_fill != "noise":
            return images
        inside = _erased(images, self.erase, generator)
        noise = torch.randn(images.shape, device=images.device, dtype=images.dtype, generator=generator)
        return torch.where(inside, noise, images)


def _random_crop(images: Tensor, padding: int, generator: torch.Generator | None) -> Tensor:
    count, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, count, 1), device=images.device, generator=generator)
    rows = (top + torch.arange(height, device=images.device))[:, None, :, None]
    columns = (left + torch.arange(width, device=images.device))[:, None, None, :]
    every = torch.arange(count, device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return padded[every, channels, rows, columns]


def _resized_crop(
    images: Tensor, shares: tuple[float, float], size: int | None, generator: torch.Generator | None
) -> Tensor:
    """Boxes of a drawn share of the area, 3/4 to 4/3 as broad as tall where that fits, resized bilinearly."""
    count, _, height, width = images.shape
    draws = torch.rand(4, count, device=images.device, generator=generator)
    share = shares[0] + (shares[1] - shares[0]) * draws[0]
    # In shares of the sides a box of aspect r has the aspect r·H/W: the share bounds those that fit.
    least = share.clamp(min=3 / 4 * height / width).log()
    most = share.reciprocal().clamp(max=4 / 3 * height / width).log()
    aspect = torch.lerp(least, most, draws[1]).exp()
    broad, tall = (share * aspect).sqrt().clamp(max=1), (share / aspect).sqrt().clamp(max=1)
    zero = torch.zeros_like(share)
    x, y = (1 - broad) * (2 * draws[2] - 1), (1 - tall) * (2 * draws[3] - 1)
    thetas = torch.stack((broad, zero, x, zero, tall, y), 1).view(count, 2, 3)
    grid = affine_grid(thetas, size or height, size or width)
    sampled = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return sampled.round_().to(torch.uint8)


def _jitter(images: Tensor, strength: float, generator: torch.Generator | None) -> Tensor:
    draws = torch.rand(3, len(images), device=images.device, generator=generator)
    least = max(0.0, 1 - strength)
    factors = least + (1 + strength - least) * draws
    return color(contrast(brightness(images, factors[0]), factors[1]), factors[2])


def _erased(images: Tensor, probability: float, generator: torch.Generator | None) -> Tensor:
    """[N, 1, H, W]: the pixels of a random box in every image that is drawn to lose one."""
    count, _, height, width = images.shape
    draws = torch.rand(5, count, device=images.device, generator=generator)
    area = (0.02 + 0.31 * draws[0]) * height * width
    aspect = torch.exp((2 * draws[1] - 1) * 1.2)  # about 0.3 to 3.3
    tall = (area * aspect).sqrt().clamp(max=height)
    broad = (area / aspect).sqrt().clamp(max=width)
    top, left = draws[2] * (height - tall), draws[3] * (width - broad)
    inside = _box(top, left, tall, broad, height, width) & (draws[4] < probability)[:, None, None]
    return inside[:, None]


def _box(top: Tensor, left: Tensor, tall: Tensor, broad: Tensor, height: int, width: int) -> Tensor:
    """[N, H, W]: which pixels lie in each image's box."""
    y = torch.arange(height, device=top.device)[None, :, None] + 0.5
    x = torch.arange(width, device=top.device)[None, None, :] + 0.5
    top, left, tall, broad = (side[:, None, None] for side in (top, left, tall, broad))
    return (y > top) & (y < top + tall) & (x > left) & (x < left + broad)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixing:
    """How a step's images are mixed: mixup (no box) or cutmix (a box), the same for all views."""

    partners: Tensor  # [B]: whom every image is mixed with
    ratio: float  # how much of an image is its own
    box: tuple[int, int, int, int] | None = None  # top, bottom, left, right

    def images(self, images: Tensor) -> Tensor:
        """Mixed images [B, C, H, W]."""
        other = images[self.partners]
        if self.box is None:
            return images * self.ratio + other * (1 - self.ratio)
        top, bottom, left, right = self.box
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
        return mixed

    def labels(self, labels: Tensor, classes: int) -> Tensor:
        """Probabilities [B, classes] of the mixed images' labels [B]."""
        own = F.one_hot(labels, classes).float()
        return own * self.ratio + own[self.partners] * (1 - self.ratio)


def draw_mixing(
    shape: torch.Size | tuple[int, ...],
    *,
    mixup: float,
    cutmix: float,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Mixing | None:
    """Draws a step's mixing for images [B, C, H, W]; ``generator`` is on the CPU, so ranks can share it.

    ``mixup`` and ``cutmix`` are the α of their Beta(α, α); where both are above 0 either is as likely.
    """
    if mixup < 0 or cutmix < 0:
        raise DsnetError(f"mixup and cutmix must be at least 0, not {mixup} and {cutmix}")
    if mixup == 0 and cutmix == 0:
        return None
    count, _, height, width = shape
    partners = torch.randperm(count, generator=generator).to(device)
    coin, y, x = torch.rand(3, generator=generator).tolist()
    cut = cutmix > 0 and (mixup == 0 or coin < 0.5)
    ratio = _beta(cutmix if cut else mixup, generator)
    if not cut:
        return Mixing(partners=partners, ratio=ratio)
    side = (1 - ratio) ** 0.5
    tall, broad = round(side * height), round(side * width)
    top, left = int(y * (height - tall + 1)), int(x * (width - broad + 1))
    box = (top, top + tall, left, left + broad)
    return Mixing(partners=partners, ratio=1 - tall * broad / (height * width), box=box)


def _beta(alpha: float, generator: torch.Generator | None) -> float:
    """A draw from Beta(α, α), as the share of one of two Gamma(α) draws."""
    a, b = torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator=generator).tolist()
    return a / (a + b) if a + b > 0 else 0.5
