"""Bytes → what the networks of a step see."""

from __future__ import annotations

import torch
from torch import Tensor

from dsnet.core.seeding import reseed, seeded
from dsnet.data.transforms.augment import Augment, normalise
from dsnet.data.transforms.mixup import draw_mixing
from dsnet.training.config import MixConfig
from dsnet.training.stage1.teacher import Channels

__all__ = ["Views"]


class Views:
    """Bytes → what the networks of a step see: augmented, normalised, mixed; drawn by step and rank."""

    def __init__(
        self,
        augment: Augment,
        mix: MixConfig,
        channels: Channels,
        *,
        seed: int,
        rank: int,
        device: torch.device,
        channels_last: bool = False,
    ) -> None:
        self.augment, self.mix, self.channels = augment, mix, channels
        self.seed, self.rank = seed, rank
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.generator = torch.Generator(device)

    def __call__(
        self, images: Tensor, labels: Tensor, *, count: int, step: int, classes: int
    ) -> tuple[list[Tensor], Tensor]:
        """``count`` views of ``images`` [V, B, 3, H, W] (V = 1: all from the same) and their labels."""
        reseed(self.generator, self.seed, "views", self.rank, step)
        host = seeded(self.seed, "policy", self.rank, step)
        # Partners, ratio and box are the same for all views and on all ranks.
        mixing = draw_mixing(
            images.shape[1:],
            mixup=self.mix.mixup,
            cutmix=self.mix.cutmix,
            device=images.device,
            generator=seeded(self.seed, "mixing", step),
        )
        views = []
        for number in range(count):
            view = self.augment(images[min(number, len(images) - 1)], self.generator, host)
            seen = self.augment.fill_with_noise(normalise(view, *self.channels), self.generator)
            seen = seen if mixing is None else mixing.images(seen)
            views.append(seen.contiguous(memory_format=self.layout))
        return views, labels if mixing is None else mixing.labels(labels, classes)
