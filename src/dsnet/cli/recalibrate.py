"""``dsnet recalibrate``: exact batch-norm statistics for every route of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from dsnet.cli.options import OpenedRun, open_run
from dsnet.cli.progress import progress
from dsnet.cli.threads import set_threads_for
from dsnet.core.checkpoint import default_name
from dsnet.data.transforms.augment import Augment
from dsnet.errors import DsnetError, printable
from dsnet.training import TrainConfig, recalibrate, save_checkpoint
from dsnet.training.config import MixConfig
from dsnet.training.run_dir import locked, settings_of
from dsnet.training.stage1.views import Views

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Re-calibrates and saves."""
    if (args.run / "checkpoint.json").exists():
        name = args.run.name.partition("-")[0]
        raise DsnetError(f"{args.run} is a checkpoint; name its run: {args.run.parent} --name {name}")
    with locked(args.run) if args.run.is_dir() else nullcontext():  # from reading to writing
        return _recalibrate(args)


def _recalibrate(args: argparse.Namespace) -> int:
    opened = open_run(args, "train")
    saved, model = opened.saved, opened.model
    if not model.key_states(model.space.largest):
        print(f"{model.spec.name} has no batch norms: there is nothing to make")
        return 0
    set_threads_for(args, model, opened.images.size, batch=args.batch)
    known = saved.data.get("input")
    channels = (tuple(known["mean"]), tuple(known["std"])) if known else opened.images.statistics()
    generator = torch.Generator().manual_seed(args.seed)
    chosen = torch.randperm(len(opened.images), generator=generator)[: args.images]
    order = list(chosen.chunk(max(1, len(chosen) // args.batch)))  # of nearly equal size
    views = _views(opened, channels, plain=args.plain, seed=args.seed)
    alone = saved.data.get("route")
    routes = None if alone is None else [alone]
    batches = progress(_seen(opened, order, views), len(order), "batch")
    seen = recalibrate(model, batches, routes, generator=generator)
    others = {group: values for group, values in saved.tensors.items() if group != "model"}
    kept = {
        key: value
        for key, value in saved.own_data.items()
        if key != "routing"  # made with other statistics
    }
    images = opened.images
    made = {
        "mean": list(channels[0]),
        "std": list(channels[1]),
        "size": images.size,
        "crop_ratio": images.ratio,
    }
    data = {**kept, "input": made}
    name = args.name or default_name(args.run)
    where = save_checkpoint(args.run, name, model, step=saved.data["step"], tensors=others, data=data)
    count = len(model.space) if routes is None else len(routes)
    print(
        f"{count} routes re-calibrated on {seen} images of {printable(opened.data)}; saved in "
        f"{printable(str(where))}"
    )
    if seen < 128:
        print(f"{seen} images are few: statistics of at least 128 can be relied on")
    return 0


def _views(
    opened: OpenedRun, channels: tuple[tuple[float, ...], tuple[float, ...]], *, plain: bool, seed: int
) -> Views:
    """As in training, where the run says how that was; mixing and all."""
    augment, mix = Augment(), MixConfig()
    recipe = opened.saved.data.get("recipe")
    if isinstance(recipe, dict) and not plain:
        config = settings_of(TrainConfig, recipe, "recipe of the checkpoint")
        augment, mix = config.augment, config.mix
    device = opened.model.head.classifier.weight.device
    return Views(augment, mix, channels, seed=seed, rank=0, device=device)


def _seen(opened: OpenedRun, order: list[Tensor], views: Views) -> Iterator[Tensor]:
    classes = opened.model.head.classifier.out_features
    for number, (images, labels) in enumerate(opened.images.batches(order)):
        (seen,), _ = views(images, labels, count=1, step=number, classes=classes)
        yield seen
