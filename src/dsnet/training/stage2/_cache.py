"""Gate training from cached signals: the weights are frozen, so the network need not run in every step.

A pass over the images is cached by image. The first epochs use the passes in the order in which they were
made, step for step what training without a cache does; later epochs use them again in new orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsnet.core.seeding import seeded
from dsnet.training.classifier_task import ClassifierTask
from dsnet.training.loop import LoopConfig, RunStatus, TrainingLoop, TrainingTask
from dsnet.training.stage2._gate_signals import Signals
from dsnet.training.stage2.task import GateObjective

__all__ = ["CachedGateTask", "cached_bytes", "compute_signals", "train_from_signals"]

LOG_EVERY = 20  # steps


def cached_bytes(objective: GateObjective) -> int:
    """Return the bytes that the signals of one image take."""
    gate, routes = objective.model.gate(0), len(objective.space)
    return 4 * (gate.encoding_size + routes + routes**2) + routes


def compute_signals(task: ClassifierTask, objective: GateObjective, epoch: int) -> Signals:
    """Compute the signals of all training images, for views drawn as in an epoch of the task."""
    source = task.train
    order = torch.randperm(len(source), generator=seeded(task.config.run.seed, "order", epoch))
    batches = source.batches(list(torch.split(order, task.batch_size)), crops=task.crops(epoch, 1))
    parts = []
    for index, (images, labels) in enumerate(batches):
        # The images that are left over have no step in the epoch.
        step = epoch * task.epoch_steps + index if index < task.epoch_steps else -1 - epoch
        parts.append(objective.signals(images, labels, step))
    signals = Signals.join(parts)
    return signals.take(order.argsort().to(signals.losses.device))


class CachedGateTask(TrainingTask[Signals]):
    """Trains a network's routing head on signals in memory.

    Args:
        task: The task that trains without a cache.
        objective: Its objective.
        passes: Signals of all images, one set per pass over them; epochs use them in turn.
    """

    def __init__(self, task: ClassifierTask, objective: GateObjective, passes: list[Signals]) -> None:
        self.task, self.objective, self.passes = task, objective, passes
        self.optimizer, self.batch_size, self.epoch_steps = task.optimizer, task.batch_size, task.epoch_steps

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.task.learning_rate(step)

    def batches(self, epoch: int, first_step: int) -> Iterator[Signals]:
        """Yield the signals of each batch, in the order in which the images would be used."""
        signals = self.passes[epoch % len(self.passes)]
        seed = seeded(self.task.config.run.seed, "order", epoch)
        order = torch.randperm(len(signals.losses), generator=seed).to(signals.losses.device)
        for step in range(first_step, self.epoch_steps):
            yield signals.take(order[step * self.batch_size : (step + 1) * self.batch_size])

    def begin_epoch(self) -> None:
        """Put the network into eval mode."""
        self.objective.begin_epoch()

    def step(self, batch: Signals, step: int) -> dict[str, Tensor]:
        """Run forward and backward of the routing head."""
        return self.objective.learn(batch, step)


def train_from_signals(
    task: ClassifierTask, objective: GateObjective, passes: int, folder: Path
) -> RunStatus:
    """Compute the signals of ``passes`` passes over the images, then train the head on them."""
    numbers = task.callback.progress(range(passes), passes, "looking at the images")
    cached = CachedGateTask(task, objective, [compute_signals(task, objective, n) for n in numbers])
    config = LoopConfig(epochs=task.config.optim.epochs, log_every=LOG_EVERY, save_minutes=None)
    return TrainingLoop(cached, config, folder, callback=task.callback).run()
