"""A whole run of Stage I, from its configuration to a network with exact statistics and known accuracy."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.device import pick_device
from dsnet.core.distributed.ranks import Ranks, joined
from dsnet.core.files import write_text
from dsnet.core.interrupt import stop_on_signals
from dsnet.core.seeding import seeded
from dsnet.core.settings import to_plain
from dsnet.data import LazyDataset, load_dataset
from dsnet.data.class_mapping import map_classes
from dsnet.data.dataset import ImageDataset
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.models.loading import save_checkpoint
from dsnet.routes import Route, evenly_spaced
from dsnet.slicing import KeyState
from dsnet.training.agreement import settings_facts, state_facts, weights_digest
from dsnet.training.bn_calibration import recalibrate
from dsnet.training.callbacks import Callback
from dsnet.training.classifier_task import ClassifierTask, Objective
from dsnet.training.config import TrainConfig
from dsnet.training.evaluation import Confusion, RouteResult, evaluate_gated
from dsnet.training.loop import RunStatus, TrainingLoop
from dsnet.training.results import Images, Outcome, results_of
from dsnet.training.run_dir import begin, going_on, locked, read_config, write_config
from dsnet.training.stage1.joint import JointObjective
from dsnet.training.stage1.task import Stage1Objective, initialise_alone
from dsnet.training.stage1.teacher import Teacher, load_teacher
from dsnet.training.stage1.views import Views
from dsnet.training.transfer import channels_of, start_from

__all__ = [
    "Images",
    "Outcome",
    "build_model",
    "load_data",
    "make_objective",
    "read_config",
    "split_data",
    "train",
]

SHOWN = 32  # routes at most that a finished run is judged by
MOST_CLASSES = 2000  # up to here it is told which ones are taken for which


def train(
    config: TrainConfig, folder: str | Path, *, resume: bool = False, callback: Callback | None = None
) -> Outcome:
    """Trains into ``folder``; with ``resume`` goes on from its last checkpoint."""
    folder, callback = Path(folder), callback or Callback()
    device = pick_device(config.run.device)
    with (
        joined(device, timeout=60 * config.run.timeout_minutes, kept=lambda: going_on(folder)) as ranks,
        locked(folder) if ranks.first else nullcontext(),
    ):
        callback = callback if ranks.first else Callback()
        saved = begin(folder, config, resume=resume, told=callback.on_message)
        ranks.agree(lambda: settings_facts(config, config.model, device, resume=resume), "settings")
        loop, task, test = _prepare(config, folder, device, ranks, callback, saved)
        if saved is not None:
            loop.restore(saved)
        ranks.agree(lambda: state_facts(task.model, task.train, loop.step), "images or weights")
        if saved is None and ranks.first:
            write_config(folder, config)
        with stop_on_signals(callback.on_message) as stop:
            status = loop.run(stop)
        if not status.finished:
            images = _images(task, test)
            return Outcome(folder=folder, status=status, first=ranks.first, images=images)
        return _finish(loop, task, test, status)


def _prepare(
    config: TrainConfig,
    folder: Path,
    device: torch.device,
    ranks: Ranks,
    callback: Callback,
    saved: Checkpoint | None,
) -> tuple[TrainingLoop, ClassifierTask, ImageDataset]:
    meta: Supernet = create_model(config.model, device="meta", **config.options)
    everything, test = load_data(config, meta)
    train, held_out = split_data(config, everything, callback)
    model = build_model(config, len(everything.classes))
    if config.start is None:
        channels = train.statistics()
    else:  # what has begun already is in its own checkpoint
        channels = channels_of(saved or start_from(model, config.start), config.start, test.size)
    model = model.to(device)
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    augment = config.augment
    if train.crops_in_workers and augment.size is not None:
        raise DsnetError("augment.size is for sets in memory; data.size says how large files are decoded")
    if train.crops_in_workers:  # crops are made where files are decoded
        augment = replace(augment, crop=None, size=None)
    views = Views(
        augment,
        config.mix,
        channels,
        seed=config.run.seed,
        rank=ranks.rank,
        device=device,
        channels_last=config.run.channels_last,
    )
    teacher = None
    if config.scheme.teacher is not None:
        classes = len(everything.classes)
        teacher = load_teacher(config.scheme.teacher, classes=classes, seen=channels, device=device)
        ranks.agree(functools.partial(_teacher_facts, teacher), "weights of the teacher")
    steps = len(train) // config.optim.batch * config.optim.epochs
    objective = make_objective(
        config, model, views, steps=steps, size=test.size, ranks=ranks, teacher=teacher
    )
    data = {
        "recipe": to_plain(config),
        "input": {
            "mean": list(channels[0]),
            "std": list(channels[1]),
            "size": test.size,
            "crop_ratio": test.ratio,
        },
        "classes": list(everything.classes),
        "route": config.scheme.route,
    }
    placed = train.to(device), None if held_out is None else held_out.to(device)
    task = ClassifierTask(
        config, objective, *placed, channels=channels, ranks=ranks, callback=callback, data=data
    )
    return task.loop(folder), task, test


def _teacher_facts(teacher: Teacher) -> dict[str, str]:
    return {"their digest": weights_digest(teacher.network)}


def make_objective(
    config: TrainConfig,
    model: Supernet,
    views: Views,
    *,
    steps: int,
    size: int,
    ranks: Ranks,
    teacher: Teacher | None = None,
) -> Objective:
    """Create the objective of a run on images of ``size`` pixels a side."""
    if config.scheme.joint is not None:
        return JointObjective(config, model, views, ranks=ranks, image_size=size)
    return Stage1Objective(config, model, views, steps=steps, ranks=ranks, teacher=teacher)


def build_model(config: TrainConfig, classes: int) -> Supernet:
    """The network as training begins with it."""
    options = {**config.options}
    if options.setdefault("num_classes", classes) != classes:
        raise DsnetError(
            f"options.num_classes={options['num_classes']}, but {config.data.name} has {classes} classes"
        )
    model: Supernet = create_model(config.model, generator=seeded(config.run.seed, "weights"), **options)
    if config.scheme.route is not None:
        initialise_alone(model, model.space.resolve(config.scheme.route))
    return model


def split_data(
    config: TrainConfig, everything: ImageDataset, callback: Callback
) -> tuple[ImageDataset, ImageDataset | None]:
    """What is trained on, and what is held out for validation."""
    share = config.data.hold_out
    if share == 0:
        return everything, None
    train, held_out = everything.hold_out(share, seed=config.run.seed)
    if len(train) == 0:
        raise DsnetError(f"data.hold_out={share} leaves none of the {len(everything)} images to train on")
    if len(held_out) == 0:
        callback.on_message(f"too few images to hold out {share:.0%} of every class: nothing is validated")
        return everything, None
    return train, held_out


def load_data(config: TrainConfig, model: Supernet) -> tuple[ImageDataset, ImageDataset]:
    """The training and the test split."""
    data, usual = config.data, model.input_spec.image_size
    if os.path.isfile(data.name):
        raise DsnetError(
            f"{data.name} is one file for both splits; name a folder with train*.parquet and test*.parquet"
        )
    train, test = (
        load_dataset(
            data.name,
            split,
            root=data.root,
            size=data.size,
            default_size=usual,
            ratio=data.crop_ratio,
            lazy=data.lazy,
        )
        for split in ("train", "test")
    )
    test = map_classes(test, train.classes, "the training split")
    if data.workers is not None:
        train, test = (
            replace(part, workers=data.workers) if isinstance(part, LazyDataset) else part
            for part in (train, test)
        )
    return train, test


def _finish(loop: TrainingLoop, task: ClassifierTask, test: ImageDataset, status: RunStatus) -> Outcome:
    """Exact statistics, accuracies before and after, the final checkpoint."""
    config, model, ranks, space = task.config, task.model, task.ranks, task.objective.space
    routes = [space[i] for i in evenly_spaced(len(space), SHOWN)]
    if config.run.keep == "average":
        assert isinstance(task.objective, Stage1Objective)
        assert task.objective.average is not None
        with torch.no_grad():
            for ours, theirs in zip(
                model.parameters(), task.objective.average.model.parameters(), strict=True
            ):
                ours.copy_(theirs)
    before = _before(task, routes)
    _recalibrate(task)
    after = [] if task.held_out is None else task.evaluate(task.held_out, routes, "held-out images")
    test = test.to(model.head.classifier.weight.device)
    confusion = _confusion(task)
    tested = task.evaluate(test, routes, "test images", seen=None if confusion is None else confusion.add)
    classes = None if confusion is None else confusion.results(ranks.sum(confusion.counts))
    gated = None
    if config.scheme.joint is not None:
        order = list(torch.split(torch.arange(len(test)), 2 * task.rank_batch))
        gated = evaluate_gated(
            model, ((normalise(x[0], *task.channels), y) for x, y in test.batches(order, full=False))
        )
    outcome = Outcome(
        folder=loop.folder,
        status=status,
        first=ranks.first,
        held_out=tuple(zip(before, after, strict=True)) if after else (),
        test=tuple(tested),
        gated=gated,
        classes=classes,
        images=_images(task, test),
    )
    if ranks.first:
        results = results_of(outcome)
        data = {**task.data, **loop.data, "results": results}
        save_checkpoint(loop.folder, "final", model, step=status.step, data=data)
        write_text(loop.folder / "results.json", json.dumps(results, indent=2) + "\n")
    ranks.wait()
    return outcome


def _confusion(task: ClassifierTask) -> Confusion | None:
    classes = len(task.train.classes)
    if classes > MOST_CLASSES:
        return None
    return Confusion(task.objective.space.largest, classes, task.device)


def _images(task: ClassifierTask, test: ImageDataset) -> Images:
    """What the run had, held-out images among the training images again."""
    train, held = task.train, task.held_out
    labels = train.labels if held is None else torch.cat([train.labels, held.labels])
    return Images(
        classes=train.classes,
        counts=tuple(labels.bincount(minlength=len(train.classes)).tolist()),
        held_out=0 if held is None else len(held),
        test=len(test),
        size=test.size,
        damaged=sum(part.num_decode_errors for part in (train, test)),
    )


def _before(task: ClassifierTask, routes: list[Route]) -> list[RouteResult | None]:
    """Held-out accuracy with the statistics that training left; none where a route never got any."""
    if task.held_out is None:
        return [None] * len(routes)
    usable = [r for r in routes if KeyState.FRESH not in task.model.key_states(r)]
    found = {r.route: r for r in task.evaluate(task.held_out, usable, "held-out images")} if usable else {}
    return [found.get(route.number) for route in routes]


def _recalibrate(task: ClassifierTask) -> None:
    config, ranks, train = task.config, task.ranks, task.train
    count = min(config.data.calibration, len(train))
    generator = seeded(config.run.seed, "calibration")
    chosen = torch.randperm(len(train), generator=generator)[:count]
    mine = chosen[ranks.rank :: ranks.world]
    order = list(mine.chunk(max(1, len(mine) // 256)))  # of nearly equal size: none too small to be exact
    batches = task.callback.progress(_calibration(task, order), len(order), "re-calibrating")
    wanted = None if config.scheme.route is None else list(task.objective.space)
    recalibrate(task.model, batches, wanted, generator=generator, add=ranks.sum)


def _calibration(task: ClassifierTask, order: list[Tensor]) -> Iterator[Tensor]:
    """Training images as the weights know them: their norms saw augmented batches."""
    if task.config.data.calibrate_on == "plain":
        yield from (normalise(x[0], *task.channels) for x, _ in task.train.batches(order))
        return
    crops = task.crops(task.config.optim.epochs, 1)
    for number, (images, labels) in enumerate(task.train.batches(order, crops=crops)):
        (seen,), _ = task.objective.views(
            images, labels, count=1, step=task.steps + number, classes=len(task.train.classes)
        )
        yield seen
