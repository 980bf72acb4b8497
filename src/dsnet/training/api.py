"""A training run of Stage I, from its configuration to a network with exact statistics and known accuracy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
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
from dsnet.data.dataset import ImageDataset, chunks
from dsnet.data.loading import map_classes
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.models.composite import CompositeNetwork
from dsnet.models.convert import ConvertedNetwork
from dsnet.models.convert.sources import load_pretrained, pretrained_channels
from dsnet.models.loading import save_checkpoint
from dsnet.routes import Route, evenly_spaced
from dsnet.slicing import KeyState
from dsnet.training._linear_probe import fit_classifier
from dsnet.training.agreement import settings_facts, state_facts, weights_digest
from dsnet.training.bn_calibration import recalibrate
from dsnet.training.callbacks import Callback
from dsnet.training.classifier_task import ClassifierTask, Objective
from dsnet.training.config import TrainConfig
from dsnet.training.evaluation import Confusion, RouteResult, evaluate_gated
from dsnet.training.loop import TrainingLoop
from dsnet.training.results import Images, Outcome, results_of
from dsnet.training.run_dir import begin, going_on, locked, read_config, write_config
from dsnet.training.stage1.joint import JointObjective
from dsnet.training.stage1.task import Stage1Objective, initialise_alone
from dsnet.training.stage1.teacher import Channels, Teacher, load_teacher
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

SORTING_IMAGES, SORTING_BATCH = 512, 64  # that sort the channels of a pretrained network
FITTED_IMAGES = 20_000  # that the classifier of a pretrained network is fitted to
MAX_EVALUATED = 32  # routes that a finished run is evaluated at
MAX_CONFUSION = 2000  # classes up to which confusions are counted


def train(
    config: TrainConfig, folder: str | Path, *, resume: bool = False, callback: Callback | None = None
) -> Outcome:
    """Train a network into a folder.

    Args:
        config: Settings of the run.
        folder: Folder of the run, for checkpoints and results.
        resume: Continue from the last checkpoint in the folder.
        callback: Observes training.

    Returns:
        The results; of a run that was stopped, its status and its images.

    Raises:
        DsnetError: The settings do not fit the data or the folder.

    Examples:
        ``train(get_recipe("digits_mbnet").config, "runs/digits")``
    """
    folder, callback = Path(folder), callback or Callback()
    device = pick_device(config.run.device)
    with (
        joined(device, timeout=60 * config.run.timeout_minutes, kept=lambda: going_on(folder)) as ranks,
        locked(folder) if ranks.first else nullcontext(),
    ):
        callback = callback if ranks.first else Callback()
        saved = begin(folder, config, resume=resume, warn=callback.on_message)
        ranks.agree(lambda: settings_facts(config, config.model, device, resume=resume), "settings")
        task, test = _prepare(config, device, ranks, callback, saved)
        loop = task.loop(folder)
        if saved is not None:
            loop.restore(saved)
        ranks.agree(lambda: state_facts(task.model, task.train, loop.step), "images or weights")
        if saved is None and ranks.first:
            write_config(folder, config)
        with stop_on_signals(callback.on_message) as stop:
            status = loop.run(stop)
        outcome = Outcome(folder=folder, status=status, first=ranks.first, images=_images(task, test))
        return _finish(outcome, loop, task, test) if status.finished else outcome


def _prepare(
    config: TrainConfig, device: torch.device, ranks: Ranks, callback: Callback, saved: Checkpoint | None
) -> tuple[ClassifierTask, ImageDataset]:
    """Load the data and build the network; return the task and the test images."""
    meta: Supernet = create_model(config.model, device="meta", **config.options)
    everything, test = load_data(config, meta)
    train, held_out = split_data(config, everything, callback)
    classes = everything.classes
    batches = None if config.weights is None or saved is not None else _sorting_images(config, train)
    model = build_model(config, len(classes), device, resumed=saved is not None, batches=batches)
    if config.start is None:
        channels = _normalisation(config, train)
    else:  # a run that is resumed has its weights in its own checkpoint
        channels = channels_of(saved or start_from(model, config.start), config.start, test.size)
    if config.fit_classifier and saved is None:
        _fit_classifier(config, model, train, channels, callback)
    views = Views.of(config, channels, device, rank=ranks.rank, crops_in_workers=train.crops_in_workers)
    teacher = None
    if config.scheme.teacher is not None:
        teacher = load_teacher(config.scheme.teacher, classes=len(classes), seen=channels, device=device)
        network = teacher.network
        ranks.agree(lambda: {"their digest": weights_digest(network)}, "weights of the teacher")
    steps = len(train) // config.optim.batch * config.optim.epochs
    objective = make_objective(
        config, model, views, steps=steps, size=test.size, ranks=ranks, teacher=teacher
    )
    mean, std = map(list, channels)
    data = {
        "recipe": to_plain(config),
        "input": {"mean": mean, "std": std, "size": test.size, "crop_ratio": test.ratio},
        "classes": list(classes),
        "route": config.scheme.route,
    }
    train, held_out = train.to(device), None if held_out is None else held_out.to(device)
    task = ClassifierTask(config, objective, train, held_out, ranks=ranks, callback=callback, data=data)
    return task, test.to(device)


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
    """Create the objective of a run of ``steps`` steps, on images of ``size`` pixels a side."""
    if config.scheme.joint is not None:
        return JointObjective(config, model, views, ranks=ranks, image_size=size)
    return Stage1Objective(config, model, views, steps=steps, ranks=ranks, teacher=teacher)


def _normalisation(config: TrainConfig, images: ImageDataset) -> Channels:
    """Return the mean and deviation of each channel: given, those of pretrained weights, or the images'."""
    if config.data.mean is not None and config.data.std is not None:
        return config.data.mean, config.data.std
    return (pretrained_channels(config.model) if config.weights is not None else None) or images.statistics()


