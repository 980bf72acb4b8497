"""What a run will cost, before it starts: steps, multiply-adds, and how long that takes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dsnet.core.cpus import available_cpus
from dsnet.core.device import pick_device
from dsnet.core.distributed.launch import launched
from dsnet.core.distributed.ranks import ALONE
from dsnet.cost import madds
from dsnet.data.decode import THREADS
from dsnet.data.inspect import DatasetSummary
from dsnet.data.labeled_images import MAX_IN_MEMORY_BYTES
from dsnet.data.lazy import default_workers
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routes import evenly_spaced
from dsnet.training.api import SHOWN, build_model, make_objective
from dsnet.training.config import TrainConfig
from dsnet.training.optim import make_optimizer
from dsnet.training.stage1.scheme import sandwich
from dsnet.training.stage1.views import Views

__all__ = ["Estimate", "StepCost", "estimate", "image_size", "step_cost", "timed_step"]

PATIENCE = 0.5  # seconds: where a part of the batch takes longer, the whole of it is not timed
PART = 8  # images that timing begins with, on a CPU
BACKWARD = 2  # a backward pass counts as so many forward ones


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step runs, in words, and what that costs for an image."""

    networks: str
    forward: int  # multiply-adds of its networks, forward
    teacher: int = 0  # and of their teacher

    @property
    def madds(self) -> int:
        """Forward and backward, the teacher's forward included."""
        return (1 + BACKWARD) * self.forward + self.teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run has before it and what that costs."""

    trained: int  # images
    held_out: int
    size: int  # of the images, in pixels a side
    steps: int
    madds: int  # of training, of looking on meanwhile, and of what comes at the end
    seconds: float | None  # none: it could not be timed


def step_cost(config: TrainConfig, model: Supernet, size: int) -> StepCost:
    """What a step of training costs on images of this size."""
    costs = {route.number: madds(model, route, size) for route in model.space}
    mean = round(sum(costs.values()) / len(costs))
    scheme = config.scheme.parse()
    if config.scheme.route is not None:
        route = model.space.resolve(config.scheme.route)
        return StepCost(networks=f"route {route.number} alone", forward=costs[route.number])
    if config.scheme.joint is not None:
        words = "every image at the route that its gate draws (evenly, at first)"
        return StepCost(networks=words, forward=mean)
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


def image_size(config: TrainConfig, model: Supernet, found: DatasetSummary) -> int:
    """Pixels a side that the images will have."""
    return config.data.size or (model.input_spec.image_size if found.files else found.side)


def estimate(config: TrainConfig, model: Supernet, found: DatasetSummary) -> Estimate:
    """What a run with these settings on this data has before it; a few seconds go into timing steps."""
    size = image_size(config, model, found)
    share = config.data.hold_out
    held_out = sum(round(share * count) for count in found.counts)
    trained = found.images - held_out
    optim = config.optim
    if trained < optim.batch:
        raise DsnetError(f"optim.batch={optim.batch} is more than the {trained} training images")
    steps = trained // optim.batch * optim.epochs
    cost = step_cost(config, model, size)
    training = steps * optim.batch * cost.madds
    total = training + _judging(config, model, found, size, held_out)
    seconds = None
    if config.scheme.teacher is None:
        computing = _seconds(config, len(found.classes), size) * steps * total / training
        seconds = _with_decoding(config, found, size, computing)
    return Estimate(trained=trained, held_out=held_out, size=size, steps=steps, madds=total, seconds=seconds)


def _judging(config: TrainConfig, model: Supernet, found: DatasetSummary, size: int, held_out: int) -> int:
    """Multiply-adds of validation, of the statistics of all routes at the end, and of their accuracies."""
    space = model.space if config.scheme.route is None else model.space.narrow([config.scheme.route])
    ends = sum(madds(model, route, size) for route in dict.fromkeys((space.smallest, space.largest)))
    times = -(-config.optim.epochs // config.run.validate_every)
    shown = sum(madds(model, space[i], size) for i in evenly_spaced(len(space), SHOWN))
    every = sum(madds(model, route, size) for route in space)
    calibration = min(config.data.calibration, found.images - held_out)
    return times * held_out * ends + (2 * held_out + found.test) * shown + calibration * every


def _with_decoding(config: TrainConfig, found: DatasetSummary, size: int, computing: float) -> float:
    """Sets in memory are decoded once, others in every epoch, while the network runs."""
    lazy = config.data.lazy
    if lazy is None:
        lazy = found.images * 3 * size * size > MAX_IN_MEMORY_BYTES
    if not lazy:
        return computing + (found.images + found.test) * found.decoding / min(THREADS, available_cpus())
    workers = default_workers() if config.data.workers is None else config.data.workers
    decoding = config.optim.epochs * found.images * found.decoding / max(1, workers)
    return computing + decoding if workers == 0 else max(computing, decoding)


def _seconds(config: TrainConfig, classes: int, size: int) -> float:
    """How long a step takes on the device of the run."""
    step, device = timed_step(config, classes, size), pick_device(config.run.device)
    batch = max(1, config.optim.batch // launched().world)
    count = batch if device.type == "cuda" else min(PART, batch)
    step(count)  # the first one warms up
    while (taken := min(step(count), step(count))) < PATIENCE and count < batch:
        count = min(2 * count, batch)
    return taken * batch / count


def timed_step(config: TrainConfig, classes: int, size: int) -> Callable[[int], float]:
    """A step on so many images, which takes so many seconds: both passes, the optimiser, the average."""
    device = pick_device(config.run.device)
    config = replace(config, run=replace(config.run, compile=False))
    model = build_model(config, classes).to(device)
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    views = Views(
        config.augment,
        config.mix,
        ((0.5,) * 3, (0.25,) * 3),
        seed=config.run.seed,
        rank=0,
        device=device,
        channels_last=config.run.channels_last,
    )
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
        _wait(device)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        objective.step(images, labels, 1)  # the same routes every time, soft targets among their losses
        optimizer.step()
        objective.end_step()
        _wait(device)
        return time.perf_counter() - start

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
