"""The steps of a detector's training: batches, losses, checkpoints, statistics at the end.

Draws depend on the seed and on the step alone, so a run goes on where it was stopped as if nothing had been.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.cuda_graphs import GraphedFunction
from dsnet.core.interrupt import StopRequest
from dsnet.core.metrics_log import LossBuffer, MetricsFile
from dsnet.core.seeding import seeded
from dsnet.data.transforms.auto_augment import to_device
from dsnet.detection.data.augment import AugmentationDraws, augment, draw_augmentation, resize
from dsnet.detection.data.dataset import Boxes, DetectionDataset
from dsnet.detection.eval.evaluate import DetectionResult, evaluate_detector
from dsnet.detection.io import SavedDetector, save_detector
from dsnet.detection.train.bn_calibration import calibrate_detector_bn
from dsnet.detection.train.config import DetectionConfig, DetectionOptimConfig
from dsnet.detection.train.loss import PriorTargets, prior_targets
from dsnet.detection.train.route_passes import GraphedRoutePasses, RoutePasses
from dsnet.errors import DsnetError
from dsnet.routes import Route
from dsnet.training.callbacks import Callback
from dsnet.training.loop import RunStatus, check_step, warn_of_other_threads
from dsnet.training.optim import (
    cosine,
    make_optimizer,
    optimizer_tensors,
    parameter_groups,
    restore_optimizer,
    set_learning_rate,
)

__all__ = ["DetectorTask", "detector_lr"]

ROOM = 8  # graphs are made for so many boxes an image, or a multiple of it


def detector_lr(optim: DetectionOptimConfig, step: int, epoch_steps: int) -> float:
    """The learning rate of a step."""
    warmup = round(optim.warmup * epoch_steps)
    if not optim.milestones:
        return optim.lr * cosine(step, steps=optim.epochs * epoch_steps, warmup=warmup)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return optim.lr * rise * 0.1 ** sum(step >= epoch * epoch_steps for epoch in optim.milestones)


class DetectorTask:
    """All routes of a detector, by the losses of the largest, the smallest and some between."""

    def __init__(
        self,
        config: DetectionConfig,
        found: SavedDetector,
        train: DetectionDataset,
        folder: Path,
        device: torch.device,
        callback: Callback,
    ) -> None:
        self.config, self.found, self.train, self.folder = config, found, train, folder
        self.device, self.callback = device, callback
        self.threads = torch.get_num_threads() if device.type == "cpu" else None  # sums depend on it
        self.detector = found.detector.to(device)
        if config.run.channels_last:
            self.detector.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # On a CPU torch's bfloat16 gradients of small maps are wrong.
        half = config.run.precision == "bfloat16" and device.type == "cuda"
        self.precision = torch.bfloat16 if half else None
        self.graphed = config.run.graphs and device.type == "cuda"
        self.passes = (GraphedRoutePasses if self.graphed else RoutePasses)(self.detector, self.precision)
        self._replays: dict[int, GraphedFunction[..., tuple[Tensor, PriorTargets]]] = {}  # by number of boxes
        self.boxes = train.boxes.to("cpu")
        self.priors = self.detector.priors(config.data.size)
        if train.boxes.classes.shape[1] > len(self.priors):
            at = int((train.boxes.classes >= 0).sum(1).argmax())
            raise DsnetError(f"{train.paths[at]} has more boxes than there are priors ({len(self.priors)})")
        optim = config.optim
        groups = parameter_groups([self.detector], optim.weight_decay)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.optimizer = make_optimizer("sgd", groups, lr=optim.lr, momentum=optim.momentum)
        self.epoch_steps = len(train) // optim.batch
        self.steps, self.step = optim.epochs * self.epoch_steps, 0

    def restore(self, saved: Checkpoint) -> None:
        """Where a run that was stopped left off."""
        before, now = saved.data.get("trained_on"), self._trained_on()
        if before != now:
            raise DsnetError(f"{self.folder} was started with {before}, the data has {now} now")
        check_step(self.folder, saved, self.steps)
        warn_of_other_threads(saved, self.threads, self.callback)
        self.step = saved.data["step"]
        if not self.step:  # stopped before the first step, when the optimiser has no state yet
            return
        if "optimizer" not in saved.tensors:
            raise DsnetError(f"{self.folder}: the checkpoint lacks optimizer; it cannot go on")
        try:
            restore_optimizer(self.optimizer, saved.tensors["optimizer"], self._unused())
        except DsnetError as error:
            raise DsnetError(f"{self.folder} cannot go on: {error}") from error

    def _unused(self) -> Iterator[torch.nn.Parameter]:
        """Parameters that take no part in a step, so that the optimiser keeps nothing for them."""
        network = self.detector.network
        whole = max(network.feature_shapes(0)) in self.detector.table.strides
        return (network.head.classifier if whole else network).parameters()

    def run(self, request: StopRequest) -> RunStatus:
        """Trains until the end, or until a signal asks to stop; then saves."""
        config, metrics = self.config, MetricsFile(self.folder, after=self.step)
        self.callback.on_train_begin(self.step, self.steps)
        losses, begun, at = LossBuffer(), time.monotonic(), self.step
        kept = begun
        try:
            while self.step < self.steps and not request:
                losses.add(self.step, self.learn(*self.ready()))
                self.step += 1
                if self.step % config.run.log_every == 0 or self.step % self.epoch_steps == 0:
                    values = losses.means()
                    seconds = time.monotonic() - begun
                    values["images_per_s"] = (self.step - at) * config.optim.batch / seconds
                    values["lr"] = detector_lr(config.optim, self.step - 1, self.epoch_steps)
                    begun, at = time.monotonic(), self.step
                    metrics.write("train", self.step, values)
                    self.callback.on_log(self.step, values)
                    if begun - kept > 60 * config.run.save_minutes:
                        self.save("last", optimizer=True)
                        kept = time.monotonic()
                epoch = (self.step - 1) // self.epoch_steps
                self.callback.on_step_end(self.step, epoch, config.optim.batch)
            losses.means()  # else a diverged network would take the place of a good one
            self.save("last", optimizer=True)
        finally:
            metrics.close()
        return RunStatus(step=self.step, steps=self.steps, signal=request.signal)

    def ready(self) -> tuple[Tensor, PriorTargets]:
        """The batch of the step that comes next."""
        batch = self.config.optim.batch
        epoch, place = divmod(self.step, self.epoch_steps)
        order = torch.randperm(len(self.train), generator=seeded(self.config.run.seed, "order", epoch))
        positions = order[place * batch : (place + 1) * batch]
        images, boxes, drawn = self._drawn(positions, self.step)
        if drawn is None or not self.graphed:
            return self._matched(images, boxes, drawn)
        room = -(-boxes.classes.shape[1] // ROOM) * ROOM
        replay = self._replays.setdefault(room, GraphedFunction(self._matched))
        return replay(images, boxes.padded(room), drawn)

    def _matched(
        self, images: Tensor, boxes: Boxes, drawn: AugmentationDraws | None
    ) -> tuple[Tensor, PriorTargets]:
        x, boxes = self._seen(images, boxes, drawn)
        return x, prior_targets(self.priors, boxes)

    def learn(self, x: Tensor, targets: PriorTargets) -> dict[str, Tensor]:
        """Forward, backward and optimiser; losses by name."""
        optim, seed = self.config.optim, self.config.run.seed
        self.detector.train()
        set_learning_rate(self.optimizer, detector_lr(optim, self.step, self.epoch_steps))
        routes = self._routes(seeded(seed, "routes", self.step))
        self.optimizer.zero_grad()
        paid = self.passes.step(x, targets, routes)
        if optim.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, optim.clip)
        self.optimizer.step()
        terms = {"loss": torch.stack([loss.offsets + loss.classes for loss in paid]).mean()}
        for name, loss in zip(("largest", "smallest"), paid, strict=False):
            terms |= {f"{name}/place": loss.offsets, f"{name}/kind": loss.classes}
        return terms

    def _routes(self, draws: torch.Generator) -> list[Route]:
        space = self.detector.network.space
        if len(space) == 1:
            return [space.largest]
        between = [route for route in space if route not in (space.smallest, space.largest)]
        count = min(self.config.optim.random, len(between))
        drawn = torch.randperm(len(between), generator=draws)[:count].tolist()
        return [space.largest, space.smallest, *(between[i] for i in drawn)]

    def batch(self, positions: Tensor, step: int) -> tuple[Tensor, Boxes]:
        """Images as the network wants them, augmented by the draws of that step, and their boxes."""
        return self._seen(*self._drawn(positions, step))

    def _drawn(self, positions: Tensor, step: int) -> tuple[Tensor, Boxes, AugmentationDraws | None]:
        """Stored images, their boxes and what is drawn for them, all on the device."""
        at = to_device(positions, self.train.images.device)
        images = self.train.images[at].to(self.device, non_blocking=True)
        boxes = self.boxes.take(positions).first(self.train.max_boxes(positions))
        if not self.config.data.augment:
            return images, boxes.to(self.device), None
        drawn = draw_augmentation(boxes, seeded(self.config.run.seed, "cut", step))
        return images, boxes.to(self.device), drawn.to(self.device)

    def _seen(self, images: Tensor, boxes: Boxes, drawn: AugmentationDraws | None) -> tuple[Tensor, Boxes]:
        size, mean = self.config.data.size, self.found.preprocessing.mean
        if drawn is None:
            x, boxes = resize(images, boxes, size, mean)
        else:
            x, boxes = augment(images, boxes, drawn, size, mean)
        x = self.found.preprocessing.normalise(x)
        if self.config.run.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, boxes

    def batches(self, count: int, size: int, purpose: int) -> Iterator[tuple[Tensor, Boxes]]:
        """So many training images in a drawn order, in batches."""
        order = torch.randperm(len(self.train), generator=seeded(self.config.run.seed, "drawn", purpose))
        for start in range(0, min(count, len(order)), size):
            yield self.batch(order[start : start + size], self.steps + purpose * len(order) + start)

    def epoch_for_gate(self, number: int) -> Iterator[tuple[Tensor, Boxes]]:
        """All training images once."""
        return self.batches(len(self.train), self.config.gate.batch, 1 + number)

    def calibrate(self) -> None:
        """The statistics of all routes, from images as training saw them."""
        count = min(self.config.data.calibration, len(self.train))
        size = self.config.optim.batch
        parts = self.callback.progress(self.batches(count, size, 0), -(-count // size), "statistics: batch")
        calibrate_detector_bn(self.detector, (x for x, _ in parts))
        self.detector.eval()

    def evaluate(self, test: DetectionDataset, routes: Sequence[Route | None]) -> Iterator[DetectionResult]:
        """On the test images."""
        return evaluate_detector(
            self.detector,
            test,
            self.found.preprocessing,
            routes,
            batch=self.config.optim.batch,
            progress=self.callback.progress,
        )

    def _trained_on(self) -> dict[str, Any]:
        return {"classes": list(self.train.classes), "images": len(self.train)}

    def save(self, name: str, data: dict[str, Any] | None = None, *, optimizer: bool = False) -> None:
        """A checkpoint."""
        threads = {} if self.threads is None else {"threads": self.threads}
        save_detector(
            self.folder,
            name,
            self.detector,
            step=self.step,
            classes=self.train.classes,
            preprocessing=self.found.preprocessing,
            tensors={"optimizer": optimizer_tensors(self.optimizer)} if optimizer else None,
            data={"trained_on": self._trained_on(), "steps": self.steps, **threads, **(data or {})},
        )