def _sorting_images(config: TrainConfig, train: ImageDataset) -> Iterator[Tensor]:
    """Yield a sample of the training images, by which the channels of a pretrained network are sorted."""
    channels = _normalisation(config, train)
    generator = seeded(config.run.seed, "sorting")
    order = torch.randperm(len(train), generator=generator)[:SORTING_IMAGES]
    for images, _ in train.batches(chunks(order, SORTING_BATCH), full=False):
        yield normalise(images[0], *channels)


def _fit_classifier(
    config: TrainConfig, model: Supernet, train: ImageDataset, channels: Channels, callback: Callback
) -> None:
    """Fit the classifier of a pretrained network, if it is new, to a sample of the training images."""
    network = model.networks[0] if isinstance(model, CompositeNetwork) else model
    if isinstance(network, ConvertedNetwork) and config.weights is not None and not network.new_classifier:
        return
    device = model.head.classifier.weight.device
    order = torch.randperm(len(train), generator=seeded(config.run.seed, "classifier"))[:FITTED_IMAGES]
    parts = list(order.chunk(max(1, len(order) // 128)))  # of nearly equal size, for batch statistics
    batches = train.to(device).batches(parts, full=False)
    progress = callback.progress(batches, len(parts), "fitting the classifier")
    normalised = ((normalise(images[0], *channels), labels) for images, labels in progress)
    scheme = config.scheme
    keep = scheme.keep_statistics
    fit_classifier(model, normalised, scheme.route, keep_calibrated=keep, smoothing=scheme.smoothing)


def build_model(
    config: TrainConfig,
    classes: int,
    device: torch.device,
    *,
    resumed: bool = False,
    batches: Iterable[Tensor] | None = None,
) -> Supernet:
    """Build the network of a run with its initial weights.

    Args:
        config: Settings of the run.
        classes: Number of classes.
        device: Device of the network.
        resumed: Whether a checkpoint replaces the weights, so that none are read.
        batches: Normalised images to sort the channels of a pretrained network by, see `dsnet.convert`.

    Raises:
        DsnetError: ``options.num_classes`` differs from the number of classes.
    """
    options = {**config.options, "num_classes": config.options.get("num_classes", classes)}
    if options["num_classes"] != classes:
        raise DsnetError(
            f"options.num_classes={options['num_classes']}, but {config.data.name} has {classes} classes"
        )
    model: Supernet
    if config.weights is None or resumed:
        model = create_model(config.model, generator=seeded(config.run.seed, "weights"), **options)
    else:
        model = load_pretrained(
            config.model,
            config.weights,
            by_order=config.weights_by_order,
            seed=seeded(config.run.seed, "weights").initial_seed(),
            batches=batches,
            **options,
        )
    if config.scheme.route is not None:
        initialise_alone(model, model.space.resolve(config.scheme.route))
    model = model.to(device)
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def split_data(
    config: TrainConfig, everything: ImageDataset, callback: Callback
) -> tuple[ImageDataset, ImageDataset | None]:
    """Split images into those to train on and those to validate on, if any."""
    share = config.data.hold_out
    if share == 0:
        return everything, None
    train, held_out = everything.hold_out(share, seed=config.run.seed)
    if len(train) == 0:
        raise DsnetError(f"data.hold_out={share} leaves none of {len(everything)} images to train on")
    if len(held_out) == 0:
        callback.on_message(f"too few images to hold out {share:.0%} of each class: there is no validation")
        return everything, None
    return train, held_out


def load_data(config: TrainConfig, model: Supernet) -> tuple[ImageDataset, ImageDataset]:
    """Load the training and the test split; by default files get the size of the model's images.

    Images of a fixed size get it where the model takes no other.
    """
    data, spec = config.data, model.input_spec
    if os.path.isfile(data.name):
        raise DsnetError(
            f"{data.name} is one file for both splits; name a folder with train*.parquet and test*.parquet"
        )
    train, test = (
        load_dataset(
            data.name,
            split,
            root=data.root,
            size=data.size or (spec.image_size if spec.fixed else None),
            default_size=spec.image_size,
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


def _finish(outcome: Outcome, loop: TrainingLoop, task: ClassifierTask, test: ImageDataset) -> Outcome:
    """Compute exact statistics, evaluate routes before and after, and write the checkpoint ``final``."""
    config, model, ranks, space = task.config, task.model, task.ranks, task.objective.space
    routes = [space[i] for i in evenly_spaced(len(space), MAX_EVALUATED)]
    task.objective.finish()
    before = _evaluate_before(task, routes)
    _recalibrate(task)
    after = [] if task.held_out is None else task.evaluate(task.held_out, routes, "held-out images")
    classes = len(task.train.classes)
    confusion = Confusion(space.largest, classes, task.device) if classes <= MAX_CONFUSION else None
    add = None if confusion is None else confusion.add
    outcome = replace(
        outcome,
        held_out=tuple(zip(before, after, strict=True)) if after else (),
        test=tuple(task.evaluate(test, routes, "test images", on_predictions=add)),
        classes=None if confusion is None else confusion.results(ranks.sum(confusion.counts)),
        gated=None if config.scheme.joint is None else evaluate_gated(model, task.batches_in_order(test)),
        images=_images(task, test),  # the number of damaged ones is known now
    )
    if ranks.first:
        results = results_of(outcome)
        data = {**task.data, **loop.data, "results": results}
        save_checkpoint(loop.folder, "final", model, step=outcome.status.step, data=data)
        write_text(loop.folder / "results.json", json.dumps(results, indent=2) + "\n")
    ranks.wait()
    return outcome


def _images(task: ClassifierTask, test: ImageDataset) -> Images:
    """Describe the images of a run; training images include those held out."""
    train, held_out = task.train, task.held_out
    labels = train.labels if held_out is None else torch.cat([train.labels, held_out.labels])
    return Images(
        classes=train.classes,
        counts=tuple(labels.bincount(minlength=len(train.classes)).tolist()),
        held_out=0 if held_out is None else len(held_out),
        test=len(test),
        size=test.size,
        damaged=sum(part.num_decode_errors for part in (train, test)),
    )


def _evaluate_before(task: ClassifierTask, routes: list[Route]) -> list[RouteResult | None]:
    """Evaluate held-out images with the statistics of training; None for routes that have none."""
    usable = [route for route in routes if KeyState.FRESH not in task.model.key_states(route)]
    if task.held_out is None or not usable:
        return [None] * len(routes)
    results = {result.route: result for result in task.evaluate(task.held_out, usable, "held-out images")}
    return [results.get(route.number) for route in routes]


def _recalibrate(task: ClassifierTask) -> None:
    config, ranks, train = task.config, task.ranks, task.train
    count = min(config.data.calibration, len(train))
    generator = seeded(config.run.seed, "calibration")
    mine = torch.randperm(len(train), generator=generator)[:count][ranks.rank :: ranks.world]
    order = list(mine.chunk(max(1, len(mine) // 256)))  # of nearly equal size: none too small to be exact
    batches = task.callback.progress(_calibration_batches(task, order), len(order), "re-calibrating")
    routes = None if config.scheme.route is None else list(task.objective.space)
    keep = config.scheme.keep_statistics
    recalibrate(task.model, batches, routes, keep_calibrated=keep, generator=generator, add=ranks.sum)


def _calibration_batches(task: ClassifierTask, order: list[Tensor]) -> Iterator[Tensor]:
    """Yield training images as training saw them, or as they are."""
    if task.config.data.calibrate_on == "plain":
        yield from (normalise(x[0], *task.channels) for x, _ in task.train.batches(order))
        return
    crops, classes = task.crops(task.config.optim.epochs, 1), len(task.train.classes)
    for number, (images, labels) in enumerate(task.train.batches(order, crops=crops)):
        (view,), _ = task.objective.views(images, labels, count=1, step=task.steps + number, classes=classes)
        yield view
