"""The training loop: optimizer steps, logging, validation, checkpoints, stopping and resuming.

A `TrainingTask` provides the batches, the losses, the learning rate and the contents of checkpoints; a
`Callback` observes. Random draws are functions of the seed and the step, so a resumed run makes the same
steps as one that never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.distributed.ranks import ALONE, Ranks
from dsnet.core.interrupt import StopRequest
from dsnet.core.metrics_log import DivergedError, LossBuffer, MetricsFile
from dsnet.errors import DsnetError
from dsnet.training.callbacks import Callback
from dsnet.training.evaluation import RouteResult
from dsnet.training.optim import set_learning_rate

__all__ = [
    "LoopConfig",
    "RunStatus",
    "TrainingLoop",
    "TrainingTask",
]


Batch = TypeVar("Batch")


class TrainingTask(Generic[Batch]):
    """What a `TrainingLoop` trains: data, losses, learning rate, validation and checkpoint contents.

    Subclasses implement `learning_rate`, `batches` and `step`; those whose runs are saved also `save` and
    `restore`. Steps count from 0 here: ``step`` is the number of optimizer steps made before.
    """

    optimizer: Optimizer
    epoch_steps: int  # optimizer steps per epoch
    batch_size: int  # images per step, over all ranks

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        raise NotImplementedError

    def batches(self, epoch: int, first_step: int) -> Iterable[Batch]:
        """Return this rank's batches of an epoch, from its step ``first_step`` (0: the first) to its last."""
        raise NotImplementedError

    def step(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Run forward and backward on a batch; return detached losses by name, ``loss`` the minimised one.

        Gradients are zero, or None for parameters that never got one, and accumulate.
        """
        raise NotImplementedError

    def begin_epoch(self) -> None:
        """Put the network into the mode in which it is trained."""

    def end_step(self) -> None:
        """Run after the optimizer, for example to update a moving average."""

    def validate(self, epoch: int) -> Sequence[RouteResult]:
        """Evaluate routes on held-out images, if there are any."""
        return ()

    def save(self, folder: Path, name: str, *, step: int, data: Mapping[str, Any]) -> None:
        """Write a checkpoint.

        Args:
            folder: Folder of the run.
            name: ``last``, with all that is needed to resume, or ``best``, with the weights alone.
            step: Number of optimizer steps made.
            data: Plain data of the loop, to be stored beside the task's own.
        """
        raise NotImplementedError

    def restore(self, saved: Checkpoint) -> None:
        """Load network, optimizer and further state from a checkpoint that `save` wrote.

        Raises:
            DsnetError: If the checkpoint does not fit.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How often a `TrainingLoop` logs, validates and saves."""

    epochs: int
    clip: float = 0.0  # largest norm of all gradients together; 0: no limit
    log_every: int = 10  # steps
    validate_every: int = 1  # epochs
    save_minutes: float | None = 5.0  # between checkpoints; None: no checkpoints at all
    save_steps: int = 0  # save also after this many steps; 0: by the clock alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How far a training run has come."""

    step: int
    steps: int
    signal: int | None = None  # the signal that stopped it

    @property
    def finished(self) -> bool:
        """Whether all steps were made."""
        return self.step == self.steps


class TrainingLoop:
    """Trains a `TrainingTask` and writes its metrics and checkpoints into a run's folder."""

    def __init__(
        self,
        task: TrainingTask[Any],
        config: LoopConfig,
        folder: Path,
        *,
        ranks: Ranks = ALONE,
        callback: Callback | None = None,
    ) -> None:
        self.task, self.config, self.folder, self.ranks = task, config, folder, ranks
        self.callback = callback or Callback()
        self.steps = task.epoch_steps * config.epochs
        self.parameters = [p for group in task.optimizer.param_groups for p in group["params"]]
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters)
        # Sums depend on the number of threads, so checkpoints record it.
        self.data = {"threads": torch.get_num_threads()} if on_cpu else {}
        self.best: dict[str, Any] | None = None  # score and step of the best validation
        self.step, self.saved = 0, -1
        self.losses = LossBuffer()

    # --- checkpoints -----------------------------------------------------------------------------------
    def restore(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint."""
        step = int(saved.data["step"])
        if step > self.steps:
            raise DsnetError(
                f"{self.folder} cannot be resumed: its checkpoint is of step {step}, but its settings and "
                f"these images give {self.steps} steps"
            )
        try:
            self.task.restore(saved)
        except DsnetError as error:
            raise DsnetError(f"{self.folder} cannot be resumed: {error}") from error
        before, now = saved.data.get("threads"), self.data.get("threads")
        if isinstance(before, int) and now is not None and before != now:
            self.callback.on_message(
                f"resuming with {now} thread{'s' * (now != 1)} after {before}: results are no longer "
                f"bit-identical to an uninterrupted run; --threads {before} (torch.set_num_threads) keeps "
                "them so"
            )
        self.step = self.saved = step
        self.best = saved.data.get("best")

    def save(self) -> None:
        """Write ``last``; check first that all losses are finite."""
        self._log()
        if self.config.save_minutes is None:
            return
        if self.step != self.saved:
            self._write_checkpoint("last")
        self.saved = self.step
        self.ranks.wait()

    def _write_checkpoint(self, name: str) -> None:
        if self.ranks.first and self.config.save_minutes is not None:
            data = self.data if self.best is None else {**self.data, "best": self.best}
            self.task.save(self.folder, name, step=self.step, data=data)

    # --- training --------------------------------------------------------------------------------------
    def run(self, stop: StopRequest | None = None) -> RunStatus:
        """Make the remaining steps, or those until ``stop`` is set; save at the end."""
        stop = StopRequest() if stop is None else stop
        self.metrics = MetricsFile(self.folder, after=self.step) if self.ranks.first else None
        self.callback.on_train_begin(self.step, self.steps)
        self._clock = self._last_save = time.monotonic()
        self._steps_since_log = 0
        try:
            stopped = self.ranks.any(bool(stop))
            while self.step < self.steps and not stopped:
                stopped = self._epoch(stop)
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
        return RunStatus(step=self.step, steps=self.steps, signal=stop.signal if stopped else None)

    def _epoch(self, stop: StopRequest) -> bool:
        """Train from the current step to the end of its epoch; return whether a stop was requested."""
        epoch, first_step = divmod(self.step, self.task.epoch_steps)
        self.task.begin_epoch()
        for batch in self._batches(epoch, first_step, stop):
            self._optimizer_step(batch)
            ends_epoch = self.step % self.task.epoch_steps == 0
            if ends_epoch or self.step % self.config.log_every == 0:
                self._log()
            self.callback.on_step_end(self.step, epoch, self.task.batch_size)
            if ends_epoch:
                break
            if self._save_is_due():
                self.save()
            if self._stop_requested(stop):
                return True
        if self.step % self.task.epoch_steps:
            return True
        if (epoch + 1) % self.config.validate_every == 0 or self.step == self.steps:
            self._validate(epoch)
        if self._save_is_due():
            self.save()
        return self.step < self.steps and self.ranks.any(bool(stop))

    def _batches(self, epoch: int, first_step: int, stop: StopRequest) -> Iterator[Any]:
        try:
            yield from self.task.batches(epoch, first_step)
        except DsnetError:
            if not stop:  # a signal to the process group also ends the decoding workers
                raise

    def _optimizer_step(self, batch: object) -> None:
        optimizer = self.task.optimizer
        set_learning_rate(optimizer, self.task.learning_rate(self.step))
        optimizer.zero_grad(set_to_none=False)
        self.losses.add(self.step + 1, self.task.step(batch, self.step))
        self.ranks.reduce_gradients(self.parameters)
        if self.config.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        optimizer.step()
        self.task.end_step()
        self.step += 1
        self._steps_since_log += 1

    def _save_is_due(self) -> bool:
        """Decide by the number of steps, or by the clock of the first rank."""
        config = self.config
        if config.save_minutes is None:
            return False
        if config.save_steps and self.step % config.save_steps == 0:
            return True
        due = time.monotonic() - self._last_save >= 60 * config.save_minutes
        if self.ranks.world > 1:
            due = self.step % config.log_every == 0 and self.ranks.any(due and self.ranks.first)
        if due:
            self._last_save = time.monotonic()
        return due

    def _stop_requested(self, stop: StopRequest) -> bool:
        if self.ranks.world == 1:
            return bool(stop)
        return self.step % self.config.log_every == 0 and self.ranks.any(bool(stop))

    def _log(self) -> None:
        """Read the losses since the last call from the device; check, write and report their means."""
        means = self.losses.means()
        if not means:
            return
        now = time.monotonic()
        rate = self._steps_since_log * self.task.batch_size / max(now - self._clock, 1e-9)
        self._clock, self._steps_since_log = now, 0
        values = {**means, "lr": self.task.learning_rate(self.step - 1), "images_per_s": rate}
        self._write("train", (self.step - 1) // self.task.epoch_steps, values)
        self.callback.on_log(self.step, values)

    def _validate(self, epoch: int) -> None:
        results = self.task.validate(epoch)
        if not results:
            return
        score = sum(result.accuracy for result in results) / len(results)
        accuracies = {f"route_{result.route}": result.accuracy for result in results}
        self._write("validate", epoch, {"score": score, **accuracies})
        self.callback.on_validation_end(self.step, epoch, results)
        if self.best is None or score > self.best["score"]:
            self.best = {"score": score, "step": self.step}
            if self.saved < 0:  # a run that has a checkpoint can be resumed
                self.save()
            self._write_checkpoint("best")
        self._clock = time.monotonic()  # images_per_s counts training alone

    def _write(self, kind: str, epoch: int, values: Mapping[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.step, {"epoch": epoch, **values})
