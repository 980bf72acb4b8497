"""``dsnet recalibrate``: compute the batch-norm statistics of every route of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from dsnet.cli.options import OpenedRun, open_run
from dsnet.cli.progress import progress
from dsnet.cli.threads import set_threads_for
from dsnet.core.checkpoint import Checkpoint, default_name
from dsnet.data.transforms.augment import Augment
from dsnet.errors import DsnetError, printable
from dsnet.training import TrainConfig, recalibrate, save_checkpoint
from dsnet.training.config import MixConfig
from dsnet.training.run_dir import locked, settings_of
from dsnet.training.stage1.views import Views

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Recalibrate and save."""
    if (args.run / "checkpoint.json").exists():
        name = args.run.name.partition("-")[0]
        raise DsnetError(f"{args.run} is a checkpoint; name its run: {args.run.parent} --name {name}")
    with locked(args.run) if args.run.is_dir() else nullcontext():  # from reading to writing
        return _recalibrate(args)


def _recalibrate(args: argparse.Namespace) -> int:
    opened = open_run(args, "train")
    saved, model, images = opened.saved, opened.model, opened.images
    if not model.key_states(model.space.largest):
        print(f"{model.spec.name} has no batch norms: there is nothing to compute")
        return 0
    set_threads_for(args, model, images.size, batch=args.batch)
    old = saved.data.get("input")
    channels = (tuple(old["mean"]), tuple(old["std"])) if old else images.statistics()
    generator = torch.Generator().manual_seed(args.seed)
    chosen = torch.randperm(len(images), generator=generator)[: args.images]
    order = list(chosen.chunk(max(1, len(chosen) // args.batch)))  # of nearly equal size
    augment, mix = _augmentation(saved, plain=args.plain)
    device = model.head.classifier.weight.device
    views = Views(augment, mix, channels, seed=args.seed, rank=0, device=device)
    trained_route = saved.data.get("route")
    routes = None if trained_route is None else [trained_route]
    batches = progress(_augmented(opened, order, views), len(order), "batch")
    count = recalibrate(model, batches, routes, generator=generator)
    mean, std = channels
    data = {
        **saved.own_data,
        "input": {"mean": list(mean), "std": list(std), "size": images.size, "crop_ratio": images.ratio},
    }
    data.pop("routing", None)  # routers were calibrated with other statistics
    tensors = {group: values for group, values in saved.tensors.items() if group != "model"}
    name = args.name or default_name(args.run)
    path = save_checkpoint(args.run, name, model, step=saved.data["step"], tensors=tensors, data=data)
    print(
        f"{len(model.space) if routes is None else 1} routes re-calibrated on {count} images of "
        f"{printable(opened.data)}; saved in {printable(str(path))}"
    )
    if count < 128:
        print(f"{count} images are few: statistics of at least 128 can be relied on")
    return 0


def _augmentation(saved: Checkpoint, *, plain: bool) -> tuple[Augment, MixConfig]:
    """Return the augmentation of the run's training, if it is known and wanted."""
    recipe = saved.data.get("recipe")
    if plain or not isinstance(recipe, dict):
        return Augment(), MixConfig()
    config = settings_of(TrainConfig, recipe, "recipe of the checkpoint")
    return config.augment, config.mix


def _augmented(opened: OpenedRun, order: list[Tensor], views: Views) -> Iterator[Tensor]:
    classes = opened.model.head.classifier.out_features
    for step, (images, labels) in enumerate(opened.images.batches(order)):
        (view,), _ = views(images, labels, count=1, step=step, classes=classes)
        yield view
