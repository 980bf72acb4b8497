"""Augmented, normalised and mixed views of image bytes for the networks of a step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsnet.core.seeding import reseed, seeded
from dsnet.data.transforms.augment import Augment, normalise
from dsnet.data.transforms.mixup import draw_mixing
from dsnet.errors import DsnetError
from dsnet.training.config import MixConfig, TrainConfig
from dsnet.training.stage1.teacher import Channels

__all__ = ["Views"]


class Views:
    """Turns images of bytes into views; draws depend on the seed, the rank and the step.

    Args:
        augment: Augmentation of each view.
        mix: Mixing of images and labels.
        channels: Mean and standard deviation of each channel.
        seed: Seed of the run.
        rank: This process, for draws that differ between processes.
        device: Device of the images.
        channels_last: Return views in the memory format ``channels_last``.
    """

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

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        channels: Channels,
        device: torch.device,
        *,
        rank: int = 0,
        crops_in_workers: bool = False,
    ) -> Views:
        """Create the views of a run; crops are left out if the decoding workers make them.

        Raises:
            DsnetError: The workers crop, so that ``augment.size`` has no effect.
        """
        augment, run = config.augment, config.run
        if crops_in_workers and augment.size is not None:
            raise DsnetError("augment.size is for sets in memory; data.size says how large files are decoded")
        if crops_in_workers:
            augment = replace(augment, crop=None, size=None)
        last = run.channels_last
        return cls(augment, config.mix, channels, seed=run.seed, rank=rank, device=device, channels_last=last)

    def __call__(
        self, images: Tensor, labels: Tensor, *, count: int, step: int, classes: int
    ) -> tuple[list[Tensor], Tensor]:
        """Return ``count`` views of ``images`` [V, B, 3, H, W] (V = 1: all of the same), and their labels."""
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
