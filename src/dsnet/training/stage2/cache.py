"""Gate training from kept signals: weights are frozen, so what they say of an image is made once.

A pass is kept by image. The first epochs use the passes in the order in which they were made, step for step
what training without keeping does; later epochs use them again in new orders.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from pathlib import Path

import torch
from torch import Tensor

from dsnet.core.seeding import seeded
from dsnet.data.dataset import Crops, ImageDataset
from dsnet.training.callbacks import Callback
from dsnet.training.config import OptimConfig
from dsnet.training.loop import LoopConfig, RunStatus, TrainingLoop, TrainingTask
from dsnet.training.optim import learning_rate, make_optimizer
from dsnet.training.stage2.gate_signals import Signals
from dsnet.training.stage2.task import GateObjective

__all__ = ["CachedGateTask", "SignalStore", "keep_signals", "memory_of", "train_from_signals"]

SignalStore = MutableMapping[Hashable, Signals]  # passes by what they depend on, for gates yet to come

LOG_EVERY = 20  # steps


def memory_of(objective: GateObjective) -> int:
    """Bytes that the signals of one image take."""
    gate, routes = objective.model.gate(0), len(objective.space)
    return 4 * (gate.first.in_features + gate.first.out_features + routes + routes**2) + routes


def keep_signals(
    objective: GateObjective, source: ImageDataset, *, number: int, batch: int, crops: Crops | None
) -> Signals:
    """One pass over all images: their signals by place, for views drawn as those of epoch ``number``."""
    order = torch.randperm(len(source), generator=seeded(objective.config.seed, "order", number))
    steps = len(source) // batch
    parts = []
    for i, (images, labels) in enumerate(source.batches(list(torch.split(order, batch)), crops=crops)):
        # What is left over of an epoch has no step of its own.
        step = number * steps + i if i < steps else -1 - number
        parts.append(objective.signals(images, labels, step))
    made = Signals.join(parts)
    return made.take(order.argsort().to(made.losses.device))


class CachedGateTask(TrainingTask[Signals]):
    """Trains a network's routing head on signals that are kept in memory.

    Args:
        objective: The routing head, its losses and its noise.
        passes: Signals of all images, one set per pass over them; epochs use them in turn.
        optim: Optimizer and schedule.
    """

    def __init__(self, objective: GateObjective, passes: list[Signals], optim: OptimConfig) -> None:
        self.objective, self.passes, self.optim = objective, passes, optim
        self.batch_size, self.epoch_steps = optim.batch, len(passes[0].losses) // optim.batch
        groups = objective.groups(optim.weight_decay)
        self.optimizer = make_optimizer(optim.kind, groups, lr=optim.lr, momentum=optim.momentum)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        steps = self.epoch_steps * self.optim.epochs
        return learning_rate(self.optim, step, steps=steps, epoch_steps=self.epoch_steps)

    def batches(self, epoch: int, first_step: int) -> Iterator[Signals]:
        """Yield the signals of every batch, in the order in which the images would be seen."""
        signals = self.passes[epoch % len(self.passes)]
        seed = seeded(self.objective.config.seed, "order", epoch)
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
    objective: GateObjective,
    source: ImageDataset,
    *,
    optim: OptimConfig,
    passes: int,
    folder: Path,
    callback: Callback,
    store: SignalStore | None = None,
) -> RunStatus:
    """Compute the signals of ``passes`` passes over the images, then train the head on them for all epochs.

    Passes that are in ``store`` already are taken from there; new ones are added to it.
    """
    kept = []
    store = {} if store is None else store
    for number in callback.progress(range(passes), passes, "looking at the images"):
        key = (*objective.signals_of, len(source), optim.batch, number)
        if key not in store:
            crops = None
            if source.crops_in_workers and objective.crops is not None:
                seed = seeded(objective.config.seed, "crops", number).initial_seed()
                crops = Crops(views=1, area=objective.crops, seed=seed)
            store[key] = keep_signals(objective, source, number=number, batch=optim.batch, crops=crops)
        kept.append(store[key])
    config = LoopConfig(epochs=optim.epochs, log_every=LOG_EVERY, save_minutes=None)
    return TrainingLoop(CachedGateTask(objective, kept, optim), config, folder, callback=callback).run()
