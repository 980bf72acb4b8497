"""The training loop that both stages share: steps, schedule, records, validation, checkpoints, stopping.

What is trained plugs in as a `Task`; who looks on plugs in as a `Watch`. All draws are a function of the seed
and the position, so a run that goes on from a checkpoint makes the same steps as one that never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsnet.core.distributed.ranks import Ranks
from dsnet.core.interrupt import StopRequest
from dsnet.core.metrics_log import DivergedError, LossBuffer, MetricsFile
from dsnet.core.seeding import seeded
from dsnet.data.dataset import Crops, Source
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.loading import (
    Checkpoint,
    check_tensors,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from dsnet.routes import Route, RouteSpace
from dsnet.training.config import TrainConfig
from dsnet.training.evaluate import RouteResult, Seen, evaluate
from dsnet.training.optim import learning_rate, make_optimizer, set_learning_rate
from dsnet.training.stage1.teacher import Channels
from dsnet.training.stage1.views import Views

__all__ = ["Ending", "Loop", "Task", "Watch", "check_step", "tell_other_threads"]


class Task(Protocol):
    """What a loop trains."""

    model: Supernet
    views: Views

    @property
    def space(self) -> RouteSpace:
        """The routes that are trained."""

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """What is optimised, as an optimiser takes it."""

    @property
    def views_in_a_step(self) -> int:
        """How many views of the images a step takes."""

    def begin_epoch(self) -> None:
        """Puts the network in the mode that it is trained in."""

    def step(self, images: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """Forward and backward; losses by name, ``loss`` being what is minimised."""

    def update(self) -> None:
        """After the optimiser."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What must be saved beside the network and the optimiser."""

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Takes up what `tensors` gave."""

    def validation_routes(self) -> list[Route]:
        """The routes that tell how training goes."""


class Watch:
    """Looks on; every method may be overridden."""

    def started(self, step: int, steps: int) -> None:
        """Training begins, or goes on, after ``step`` of ``steps``."""

    def stepped(self, step: int, epoch: int, images: int) -> None:
        """A step has been made on so many images."""

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Losses and rates since the last time."""

    def validated(self, step: int, epoch: int, results: list[RouteResult]) -> None:
        """Held-out images have been classified."""

    def told(self, message: str) -> None:
        """Something a person should know."""

    def progress(self, what: str, batches: Iterator[Any], total: int) -> Iterator[Any]:
        """Passes on the batches of something that takes a while."""
        return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How training ended."""

    step: int
    steps: int
    signal: int | None = None  # that asked to stop

    @property
    def done(self) -> bool:
        """Whether all steps were made."""
        return self.step == self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Best:
    score: float
    step: int
    tensors: dict[str, Tensor] | None  # none: written already


def tell_other_threads(saved: Checkpoint, now: int | None, watch: Watch) -> None:
    """Says so where training goes on with another number of threads on the CPU (none: on a GPU)."""
    before = saved.data.get("threads")
    if isinstance(before, int) and now is not None and before != now:
        watch.told(
            f"going on with {now} thread{'s' * (now != 1)} after {before}: results are no longer bit for bit "
            f"those of a run that never stopped; --threads {before} (torch.set_num_threads) keeps them"
        )


def check_step(folder: Path, saved: Checkpoint, steps: int) -> None:
    """Raises where a checkpoint is of a later step than its run has."""
    if saved.data["step"] > steps:
        raise DsnetError(
            f"{folder} cannot go on: its checkpoint is of step {saved.data['step']}, and its settings with "
            f"these images make {steps} steps"
        )


class Loop:
    """Trains a task on a source of images, into a folder."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        train: Source,
        held_out: Source | None,
        *,
        channels: Channels,
        folder: Path,
        ranks: Ranks,
        watch: Watch,
        data: Mapping[str, Any],
    ) -> None:
        self.config, self.task, self.train, self.held_out = config, task, train, held_out
        self.channels, self.folder, self.ranks, self.watch = channels, folder, ranks, watch
        self.data = dict(data)  # plain data that goes into every checkpoint
        if task.model.head.classifier.weight.device.type == "cpu":
            self.data["threads"] = torch.get_num_threads()  # sums depend on it
        optim = config.optim
        self.epoch_steps = len(train) // optim.batch
        if self.epoch_steps == 0:
            raise DsnetError(f"optim.batch={optim.batch} is more than the {len(train)} training images")
        self.batch = ranks.share(optim.batch, "optim.batch")
        self.steps = self.epoch_steps * optim.epochs
        groups = task.groups(optim.weight_decay)
        self.parameters = [p for group in groups for p in group["params"]]
        self.optimizer: Optimizer = make_optimizer(optim.kind, groups, lr=optim.lr, momentum=optim.momentum)
        for parameter in self.parameters:  # made once, then zeroed: every parameter takes part in every step
            parameter.grad = torch.zeros_like(parameter)
        self.step, self.saved = 0, -1
        self.best: _Best | None = None
        self.losses = LossBuffer()

    # --- checkpoints -----------------------------------------------------------------------------------
    def restore(self, saved: Checkpoint) -> None:
        """Goes on from a checkpoint."""
        lacking = {"optimizer", *self.task.tensors()} - set(saved.tensors)
        if lacking:
            raise DsnetError(
                f"{self.folder}: the checkpoint lacks {', '.join(sorted(lacking))}; it cannot go on"
            )
        try:
            for group, own in {"model": self.task.model.state_dict(), **self.task.tensors()}.items():
                shapes = {name: tuple(value.shape) for name, value in own.items()}
                check_tensors(group, saved.tensors[group], shapes)
            restore_optimizer(self.optimizer, saved.tensors["optimizer"])
        except DsnetError as error:
            raise DsnetError(f"{self.folder} cannot go on: {error}") from error
        check_step(self.folder, saved, self.steps)
        tell_other_threads(saved, self.data.get("threads"), self.watch)
        self.task.model.load_state_dict(dict(saved.tensors["model"]))
        self.step = self.saved = int(saved.data["step"])
        self.task.restore(saved.tensors, self.step)
        best = saved.data.get("best")
        if best is not None:
            self.best = _Best(**best, tensors=None)

    def save(self) -> None:
        """Writes ``best``, where it is new, and ``last``; only what is known to be finite."""
        self._look()
        if self.ranks.first and self.step != self.saved:
            data, model = dict(self.data), self.task.model
            if self.best is not None:
                score, step = self.best.score, self.best.step
                data["best"] = {"score": score, "step": step}
                if self.best.tensors is not None:
                    weights = {"model": self.best.tensors}
                    save_checkpoint(self.folder, "best", model, step=step, tensors=weights, data=data)
                    self.best = replace(self.best, tensors=None)
            tensors = {"optimizer": optimizer_tensors(self.optimizer), **self.task.tensors()}
            save_checkpoint(self.folder, "last", model, step=self.step, tensors=tensors, data=data)
        self.saved = self.step
        self.ranks.wait()

    # --- training --------------------------------------------------------------------------------------
    def run(self, stop: StopRequest) -> Ending:
        """Makes the steps that are left, or those until someone asks to stop."""
        self.metrics = MetricsFile(self.folder, after=self.step) if self.ranks.first else None
        self.watch.started(self.step, self.steps)
        self._clock = self._last_save = time.monotonic()
        self._since_look = 0
        try:
            while self.step < self.steps:
                if self._epoch(stop):
                    self.save()
                    return Ending(step=self.step, steps=self.steps, signal=stop.signal)
            self.save()
        except DivergedError as error:
            kept = (
                f"the checkpoint of step {self.saved} is kept" if self.saved >= 0 else "nothing was saved yet"
            )
            raise DivergedError(
                f"{error}; {kept}. A lower optim.lr, a longer optim.warmup or optim.clip often helps"
            ) from None
        finally:
            if self.metrics is not None:
                self.metrics.close()
        return Ending(step=self.step, steps=self.steps)

    def _epoch(self, stop: StopRequest) -> bool:
        """From where the run stands to the end of the epoch; whether someone asked to stop."""
        epoch, run = self.step // self.epoch_steps, self.config.run
        self.task.begin_epoch()
        for images, labels in self._batches(epoch, stop):
            set_learning_rate(self.optimizer, self._lr(self.step))
            self.optimizer.zero_grad(set_to_none=False)
            self.losses.add(self.step + 1, self.task.step(images, labels, self.step))
            self.ranks.reduce_gradients(self.parameters)
            if self.config.optim.clip:
                nn.utils.clip_grad_norm_(self.parameters, self.config.optim.clip)
            self.optimizer.step()
            self.task.update()
            self.step += 1
            self._since_look += 1
            self.watch.stepped(self.step, epoch, self.config.optim.batch)
            if self.step % run.log_every == 0:
                self._look()
            if self.step % self.epoch_steps == 0:
                break
            if self._save_is_due():
                self.save()
            if self._asked_to_stop(stop):
                return True
        if self.step % self.epoch_steps:
            return True
        self.task.model.eval()
        self._look()
        if (epoch + 1) % run.validate_every == 0 or self.step == self.steps:
            self._validate(epoch)
        if self._save_is_due():
            self.save()
        return self.step < self.steps and self.ranks.any(bool(stop))

    def _batches(self, epoch: int, stop: StopRequest) -> Iterator[tuple[Tensor, Tensor]]:
        crops = self.crops(epoch, self.task.views_in_a_step)
        try:
            yield from self.train.batches(self._order(epoch), crops=crops)
        except DsnetError:
            if not stop:  # a signal to all processes ends those that decode as well
                raise

    def _order(self, epoch: int) -> list[Tensor]:
        """This rank's share of every batch of the epoch that is still to come."""
        order = torch.randperm(len(self.train), generator=seeded(self.config.run.seed, "order", epoch))
        whole, rank = self.config.optim.batch, self.ranks.rank
        starts = range(self.step % self.epoch_steps * whole, self.epoch_steps * whole, whole)
        return [order[s + rank * self.batch : s + (rank + 1) * self.batch] for s in starts]

    def crops(self, epoch: int, views: int) -> Crops | None:
        """Crops are made where files are decoded, for sources that decode while training."""
        area = self.config.augment.crop
        if not self.train.crops_in_workers or area is None:
            return None
        seed = seeded(self.config.run.seed, "crops", epoch).initial_seed()
        return Crops(views=views, area=area, seed=seed)

    def _lr(self, step: int) -> float:
        return learning_rate(self.config.optim, step, steps=self.steps, epoch_steps=self.epoch_steps)

    def _save_is_due(self) -> bool:
        """By the number of steps, or by the clock of the first rank."""
        run = self.config.run
        if run.save_steps and self.step % run.save_steps == 0:
            return True
        due = time.monotonic() - self._last_save >= 60 * run.save_minutes
        if self.ranks.world > 1:
            due = self.step % run.log_every == 0 and self.ranks.any(due and self.ranks.first)
        if due:
            self._last_save = time.monotonic()
        return due

    def _asked_to_stop(self, stop: StopRequest) -> bool:
        if self.ranks.world == 1:
            return bool(stop)
        return self.step % self.config.run.log_every == 0 and self.ranks.any(bool(stop))

    def _look(self) -> None:
        """Reads the losses since the last look from the device: checks, writes and shows them."""
        means = self.losses.means()
        if not means:
            return
        now = time.monotonic()
        rate = self._since_look * self.config.optim.batch / max(now - self._clock, 1e-9)
        self._clock, self._since_look = now, 0
        values = {**means, "lr": self._lr(self.step - 1), "images_per_s": rate}
        if self.metrics is not None:
            self.metrics.write("train", self.step, {"epoch": (self.step - 1) // self.epoch_steps, **values})
        self.watch.logged(self.step, values)

    # --- validation ------------------------------------------------------------------------------------
    def _validate(self, epoch: int) -> None:
        if self.held_out is None:
            return
        routes = self.task.validation_routes()
        if not routes:
            return
        results = self.results(self.held_out, routes)
        score = sum(r.accuracy for r in results) / len(results)
        if self.metrics is not None:
            accuracies = {f"route_{r.route}": r.accuracy for r in results}
            self.metrics.write("validate", self.step, {"epoch": epoch, "score": score, **accuracies})
        self.watch.validated(self.step, epoch, results)
        if self.best is None or score > self.best.score:
            tensors = {name: value.clone() for name, value in self.task.model.state_dict().items()}
            self.best = _Best(score=score, step=self.step, tensors=tensors)
        self._warn_if_lost(epoch, results)
        self._clock = time.monotonic()  # validating is no training time

    def _warn_if_lost(self, epoch: int, results: list[RouteResult]) -> None:
        """Says so where a network does no better than guessing although the warm-up is over."""
        chance = 1 / max(len(self.train.classes), 1)
        lost = [r for r in results if r.accuracy < chance + 0.05 * (1 - chance)]
        if lost and chance < 1 and epoch + 1 > self.config.optim.warmup:
            worst = min(lost, key=lambda r: r.accuracy)
            self.watch.told(
                f"not converging: after epoch {epoch + 1} route {worst.route} reaches {worst.accuracy:.1%} "
                f"of the held-out images, guessing reaches {chance:.1%} (scheme {self.config.scheme.name})"
            )

    def results(
        self, source: Source, routes: list[Route], what: str = "validating", *, seen: Seen | None = None
    ) -> list[RouteResult]:
        """Accuracy of routes on all images of a source, each rank taking (and seeing) its share of them."""
        ranks, size = self.ranks, 2 * self.batch
        mine = torch.arange(len(source))[ranks.rank :: ranks.world]
        order = list(torch.split(mine, size))
        batches = ((normalise(x[0], *self.channels), y) for x, y in source.batches(order, full=False))
        model = self.task.model
        own = evaluate(model, self.watch.progress(what, batches, len(order)), routes, seen=seen)
        device = model.head.classifier.weight.device
        counts = torch.tensor([[r.correct, r.images] for r in own], device=device)
        total = ranks.sum(counts).tolist()
        return [replace(r, correct=c, images=n) for r, (c, n) in zip(own, total, strict=True)]
