"""The training task of classifiers: a supernet, an `Objective` and labelled images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet.core.checkpoint import Checkpoint, check_tensors
from dsnet.core.distributed.ranks import Ranks
from dsnet.core.seeding import seeded
from dsnet.data.dataset import Crops, ImageDataset
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.loading import save_checkpoint
from dsnet.routes import Route, RouteSpace
from dsnet.slicing import KeyState
from dsnet.training.callbacks import Callback
from dsnet.training.config import TrainConfig
from dsnet.training.evaluation import OnPredictions, RouteResult, evaluate
from dsnet.training.loop import LoopConfig, TrainingLoop, TrainingTask
from dsnet.training.optim import make_optimizer, optimizer_tensors, restore_optimizer, scheduled_rate
from dsnet.training.stage1.views import Views

__all__ = ["ClassifierTask", "Objective"]


class Objective:
    """How a supernet learns from a batch of labelled images: what is optimised, the losses, further state."""

    model: Supernet
    views: Views
    space: RouteSpace  # routes that are trained
    views_per_step: int = 1  # views of every image that a step takes

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return the parameter groups to optimise."""
        raise NotImplementedError

    def begin_epoch(self) -> None:
        """Put the network into the mode in which it is trained (by default that of training)."""
        self.model.train()

    def step(self, images: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """Run forward and backward on images [V, B, 3, H, W] of bytes; see `TrainingTask.step`."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Run after the optimizer."""

    def finish(self) -> None:
        """Run after the last step, to set the weights that are kept."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the state to save beside the network and the optimizer, by group of a checkpoint."""
        return {}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Load what `tensors` returned, after ``step`` steps."""

    def validation_routes(self) -> list[Route]:
        """Return the routes to validate: the smallest and the largest, if their norms have statistics."""
        ends = dict.fromkeys((self.space.smallest, self.space.largest))
        return [route for route in ends if KeyState.FRESH not in self.model.key_states(route)]


class ClassifierTask(TrainingTask[tuple[Tensor, Tensor]]):
    """Trains a supernet by an objective, on this rank's share of every batch.

    Args:
        config: Settings of the run.
        objective: What is optimised, and by which losses.
        train: Training images, on the device.
        held_out: Images to validate on, if any.
        ranks: Processes that train together.
        callback: Gets progress and warnings of validation.
        data: Plain data that goes into every checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        train: ImageDataset,
        held_out: ImageDataset | None,
        *,
        ranks: Ranks,
        callback: Callback,
        data: Mapping[str, Any],
    ) -> None:
        self.config, self.objective, self.model = config, objective, objective.model
        self.train, self.held_out, self.channels = train, held_out, objective.views.channels
        self.ranks, self.callback, self.data = ranks, callback, dict(data)
        optim = config.optim
        self.batch_size, self.epoch_steps = optim.batch, len(train) // optim.batch
        if self.epoch_steps == 0:
            raise DsnetError(f"optim.batch={optim.batch} is more than the {len(train)} training images")
        self.rank_batch = ranks.share(optim.batch, "optim.batch")
        self.steps = self.epoch_steps * optim.epochs
        groups = objective.groups(optim.weight_decay)
        self.optimizer = make_optimizer(optim.kind, groups, lr=optim.lr, momentum=optim.momentum)
        for group in groups:  # allocated once, then zeroed: every parameter takes part in every step
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.model.head.classifier.weight.device

    def loop(self, folder: Path) -> TrainingLoop:
        """Return the loop that trains this task into a run's folder."""
        optim, run = self.config.optim, self.config.run
        config = LoopConfig(
            epochs=optim.epochs,
            clip=optim.clip,
            log_every=run.log_every,
            validate_every=run.validate_every,
            save_minutes=run.save_minutes,
            save_steps=run.save_steps,
        )
        return TrainingLoop(self, config, folder, ranks=self.ranks, callback=self.callback)

    # --- steps -----------------------------------------------------------------------------------------
    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        optim, epoch_steps = self.config.optim, self.epoch_steps
        factor = None if optim.decay is None else optim.decay ** (step // epoch_steps)
        warmup = round(optim.warmup * epoch_steps)
        return scheduled_rate(optim.lr, step, steps=self.steps, warmup=warmup, factor=factor)

    def batches(self, epoch: int, first_step: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Return batches of images [V, B, 3, H, W] of bytes and labels [B], in the order of the epoch."""
        order = torch.randperm(len(self.train), generator=seeded(self.config.run.seed, "order", epoch))
        whole, share, rank = self.batch_size, self.rank_batch, self.ranks.rank
        starts = range(first_step * whole + rank * share, self.epoch_steps * whole, whole)
        positions = [order[start : start + share] for start in starts]
        return self.train.batches(positions, crops=self.crops(epoch, self.objective.views_per_step))

    def crops(self, epoch: int, views: int) -> Crops | None:
        """Return how the decoding workers crop, for sources that decode while training."""
        area = self.config.augment.crop
        if not self.train.crops_in_workers or area is None:
            return None
        seed = seeded(self.config.run.seed, "crops", epoch).initial_seed()
        return Crops(views=views, area=area, seed=seed)

    def begin_epoch(self) -> None:
        """Put the network into the mode in which it is trained."""
        self.objective.begin_epoch()

    def step(self, batch: tuple[Tensor, Tensor], step: int) -> dict[str, Tensor]:
        """Run forward and backward on a batch."""
        images, labels = batch
        return self.objective.step(images, labels, step)

    def end_step(self) -> None:
        """Run after the optimizer."""
        self.objective.end_step()

    # --- checkpoints -----------------------------------------------------------------------------------
    def save(self, folder: Path, name: str, *, step: int, data: Mapping[str, Any]) -> None:
        """Write a checkpoint."""
        tensors = {}
        if name == "last":
            tensors = {"optimizer": optimizer_tensors(self.optimizer), **self.objective.tensors()}
        save_checkpoint(folder, name, self.model, step=step, tensors=tensors, data={**self.data, **data})

    def restore(self, saved: Checkpoint) -> None:
        """Load network, optimizer and the objective's state."""
        expected = {"model": self.model.state_dict(), **self.objective.tensors()}
        lacking = {"optimizer", *expected} - set(saved.tensors)
        if lacking:
            raise DsnetError(f"the checkpoint lacks {', '.join(sorted(lacking))}")
        for group, values in expected.items():
            shapes = {name: value.shape for name, value in values.items()}
            check_tensors(group, saved.tensors[group], shapes)
        step = int(saved.data["step"])
        if step:  # before the first step an optimizer has no state
            restore_optimizer(self.optimizer, saved.tensors["optimizer"])
        self.model.load_state_dict(dict(saved.tensors["model"]))
        self.objective.restore(saved.tensors, step)

    # --- evaluation ------------------------------------------------------------------------------------
    def validate(self, epoch: int) -> list[RouteResult]:
        """Evaluate the objective's validation routes on the held-out images."""
        self.model.eval()
        routes = self.objective.validation_routes()
        if self.held_out is None or not routes:
            return []
        results = self.evaluate(self.held_out, routes, "validating")
        self._warn_if_guessing(epoch, results)
        return results

    def _warn_if_guessing(self, epoch: int, results: list[RouteResult]) -> None:
        """Report a network that does no better than chance after the warm-up."""
        chance = 1 / max(len(self.train.classes), 1)
        worst = min(results, key=lambda r: r.accuracy)
        guessing = worst.accuracy < chance + 0.05 * (1 - chance)
        if guessing and chance < 1 and epoch + 1 > self.config.optim.warmup:
            self.callback.on_message(
                f"not converging: after epoch {epoch + 1} route {worst.route} reaches {worst.accuracy:.1%} "
                f"of the held-out images, guessing reaches {chance:.1%} (scheme {self.config.scheme.name})"
            )

    def batches_in_order(self, source: ImageDataset) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised images and labels of this rank's share of a source."""
        mine = torch.arange(len(source))[self.ranks.rank :: self.ranks.world]
        for images, labels in source.batches(list(torch.split(mine, 2 * self.rank_batch)), full=False):
            yield normalise(images[0], *self.channels), labels

    def evaluate(
        self,
        source: ImageDataset,
        routes: list[Route],
        label: str,
        *,
        on_predictions: OnPredictions | None = None,
    ) -> list[RouteResult]:
        """Return the accuracy of routes on all images of a source; every rank evaluates its share.

        Args:
            source: Images and labels.
            routes: Routes to evaluate.
            label: Name of the operation for progress.
            on_predictions: Gets the predictions of this rank's share; see `dsnet.training.evaluate`.
        """
        ranks = self.ranks
        batches = -(-len(range(ranks.rank, len(source), ranks.world)) // (2 * self.rank_batch))
        progress = self.callback.progress(self.batches_in_order(source), batches, label)
        results = evaluate(self.model, progress, routes, on_predictions=on_predictions)
        counts = torch.tensor([[r.correct, r.images] for r in results], device=self.device)
        total = ranks.sum(counts).tolist()
        return [replace(r, correct=c, images=n) for r, (c, n) in zip(results, total, strict=True)]
