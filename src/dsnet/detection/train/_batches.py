"""Batches of training images with their boxes.

Random draws depend on the seed and the step alone, so that a resumed run sees the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsnet.core.cuda_graphs import GraphedFunction
from dsnet.core.seeding import seeded
from dsnet.data.transforms.auto_augment import to_device
from dsnet.detection.data.dataset import Boxes, DetectionDataset
from dsnet.detection.data.transforms import (
    AugmentationDraws,
    Preprocessing,
    augment,
    draw_augmentation,
    resize,
)
from dsnet.detection.train._loss import PriorTargets, prior_targets
from dsnet.detection.train.config import DetectionConfig
from dsnet.errors import DsnetError

__all__ = ["DetectionBatches"]

BOX_BUCKET = 8  # CUDA graphs are captured for numbers of boxes that are multiples of it


class DetectionBatches:
    """Draws, augments and matches the batches of a detector's training.

    Args:
        config: Settings of the run.
        dataset: Training images.
        preprocessing: Size and normalisation of the detector's images.
        priors: The detector's priors [p, 4], on its device.
        graphs: Whether the work on a CUDA device runs as CUDA graphs.

    Raises:
        DsnetError: An image has more boxes than there are priors.
    """

    def __init__(
        self,
        config: DetectionConfig,
        dataset: DetectionDataset,
        preprocessing: Preprocessing,
        priors: Tensor,
        *,
        graphs: bool = False,
    ) -> None:
        self.config, self.dataset, self.preprocessing = config, dataset, preprocessing
        self.priors, self.device, self.graphs = priors, priors.device, graphs
        self.boxes = dataset.boxes.to("cpu")
        self._matchers: dict[int, GraphedFunction[..., tuple[Tensor, PriorTargets]]] = {}  # by boxes
        if self.boxes.classes.shape[1] > len(priors):
            index = int((self.boxes.classes >= 0).sum(1).argmax())
            raise DsnetError(f"{dataset.paths[index]} has more boxes than there are priors ({len(priors)})")

    def epoch(self, epoch: int, first_step: int, epoch_steps: int) -> Iterator[tuple[Tensor, PriorTargets]]:
        """Yield images [B, 3, H, W] and the targets of their priors for the steps of an epoch."""
        batch = self.config.optim.batch
        order = torch.randperm(len(self.dataset), generator=seeded(self.config.run.seed, "order", epoch))
        for step in range(first_step, epoch_steps):
            indices = order[step * batch : (step + 1) * batch]
            images, boxes, draws = self._draw(indices, epoch * epoch_steps + step)
            if draws is None or not self.graphs:
                yield self._match(images, boxes, draws)
                continue
            padded = boxes.padded(-(-boxes.classes.shape[1] // BOX_BUCKET) * BOX_BUCKET)
            matcher = self._matchers.setdefault(padded.classes.shape[1], GraphedFunction(self._match))
            yield matcher(images, padded, draws)

    def sample(
        self, count: int, size: int, *, pass_number: int, first_draw: int
    ) -> Iterator[tuple[Tensor, Boxes]]:
        """Yield ``count`` images [B, 3, H, W] in random order, in batches of ``size``, with their boxes.

        Args:
            count: Number of images; all, if there are fewer.
            size: Images of a batch.
            pass_number: Seeds the order; every pass has its own.
            first_draw: Number of augmentations drawn before the first of these passes.
        """
        order = torch.randperm(
            len(self.dataset), generator=seeded(self.config.run.seed, "drawn", pass_number)
        )
        for start in range(0, min(count, len(order)), size):
            draw = first_draw + pass_number * len(order) + start
            yield self._augment(*self._draw(order[start : start + size], draw))

    def _draw(self, indices: Tensor, number: int) -> tuple[Tensor, Boxes, AugmentationDraws | None]:
        """Return stored images, their boxes and the draws of their augmentation, all on the device."""
        on_device = to_device(indices, self.dataset.images.device)
        images = self.dataset.images[on_device].to(self.device, non_blocking=True)
        boxes = self.boxes.take(indices).first(self.dataset.max_boxes(indices))
        if not self.config.data.augment:
            return images, boxes.to(self.device), None
        draws = draw_augmentation(boxes, seeded(self.config.run.seed, "cut", number))
        return images, boxes.to(self.device), draws.to(self.device)

    def _augment(self, images: Tensor, boxes: Boxes, draws: AugmentationDraws | None) -> tuple[Tensor, Boxes]:
        size, mean = self.config.data.size, self.preprocessing.mean
        if draws is None:
            x, boxes = resize(images, boxes, size, mean)
        else:
            x, boxes = augment(images, boxes, draws, size, mean)
        x = self.preprocessing.normalise(x)
        if self.config.run.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, boxes

    def _match(
        self, images: Tensor, boxes: Boxes, draws: AugmentationDraws | None
    ) -> tuple[Tensor, PriorTargets]:
        x, boxes = self._augment(images, boxes, draws)
        return x, prior_targets(self.priors, boxes)
