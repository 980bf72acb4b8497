"""Runs that an earlier version wrote, kept as files in ``stored/``, and what it computed with them.

They were made by commit 1195050 with ``python -m tests.support.old_runs FOLDER``; run it again only to add
another version's beside them.

- ``stopped``: a network of a family of one's own, stopped after 2 of 4 steps; with optimiser and average
- ``finished``: `ds_mbnet_tiny` after 2 steps, its weights in half precision to keep the file small
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsnet import RouteSpace, Slice, Supernet
from dsnet.data import load_dataset
from dsnet.data.transforms.augment import normalise
from dsnet.models import (
    ConvNormAct,
    ConvOptions,
    Factory,
    InputSpec,
    PoolHead,
    Step,
    register_supernet,
    registry,
)
from dsnet.models.loading import build_network
from dsnet.training import Checkpoint, load_checkpoint, save_checkpoint, train
from dsnet.training.callbacks import Callback
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig

FOLDER = Path(__file__).parents[1] / "training" / "stored"
ROUTES = tuple((Slice(width=w, kernel=3, padding=1),) for w in (4, 8))


class KeptSmall(Supernet):
    """Two convolutions with a gate between them."""

    def __init__(self, options: ConvOptions, factory: Factory) -> None:
        super().__init__(
            RouteSpace.of_table("kept_small", ROUTES),
            slices=(ROUTES,),
            gate_widths=[4],
            input_spec=InputSpec(image_size=16, stride=4),
            options=options,
            factory=factory,
        )
        self.head = PoolHead(8, options.num_classes or 10, factory)
        spec = options.conv_spec(factory, channels_per_group=4)
        self.first = ConvNormAct(options.in_channels, 4, spec, kernel=3, stride=2)
        self.second = ConvNormAct(4, 8, spec, kernel=3, stride=2, keys=len(ROUTES))
        self.seal()

    def prefix_steps(self) -> list[Step]:
        return [Step(self.first, Slice(width=4, kernel=3, padding=1))]

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        (size,) = self.slices(choices)
        return [Step(self.second, size, self.key(choices))]


@contextmanager
def registered() -> Iterator[None]:
    """Meanwhile `create_model` knows ``kept_small``; other tests go through the registry."""

    def kept_small(options: ConvOptions, factory: Factory) -> Supernet:
        return KeptSmall(options, factory)

    register_supernet("of tests alone: two convolutions", ConvOptions)(kept_small)
    try:
        yield
    finally:
        del registry._REGISTRY["kept_small"]


STOPPED = TrainConfig(
    model="kept_small",
    data=DataConfig(name="digits", size=16, hold_out=0, calibration=128),
    scheme=SchemeConfig(name="ib", random=0, alpha=0.9),
    optim=OptimConfig(lr=0.2, epochs=1, batch=350),
    run=RunConfig(device="cpu"),
)
FINISHED = replace(
    STOPPED,
    model="ds_mbnet_tiny",
    scheme=SchemeConfig(name="label", random=0),
    optim=OptimConfig(lr=0.2, epochs=1, batch=700),
)


def logits_of(saved: Checkpoint, route: int) -> list[list[float]]:
    """What the network says of the first three test images, at a route."""
    model, known = build_network(saved), saved.data["input"]
    images = load_dataset("digits", "test", size=known["size"]).images[:3]
    with torch.no_grad():
        found: Tensor = model(normalise(images, tuple(known["mean"]), tuple(known["std"])), route)
    return found.tolist()


class StopAfterTwo(Callback):
    def on_step_end(self, step: int, epoch: int, images: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def make(folder: Path) -> None:
    stopped, finished, rest = folder / "stopped", folder / "finished", folder / "rest"
    train(STOPPED, stopped, callback=StopAfterTwo())
    train(FINISHED, rest)
    whole = load_checkpoint(rest, "final")
    half = {
        name: value.half() if value.is_floating_point() else value
        for name, value in whole.tensors["model"].items()
    }
    data = {key: whole.data[key] for key in ("recipe", "input", "classes", "route", "results")}
    save_checkpoint(finished, "final", build_network(whole), step=2, tensors={"model": half}, data=data)
    expected = {
        "stopped": logits_of(load_checkpoint(stopped, "last"), 1),
        "finished": logits_of(load_checkpoint(finished, "final"), 3),
    }
    train(STOPPED, stopped_copy := folder / "straight")
    expected["resumed"] = logits_of(load_checkpoint(stopped_copy, "final"), 1)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with registered():
        make(Path(sys.argv[1]))
