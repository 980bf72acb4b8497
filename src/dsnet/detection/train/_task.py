"""The training task of detectors: all routes, by the losses of the largest, the smallest and some between."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.seeding import seeded
from dsnet.detection.data.dataset import DetectionDataset
from dsnet.detection.io import SavedDetector, save_detector
from dsnet.detection.model.fssd import Detector
from dsnet.detection.train._batches import DetectionBatches
from dsnet.detection.train._loss import PriorTargets
from dsnet.detection.train._route_passes import GraphedRoutePasses, RoutePasses
from dsnet.detection.train.config import DetectionConfig, DetectionOptimConfig
from dsnet.errors import DsnetError
from dsnet.routes import Route
from dsnet.slicing import Mode
from dsnet.training.bn_calibration import set_statistics
from dsnet.training.loop import TrainingTask
from dsnet.training.optim import (
    make_optimizer,
    optimizer_tensors,
    parameter_groups,
    restore_optimizer,
    scheduled_rate,
)

__all__ = ["DetectorTask", "calibrate_detector_bn", "detector_lr"]


def detector_lr(optim: DetectionOptimConfig, step: int, epoch_steps: int) -> float:
    """Return the learning rate of a step."""
    factor = None
    if optim.milestones:
        factor = 0.1 ** sum(step >= epoch * epoch_steps for epoch in optim.milestones)
    steps, warmup = optim.epochs * epoch_steps, round(optim.warmup * epoch_steps)
    return scheduled_rate(optim.lr, step, steps=steps, warmup=warmup, factor=factor)


class DetectorTask(TrainingTask[tuple[Tensor, PriorTargets]]):
    """Trains all routes of a detector.

    Args:
        config: Settings of the run.
        saved: The detector, on its device, with its classes and preprocessing.
        train: Training images.
    """

    def __init__(self, config: DetectionConfig, saved: SavedDetector, train: DetectionDataset) -> None:
        self.config, self.saved, self.train, self.detector = config, saved, train, saved.detector
        on_gpu, optim = self.detector.norm.weight.is_cuda, config.optim
        # On a CPU torch's bfloat16 gradients of small maps are wrong.
        self.precision = torch.bfloat16 if on_gpu and config.run.precision == "bfloat16" else None
        graphs = on_gpu and config.run.graphs
        self.passes = (GraphedRoutePasses if graphs else RoutePasses)(self.detector, self.precision)
        priors = self.detector.priors(config.data.size)
        self.data = DetectionBatches(config, train, saved.preprocessing, priors, graphs=graphs)
        self.optimizer = make_optimizer(
            "sgd",
            parameter_groups([self.detector], optim.weight_decay),
            lr=optim.lr,
            momentum=optim.momentum,
        )
        self.batch_size, self.epoch_steps = optim.batch, len(train) // optim.batch
        self.steps = optim.epochs * self.epoch_steps

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return detector_lr(self.config.optim, step, self.epoch_steps)

    def batches(self, epoch: int, first_step: int) -> Iterator[tuple[Tensor, PriorTargets]]:
        """Yield augmented images [B, 3, H, W] and the targets of their priors."""
        return self.data.epoch(epoch, first_step, self.epoch_steps)

    def begin_epoch(self) -> None:
        """Put the detector into training mode."""
        self.detector.train()

    def step(self, batch: tuple[Tensor, PriorTargets], step: int) -> dict[str, Tensor]:
        """Run forward and backward of this step's routes; return losses by name."""
        losses = self.passes.step(*batch, self._routes(seeded(self.config.run.seed, "routes", step)))
        terms = {"loss": torch.stack([loss.offsets + loss.classes for loss in losses]).mean()}
        for name, loss in zip(("largest", "smallest"), losses, strict=False):
            terms |= {f"{name}/place": loss.offsets, f"{name}/kind": loss.classes}
        return terms

    def _routes(self, generator: torch.Generator) -> list[Route]:
        space = self.detector.network.space
        if len(space) == 1:
            return [space.largest]
        between = [route for route in space if route not in (space.smallest, space.largest)]
        count = min(self.config.optim.random, len(between))
        chosen = torch.randperm(len(between), generator=generator)[:count].tolist()
        return [space.largest, space.smallest, *(between[i] for i in chosen)]

    # --- checkpoints ---------------------------------------------------------------------------------
    def save(
        self, folder: Path, name: str, *, step: int, data: Mapping[str, Any], resumable: bool = True
    ) -> None:
        """Write a checkpoint, with the optimizer if training can resume from it."""
        save_detector(
            folder,
            name,
            self.detector,
            step=step,
            classes=self.train.classes,
            preprocessing=self.saved.preprocessing,
            tensors={"optimizer": optimizer_tensors(self.optimizer)} if resumable else {},
            data={"trained_on": self._trained_on(), "steps": self.steps, **data},
        )

    def restore(self, saved: Checkpoint) -> None:
        """Load the optimizer's state; the detector of the checkpoint is loaded already."""
        before, now = saved.data.get("trained_on"), self._trained_on()
        if before != now:
            raise DsnetError(f"the run was started with {before}, the data has {now} now")
        if not saved.data["step"]:  # before the first step an optimizer has no state
            return
        if "optimizer" not in saved.tensors:
            raise DsnetError("the checkpoint lacks optimizer")
        restore_optimizer(self.optimizer, saved.tensors["optimizer"], self._unused_parameters())

    def _trained_on(self) -> dict[str, Any]:
        return {"classes": list(self.train.classes), "images": len(self.train)}

    def _unused_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return a superset of the parameters that no step uses, for which the optimizer has no state."""
        network = self.detector.network
        whole = max(network.feature_shapes(0)) in self.detector.table.strides
        return (network.head.classifier if whole else network).parameters()


def calibrate_detector_bn(detector: Detector, batches: Iterable[Tensor]) -> int:
    """Set the statistics of all routes, of the network and the detector alike, and count the images."""

    def run(images: Tensor, mode: Mode) -> None:
        deque(detector.outputs(images, detector.network.space, mode), maxlen=0)

    return set_statistics(detector, batches, run)
