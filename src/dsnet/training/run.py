"""A whole run of Stage I, from its configuration to a network with exact statistics and known accuracy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet.data import LazySet, load
from dsnet.data.augment import normalise
from dsnet.data.source import Source
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.routes import Route, RouteSpace
from dsnet.slicing import KeyState
from dsnet.training.checkpoint import load_checkpoint, save_checkpoint
from dsnet.training.config import TrainConfig
from dsnet.training.evaluate import RouteResult
from dsnet.training.interrupt import stop_on_signals
from dsnet.training.joint import JointTask
from dsnet.training.loop import Ending, Loop, Watch
from dsnet.training.ranks import Ranks, joined
from dsnet.training.recalibrate import recalibrate
from dsnet.training.seeds import seeded
from dsnet.training.settings import from_plain, to_plain
from dsnet.training.stage1 import Stage1Task, initialise_alone
from dsnet.training.teacher import load_teacher
from dsnet.training.views import Views

__all__ = ["Outcome", "build_model", "pick_device", "read_config", "train"]

# What may differ when a run goes on: where and how often, not what is learnt.
FREE = ("device", "log_every", "validate_every", "save_minutes", "save_steps", "graphs", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    folder: Path
    ending: Ending
    first: bool = True  # whether this is the process that reports
    held_out: tuple[tuple[RouteResult | None, RouteResult], ...] = ()  # before and after re-calibration
    test: tuple[RouteResult, ...] = ()


def train(config: TrainConfig, folder: Path, *, resume: bool = False, watch: Watch | None = None) -> Outcome:
    """Trains into ``folder``; with ``resume`` goes on from its last checkpoint."""
    watch = watch or Watch()
    device = pick_device(config.run.device)
    with joined(device) as ranks:
        watch = watch if ranks.first else Watch()
        saved = load_checkpoint(folder, "last") if _begun(folder, config, resume=resume) else None
        ranks.wait()
        loop, test = _prepare(config, folder, device, ranks, watch)
        if saved is not None:
            loop.restore(saved)
        elif ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "recipe.json").write_text(
                json.dumps(to_plain(config), indent=2) + "\n", encoding="utf-8"
            )
        with stop_on_signals() as stop:
            ending = loop.run(stop)
        if not ending.done:
            return Outcome(folder=folder, ending=ending, first=ranks.first)
        return _finish(loop, test, ending)


def read_config(folder: Path) -> TrainConfig:
    """The configuration that a run in ``folder`` was started with."""
    path = folder / "recipe.json"
    try:
        return from_plain(TrainConfig, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DsnetError(f"{folder} holds no run: it has no recipe.json") from None
    except json.JSONDecodeError as error:
        raise DsnetError(f"{path} is no JSON: {error}") from error


def _begun(folder: Path, config: TrainConfig, *, resume: bool) -> bool:
    """Whether there is a checkpoint to go on from; raises where that is not what was asked for."""
    there = (folder / "last").is_file()
    if there and not resume:
        raise DsnetError(f"{folder} holds a run already: go on with it (--resume) or choose another folder")
    if not resume or not (folder / "recipe.json").exists():
        return False
    before, now = to_plain(read_config(folder)), to_plain(config)
    for key in FREE:
        before["run"].pop(key)
        now["run"].pop(key)
    changed = [key for key in before if before[key] != now[key]]
    if changed:
        told = "; ".join(_difference(key, before[key], now[key]) for key in changed)
        raise DsnetError(f"{folder} was started with other settings, so it cannot go on with these: {told}")
    return there


def _difference(group: str, before: Any, now: Any) -> str:  # noqa: ANN401  (plain data)
    if isinstance(before, dict):
        keys = [key for key in before | now if before.get(key) != now.get(key)]
        return ", ".join(f"{group}.{key} was {before.get(key)!r}, not {now.get(key)!r}" for key in keys)
    return f"{group} was {before!r}, not {now!r}"


def pick_device(name: str) -> torch.device:
    """A device by name; ``auto`` is a GPU where there is one, each process of torchrun its own."""
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError:
            raise DsnetError(
                f"device={name!r} is none that torch knows; possible: auto, cpu, cuda, cuda:N"
            ) from None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")


def _prepare(
    config: TrainConfig, folder: Path, device: torch.device, ranks: Ranks, watch: Watch
) -> tuple[Loop, Source]:
    meta: Supernet = create_model(config.model, device="meta", **config.options)
    everything, test = _load(config, meta)
    train, held_out = (everything, None)
    if config.data.hold_out:
        train, held_out = everything.hold_out(config.data.hold_out, seed=config.run.seed)
    channels = train.statistics()
    model = build_model(config, len(everything.classes)).to(device)
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    augment = config.augment
    if train.crops_in_workers:  # they are made where files are decoded
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
    task: Stage1Task | JointTask
    if config.scheme.joint is not None:
        task = JointTask(config, model, views, ranks=ranks, image_size=_size(config, meta))
    else:
        steps = len(train) // config.optim.batch * config.optim.epochs
        task = Stage1Task(config, model, views, steps=steps, ranks=ranks, teacher=teacher)
    data = {
        "recipe": to_plain(config),
        "input": {"mean": list(channels[0]), "std": list(channels[1])},
        "classes": list(everything.classes),
        "route": config.scheme.route,
    }
    placed = train.to(device), None if held_out is None else held_out.to(device)
    loop = Loop(config, task, *placed, channels=channels, folder=folder, ranks=ranks, watch=watch, data=data)
    return loop, test


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


def _load(config: TrainConfig, model: Supernet) -> tuple[Source, Source]:
    """The training and the test split."""
    data, size = config.data, _size(config, model)
    train, test = (
        load(data.name, split, root=data.root, size=size, lazy=data.lazy) for split in ("train", "test")
    )
    if train.classes[: len(test.classes)] != test.classes:  # else the same number means another class
        named = ", ".join(sorted(set(train.classes) ^ set(test.classes))) or "in another order"
        raise DsnetError(f"the test split of {data.name} has other classes than the training split: {named}")
    if data.workers is not None:
        train, test = (
            replace(part, workers=data.workers) if isinstance(part, LazySet) else part
            for part in (train, test)
        )
    return train, test


def _size(config: TrainConfig, model: Supernet) -> int:
    return config.data.size or model.geometry.image_size


def _finish(loop: Loop, test: Source, ending: Ending) -> Outcome:
    """Exact statistics, accuracies before and after, the final checkpoint."""
    config, task, model = loop.config, loop.task, loop.task.model
    routes = _shown(task.space)
    before = _before(loop, routes)
    if config.run.keep == "average":
        assert isinstance(task, Stage1Task)
        assert task.average is not None
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), task.average.model.parameters(), strict=True):
                ours.copy_(theirs)
    _recalibrate(loop)
    after = [] if loop.held_out is None else loop.results(loop.held_out, routes, "held-out images")
    tested = loop.results(test.to(model.head.classifier.weight.device), routes, "test images")
    outcome = Outcome(
        folder=loop.folder,
        ending=ending,
        first=loop.ranks.first,
        held_out=tuple(zip(before, after, strict=True)) if after else (),
        test=tuple(tested),
    )
    if loop.ranks.first:
        results = {
            "held_out": [[None if b is None else asdict(b), asdict(a)] for b, a in outcome.held_out],
            "test": [{**asdict(r), "accuracy": r.accuracy} for r in tested],
        }
        data = {**loop.data, "results": results}
        save_checkpoint(loop.folder, "final", model, step=ending.step, data=data)
        (loop.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    loop.ranks.wait()
    return outcome


def _shown(space: RouteSpace, most: int = 32) -> list[Route]:
    """All routes that were trained, or evenly spaced ones."""
    if len(space) <= most:
        return list(space)
    return [space[round(i * (len(space) - 1) / (most - 1))] for i in range(most)]


def _before(loop: Loop, routes: list[Route]) -> list[RouteResult | None]:
    """Held-out accuracy with the statistics that training left; none where a route never got any."""
    if loop.held_out is None:
        return [None] * len(routes)
    usable = [r for r in routes if KeyState.FRESH not in loop.task.model.key_states(r)]
    found = {r.route: r for r in loop.results(loop.held_out, usable, "held-out images")} if usable else {}
    return [found.get(route.number) for route in routes]


def _recalibrate(loop: Loop) -> None:
    config, ranks, train = loop.config, loop.ranks, loop.train
    count = min(config.data.calibration, len(train))
    generator = seeded(config.run.seed, "calibration")
    chosen = torch.randperm(len(train), generator=generator)[:count]
    mine = chosen[ranks.rank :: ranks.world]
    order = list(mine.chunk(max(1, len(mine) // 256)))  # of nearly equal size: none too small to be exact
    watched = loop.watch.progress("re-calibrating", _calibration(loop, order), len(order))
    wanted = None if config.scheme.route is None else list(loop.task.space)
    recalibrate(loop.task.model, watched, wanted, generator=generator, add=ranks.sum)


def _calibration(loop: Loop, order: list[Tensor]) -> Iterator[Tensor]:
    """Training images as the weights know them: their norms saw augmented batches."""
    if loop.config.data.calibrate_on == "plain":
        yield from (normalise(x[0], *loop.channels) for x, _ in loop.train.batches(order))
        return
    crops = loop.crops(loop.config.optim.epochs, 1)
    for number, (images, labels) in enumerate(loop.train.batches(order, **crops)):
        (seen,), _ = loop.task.views(
            images, labels, count=1, step=loop.steps + number, classes=len(loop.train.classes)
        )
        yield seen
