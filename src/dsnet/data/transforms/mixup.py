"""Mixup and CutMix on the device, drawn once a step so that all views of it are mixed alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = ["Mixing", "draw_mixing"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixing:
    """How the images of a step are mixed: mixup, or CutMix if there is a box.

    Attributes:
        partners: Index [B] of the image that each image is mixed with.
        ratio: Share of each image's own content.
        box: Top, bottom, left and right of the pixels that CutMix replaces.
    """

    partners: Tensor
    ratio: float
    box: tuple[int, int, int, int] | None = None

    def images(self, images: Tensor) -> Tensor:
        """Mix images [B, C, H, W]."""
        other = images[self.partners]
        if self.box is None:
            return images * self.ratio + other * (1 - self.ratio)
        top, bottom, left, right = self.box
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
        return mixed

    def labels(self, labels: Tensor, classes: int) -> Tensor:
        """Mix labels [B] to probabilities [B, classes]."""
        one_hot = F.one_hot(labels, classes).float()
        return one_hot * self.ratio + one_hot[self.partners] * (1 - self.ratio)


def draw_mixing(
    shape: torch.Size | tuple[int, ...],
    *,
    mixup: float,
    cutmix: float,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Mixing | None:
    """Draw how to mix the images of a step.

    Args:
        shape: Shape [B, C, H, W] of the images.
        mixup: α of the Beta(α, α) of mixup; 0 turns it off.
        cutmix: α of the Beta(α, α) of CutMix; 0 turns it off. If both are on, either is as likely.
        device: Device of the images.
        generator: Source of randomness, on the CPU, so that ranks can share it.
    """
    if mixup < 0 or cutmix < 0:
        raise DsnetError(f"mixup and cutmix must be at least 0, not {mixup} and {cutmix}")
    if mixup == 0 and cutmix == 0:
        return None
    count, _, height, width = shape
    partners = torch.randperm(count, generator=generator).to(device)
    coin, y, x = torch.rand(3, generator=generator).tolist()
    use_cutmix = cutmix > 0 and (mixup == 0 or coin < 0.5)
    ratio = _draw_beta(cutmix if use_cutmix else mixup, generator)
    if not use_cutmix:
        return Mixing(partners=partners, ratio=ratio)
    side = (1 - ratio) ** 0.5
    box_height, box_width = round(side * height), round(side * width)
    top, left = int(y * (height - box_height + 1)), int(x * (width - box_width + 1))
    box = (top, top + box_height, left, left + box_width)
    return Mixing(partners=partners, ratio=1 - box_height * box_width / (height * width), box=box)


def _draw_beta(alpha: float, generator: torch.Generator | None) -> float:
    """Draw from Beta(α, α) as the share of one of two Gamma(α) draws."""
    a, b = torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator=generator).tolist()
    return a / (a + b) if a + b > 0 else 0.5
