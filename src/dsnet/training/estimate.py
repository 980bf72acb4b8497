"""The cost of a run before it starts: steps, multiply-adds, and the time that it takes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dsnet.core.cpus import available_cpus
from dsnet.core.device import pick_device
from dsnet.core.distributed.launch import launched
from dsnet.core.distributed.ranks import ALONE
from dsnet.core.timer import timed
from dsnet.cost import madds
from dsnet.data.decode import THREADS
from dsnet.data.inspect import DatasetSummary
from dsnet.data.lazy import default_workers
from dsnet.data.registry import MAX_IN_MEMORY_BYTES
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routes import evenly_spaced
from dsnet.routing.cost_table import CostTable
from dsnet.training.api import MAX_EVALUATED, build_model, make_objective
from dsnet.training.config import TrainConfig
from dsnet.training.optim import make_optimizer
from dsnet.training.stage1.scheme import sandwich
from dsnet.training.stage1.views import Views

__all__ = ["Estimate", "StepCost", "estimate", "image_size", "step_cost", "timed_step"]

MAX_SECONDS = 0.5  # of a timed part of a batch; a whole batch that takes longer is not timed
FIRST_PART = 8  # images that timing starts with, on a CPU
BACKWARD = 2  # forward passes that a backward pass costs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The networks of a step in words, and their cost for one image."""

    networks: str
    forward: int  # multiply-adds of a forward pass of all networks
    teacher: int = 0  # and of the teacher's

    @property
    def madds(self) -> int:
        """Multiply-adds forward and backward, the teacher's forward pass included."""
        return (1 + BACKWARD) * self.forward + self.teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The size and the cost of a run that has not started."""

    held_out: int  # images
    size: int  # of the images, in pixels a side
    steps: int
    madds: int  # of training, validation, calibration and evaluation
    seconds: float | None  # None: it could not be timed


def step_cost(config: TrainConfig, model: Supernet, size: int) -> StepCost:
    """Compute the cost of a training step on images of ``size`` pixels a side."""
    scheme = config.scheme.parse()
    if config.scheme.joint is not None:
        table = CostTable.of_model(model, size)
        mean = round(sum(table.gated(route.choices) for route in model.space) / len(model.space))
        words = "every image at the route that its gate draws (evenly, at first)"
        return StepCost(networks=words, forward=mean)
    costs = {route.number: madds(model, route, size) for route in model.space}
    mean = round(sum(costs.values()) / len(costs))
    if config.scheme.route is not None:
        route = model.space.resolve(config.scheme.route)
        return StepCost(networks=f"route {route.number} alone", forward=costs[route.number])
    count = scheme.networks(model.space, config.scheme.random)
    if scheme.draw is not sandwich:
        words = "one random network" if count == 1 else f"{count} drawn networks"
        return StepCost(networks=words, forward=count * mean)
    smallest, largest = costs[model.space.smallest.number], costs[model.space.largest.number]
    return StepCost(
        networks=f"largest, {count - 2} random, smallest",
        forward=smallest + largest + (count - 2) * mean,
        teacher=largest if scheme.uses_average else 0,
    )


def image_size(config: TrainConfig, model: Supernet, dataset: DatasetSummary) -> int:
    """Return the side that the images will have, in pixels."""
    spec = model.input_spec
    return config.data.size or (spec.image_size if dataset.files or spec.fixed else dataset.side)


def estimate(config: TrainConfig, model: Supernet, dataset: DatasetSummary) -> Estimate:
    """Estimate the cost of a run; this times a few training steps.

    Args:
        config: Settings of the run.
        model: Its network, which may be on the meta device.
        dataset: Summary of its data.

    Raises:
        DsnetError: A batch has more images than there are.
    """
    size, optim = image_size(config, model, dataset), config.optim
    held_out = sum(round(config.data.hold_out * count) for count in dataset.counts)
    images = dataset.images - held_out
    if images < optim.batch:
        raise DsnetError(f"optim.batch={optim.batch} is more than the {images} training images")
    steps = images // optim.batch * optim.epochs
    training = steps * optim.batch * step_cost(config, model, size).madds
    space = model.space if config.scheme.route is None else model.space.narrow([config.scheme.route])
    costs = [madds(model, route, size) for route in space]
    validations = -(-optim.epochs // config.run.validate_every)
    validation = validations * held_out * sum(costs[i] for i in {0, len(space) - 1})
    evaluated = sum(costs[i] for i in evenly_spaced(len(space), MAX_EVALUATED))
    calibration = min(config.data.calibration, images) * sum(costs)
    total = training + validation + (2 * held_out + dataset.test) * evaluated + calibration
    seconds = None
    if config.scheme.teacher is None:
        computing = _step_seconds(config, len(dataset.classes), size) * steps * total / training
        seconds = _with_decoding(config, dataset, size, computing)
    return Estimate(held_out=held_out, size=size, steps=steps, madds=total, seconds=seconds)


def _with_decoding(config: TrainConfig, dataset: DatasetSummary, size: int, computing: float) -> float:
    """Add the time to decode: once for sets in memory, else in each epoch while the network runs."""
    lazy = config.data.lazy
    if lazy is None:
        lazy = dataset.images * 3 * size * size > MAX_IN_MEMORY_BYTES
    if not lazy:
        images = dataset.images + dataset.test
        return computing + images * dataset.decoding / min(THREADS, available_cpus())
    workers = default_workers() if config.data.workers is None else config.data.workers
    decoding = config.optim.epochs * dataset.images * dataset.decoding / max(1, workers)
    return computing + decoding if workers == 0 else max(computing, decoding)


def _step_seconds(config: TrainConfig, classes: int, size: int) -> float:
    """Time a step on the device of the run."""
    step, device = timed_step(config, classes, size), pick_device(config.run.device)
    batch = max(1, config.optim.batch // launched().world)
    count = batch if device.type == "cuda" else min(FIRST_PART, batch)
    step(count)  # the first one warms up
    while (seconds := min(step(count), step(count))) < MAX_SECONDS and count < batch:
        count = min(2 * count, batch)
    return seconds * batch / count


def timed_step(config: TrainConfig, classes: int, size: int) -> Callable[[int], float]:
    """Return a function that trains on a number of random images and returns the seconds of the step."""
    device = pick_device(config.run.device)
    config = replace(config, run=replace(config.run, compile=False))
    model = build_model(config, classes, device, resumed=True)  # the weights make no difference
    views = Views.of(config, ((0.5,) * 3, (0.25,) * 3), device)
    objective = make_objective(config, model, views, steps=1, size=size, ranks=ALONE)
    groups = objective.groups(config.optim.weight_decay)
    optimizer = make_optimizer(config.optim.kind, groups, lr=1e-9, momentum=config.optim.momentum)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    objective.begin_epoch()
    generator = torch.Generator().manual_seed(0)

    def step(count: int) -> float:
        shape = (1, count, 3, size, size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device)
        labels = torch.randint(classes, (count,), generator=generator).to(device)

        def train() -> None:
            optimizer.zero_grad(set_to_none=False)
            objective.step(images, labels, 1)  # the same routes every time, soft targets among their losses
            optimizer.step()
            objective.end_step()

        return timed(train, device) / 1000

    return step
