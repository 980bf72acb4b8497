"""``dsnet recalibrate``: exact batch-norm statistics for every route of a checkpoint."""

from __future__ import annotations

import argparse
import math

import torch

from dsnet.cli.options import add_run_arguments, open_run, positive
from dsnet.cli.progress import progress
from dsnet.data.augment import normalise
from dsnet.slicing import KeyState
from dsnet.training import recalibrate, save_checkpoint
from dsnet.training.checkpoint import default_name

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "recalibrate",
        help="make the batch-norm statistics of every route of a checkpoint",
        description="Batch norms keep statistics of their own for every route. This makes all of them,\n"
        "exactly, from one pass over training images, and saves them in the checkpoint.",
        epilog="Example:\n  dsnet recalibrate runs/mine --name best --data cifar10 --images 10000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_arguments(parser, "train")
    parser.add_argument("--images", type=positive, default=10_000, help="at most so many (default: 10000)")
    parser.add_argument("--seed", type=positive, default=1, help="which images and histories (default: 1)")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Re-calibrates and saves."""
    saved, model, images, data_name = open_run(args, "train")
    known = saved.data.get("input")
    mean, std = (tuple(known["mean"]), tuple(known["std"])) if known else images.statistics()
    generator = torch.Generator().manual_seed(args.seed)
    if len(images) > args.images:
        images = images.take(torch.randperm(len(images), generator=generator)[: args.images])
    batches = (normalise(x, mean, std) for x, _ in images.epoch(args.batch))
    total = math.ceil(len(images) / args.batch)
    seen = recalibrate(model, progress(batches, total, "batch"), generator=generator)
    assert model.key_states(0) <= {KeyState.CALIBRATED}
    others = {group: values for group, values in saved.tensors.items() if group != "model"}
    kept = {
        key: value for key, value in saved.data.items() if key not in ("format", "step", "groups", "network")
    }
    data = {**kept, "input": {"mean": list(mean), "std": list(std)}}
    where = save_checkpoint(
        args.run,
        args.name or default_name(args.run),
        model,
        step=saved.data["step"],
        tensors=others,
        data=data,
    )
    print(f"{len(model.space)} routes re-calibrated on {seen} images of {data_name}; saved in {where}")
    return 0
