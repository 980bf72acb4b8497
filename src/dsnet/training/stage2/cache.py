"""Gate training from kept signals: weights are frozen, so what they say of an image is made once.

A pass is kept by image. The first epochs use the passes in the order in which they were made, step for step
what training without keeping does; later epochs use them again in new orders.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, MutableMapping
from pathlib import Path

import torch

from dsnet.core.metrics_log import LossBuffer, MetricsFile
from dsnet.core.seeding import seeded
from dsnet.data.dataset import Crops, Source
from dsnet.training.config import OptimConfig
from dsnet.training.loop import Ending, Watch
from dsnet.training.optim import learning_rate, make_optimizer, set_learning_rate
from dsnet.training.stage2.gate_signals import Signals
from dsnet.training.stage2.task import GateTask

__all__ = ["SignalStore", "keep_signals", "memory_of", "train_from_signals"]

SignalStore = MutableMapping[Hashable, Signals]  # passes by what they depend on, for gates yet to come

LOOK = 20  # steps between looks at the losses


def memory_of(task: GateTask) -> int:
    """Bytes that the signals of one image take."""
    gate, routes = task.model.gate(0), len(task.space)
    return 4 * (gate.first.in_features + gate.first.out_features + routes + routes**2) + routes


def keep_signals(task: GateTask, source: Source, *, number: int, batch: int, crops: Crops | None) -> Signals:
    """One pass over all images: their signals by place, for views drawn as those of epoch ``number``."""
    order = torch.randperm(len(source), generator=seeded(task.config.seed, "order", number))
    steps = len(source) // batch
    parts = []
    for i, (images, labels) in enumerate(source.batches(list(torch.split(order, batch)), crops=crops)):
        # What is left over of an epoch has no step of its own.
        step = number * steps + i if i < steps else -1 - number
        parts.append(task.signals(images, labels, step))
    made = Signals.join(parts)
    return made.take(order.argsort().to(made.losses.device))


def train_from_signals(
    task: GateTask,
    source: Source,
    *,
    optim: OptimConfig,
    passes: int,
    folder: Path,
    watch: Watch,
    store: SignalStore | None = None,
) -> Ending:
    """Makes the signals of so many passes, then trains the head on them for all epochs.

    Passes that are in ``store`` already are taken from there; new ones are added to it.
    """
    kept = []
    store = {} if store is None else store
    for number in watch.progress("looking at the images", iter(range(passes)), passes):
        key = (*task.signals_of, len(source), optim.batch, number)
        if key not in store:
            crops = None
            if source.crops_in_workers and task.crops is not None:
                seed = seeded(task.config.seed, "crops", number).initial_seed()
                crops = Crops(views=1, area=task.crops, seed=seed)
            store[key] = keep_signals(task, source, number=number, batch=optim.batch, crops=crops)
        kept.append(store[key])
    epoch_steps = len(source) // optim.batch
    steps = epoch_steps * optim.epochs
    optimizer = make_optimizer(optim.kind, task.groups(0.0), lr=optim.lr, momentum=optim.momentum)
    losses, metrics = LossBuffer(), MetricsFile(folder, after=0)
    watch.started(0, steps)
    task.begin_epoch()
    clock = time.monotonic()
    try:
        for step, found in enumerate(_batches(task, kept, optim, epoch_steps)):
            lr = learning_rate(optim, step, steps=steps, epoch_steps=epoch_steps)
            set_learning_rate(optimizer, lr)
            optimizer.zero_grad(set_to_none=False)
            losses.add(step + 1, task.learn(found, step))
            optimizer.step()
            watch.stepped(step + 1, step // epoch_steps, optim.batch)
            if (step + 1) % LOOK == 0 or step + 1 == steps:
                now = time.monotonic()
                values = {
                    **losses.means(),
                    "lr": lr,
                    "images_per_s": LOOK * optim.batch / max(now - clock, 1e-9),
                }
                clock = now
                metrics.write("train", step + 1, {"epoch": step // epoch_steps, **values})
                watch.logged(step + 1, values)
    finally:
        metrics.close()
    return Ending(step=steps, steps=steps)


def _batches(task: GateTask, kept: list[Signals], optim: OptimConfig, epoch_steps: int) -> Iterator[Signals]:
    for epoch in range(optim.epochs):
        found = kept[epoch % len(kept)]
        order = torch.randperm(len(found.losses), generator=seeded(task.config.seed, "order", epoch))
        order = order.to(found.losses.device)
        for i in range(epoch_steps):
            yield found.take(order[i * optim.batch : (i + 1) * optim.batch])
