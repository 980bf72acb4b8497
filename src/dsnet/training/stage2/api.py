"""A whole run of Stage II: from a trained supernet to gates that decide, and what they decide."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet.calibration.calibration import Calibration, calibrate, has_trained_gates
from dsnet.calibration.compare import compare
from dsnet.calibration.difficulty import GateReport, gate_reports
from dsnet.core.checkpoint import Checkpoint, default_name, has_last, load_checkpoint
from dsnet.core.device import pick_device
from dsnet.core.distributed.ranks import ALONE, Ranks, joined
from dsnet.core.interrupt import stop_on_signals
from dsnet.core.seeding import seeded
from dsnet.core.settings import to_plain
from dsnet.data.dataset import ImageDataset
from dsnet.data.transforms.augment import Augment, normalise
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.models.loading import build_network, load_classifier, save_checkpoint
from dsnet.routes import evenly_spaced
from dsnet.routing.cost_table import CostTable
from dsnet.routing.latency import LatencyTable
from dsnet.routing.route_outputs import RouteOutputs, collect
from dsnet.routing.router import parse_budget
from dsnet.training.agreement import settings_facts, state_facts
from dsnet.training.api import load_data, split_data
from dsnet.training.callbacks import Callback
from dsnet.training.classifier_task import ClassifierTask
from dsnet.training.config import MixConfig, OptimConfig, TrainConfig
from dsnet.training.loop import RunStatus
from dsnet.training.run_dir import going_on, locked, settings_of
from dsnet.training.stage1.teacher import Channels
from dsnet.training.stage1.views import Views
from dsnet.training.stage2.cache import SignalStore, memory_of, train_from_signals
from dsnet.training.stage2.config import GateConfig
from dsnet.training.stage2.task import GateObjective
from dsnet.training.transfer import routing_from

__all__ = [
    "CalibratedRun",
    "GateOutcome",
    "TrainedRun",
    "calibrate_run",
    "calibration_images",
    "open_trained",
    "train_gate",
]

FITS = 2 * 2**30  # bytes of signals that are kept without asking
PASSES = 3  # over the images, where they fit
MOST = 32  # routes that cascades and comparisons are made of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedRun:
    """A run of Stage I, ready for routers: its network, and the images as it divided them."""

    folder: Path
    saved: Checkpoint
    config: TrainConfig
    model: Supernet
    channels: Channels
    train: ImageDataset
    held_out: ImageDataset
    test: ImageDataset

    def seen(self, images: ImageDataset, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (normalised images, labels), all in order, without augmentation."""
        order = list(torch.split(torch.arange(len(images)), batch))
        for x, labels in images.batches(order, full=False):
            yield normalise(x[0], *self.channels), labels


def open_trained(
    folder: str | Path, name: str | None = None, *, device: str = "auto", callback: Callback | None = None
) -> TrainedRun:
    """Opens a run's checkpoint (``final`` by default) with the data that it was trained on."""
    folder, callback = Path(folder), callback or Callback()
    if (folder / "checkpoint.json").exists():
        raise DsnetError(f"{folder} is a checkpoint; name its run: {folder.parent}")
    saved = load_classifier(folder, name)
    recipe, known = saved.data.get("recipe"), saved.data.get("input")
    if not isinstance(recipe, dict) or known is None:
        raise DsnetError(f"{folder} does not say what it was trained on: `dsnet train` did not make it")
    if saved.data.get("route") is not None:
        raise DsnetError(
            f"{folder} was trained at route {saved.data['route']} alone: there is nothing to choose"
        )
    config = settings_of(TrainConfig, recipe, f"{folder}: recipe")
    model = build_network(saved)
    everything, test = load_data(config, model)
    train, held_out = split_data(config, everything, callback)
    if held_out is None:
        raise DsnetError(
            f"{folder} held no images out (data.hold_out={config.data.hold_out}); routers need some that "
            "Stage I has not seen: train it again with data.hold_out=0.1"
        )
    place = pick_device(device)
    return TrainedRun(
        folder=folder,
        saved=saved,
        config=config,
        model=model.to(place),
        channels=(tuple(known["mean"]), tuple(known["std"])),
        train=train.to(place),
        held_out=held_out.to(place),
        test=test.to(place),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOutcome:
    """What gate training came to."""

    folder: Path
    name: str
    status: RunStatus
    goal: str = "paper"
    first: bool = True  # whether this is the process that reports
    kept: int = 0  # passes over the images that were kept in memory; 0: the network ran in every step
    reports: tuple[GateReport, ...] = ()  # the gates' own decisions on held-out images

    @property
    def done(self) -> bool:
        """Whether it got to the end."""
        return self.status.finished


def train_gate(
    folder: str | Path,
    config: GateConfig,
    *,
    name: str | None = None,
    save_as: str = "gated",
    device: str = "auto",
    resume: bool = False,
    callback: Callback | None = None,
    store: SignalStore | None = None,
    said: Callable[[str], None] = lambda message: None,
) -> GateOutcome:
    """Trains new routing heads on a run's network and saves both as a checkpoint of the run.

    A ``store`` (a dict will do) that several calls for the same run share keeps what they have in common:
    with one gate, the second takes seconds. ``said`` gets a line about the routes that gates decide between
    and the weights of their losses; the checkpoint records both.
    """
    folder, callback = Path(folder), callback or Callback()
    if save_as in ("last", "best", "final") or re.fullmatch(r"[A-Za-z][\w-]*", save_as, re.ASCII) is None:
        raise DsnetError(
            f"gates cannot be saved as {shorten(save_as)}: a name has letters, digits, _ and -, and is not "
            "last, best or final, which Stage I made"
        )
    if name is None and (folder / "final").is_file():
        name = "final"
    work, place = folder / f"{save_as}.stage2", pick_device(device)
    with (
        joined(place, timeout=60 * config.timeout_minutes, kept=lambda: going_on(work)) as ranks,
        _locked(folder, ranks),
    ):
        callback = callback if ranks.first else Callback()
        run = open_trained(folder, name, device=device, callback=callback)
        more = {"name": name, "save_as": save_as, "resume": resume}
        ranks.agree(lambda: settings_facts(config, run.config.model, place, **more), "settings")
        model, generator = run.model, seeded(config.seed, "routing heads")
        chosen, config = config.chosen(model), config.resolved(model)
        if ranks.first:
            said(f"{model.name}, {chosen}")
        model.cpu().reset_routing(config.routes(model), form=config.form, generator=generator)
        if config.start is not None:
            routing_from(model, config.start)
        model.to(place)
        source, judged = _images(run, config)
        task = _task(run, config, ranks.rank)
        ranks.agree(lambda: _state_facts(run, task), "images, weights or costs")
        passes, optim = _passes(config, task, len(source), ranks.world), _optim(config, len(source))
        if resume and passes:
            callback.on_message("signals are kept in memory, so training is quick and starts anew")
        if passes:
            status = train_from_signals(
                task, source, optim=optim, passes=passes, folder=work, callback=callback, store=store
            )
        else:
            status = _online(
                run, task, source, config, optim, work, ranks=ranks, resume=resume, callback=callback
            )
        if not status.finished:
            return GateOutcome(folder=folder, name=save_as, status=status, first=ranks.first)
        model.requires_grad_(True)
        reports = gate_reports(collect(model, run.seen(judged)), task.costs)
        if ranks.first:
            told = {"gate": to_plain(config), "gate_reports": [report.to_dict() for report in reports]}
            data = {key: value for key, value in run.saved.own_data.items() if key != "routing"}
            save_checkpoint(folder, save_as, model, step=run.saved.data["step"], data={**data, **told})
        ranks.wait()
    return GateOutcome(
        folder=folder,
        name=save_as,
        status=status,
        goal=config.goal,
        first=ranks.first,
        kept=passes,
        reports=tuple(reports),
    )


def _locked(folder: Path, ranks: Ranks = ALONE) -> AbstractContextManager[None]:
    """Keeps others from writing to the run; a folder that is not there is reported when it is opened."""
    return locked(folder) if ranks.first and folder.is_dir() else nullcontext()


class CalibratedRun(NamedTuple):
    """A run with calibrated routers, and what its network says of the calibration images."""

    run: TrainedRun
    name: str  # of the checkpoint
    outputs: RouteOutputs
    calibration: Calibration
    latency: LatencyTable | None  # whose milliseconds were counted


def calibrate_run(
    folder: str | Path,
    *,
    name: str | None = None,
    latency: str | Path | None = None,
    budget: float | str | None = None,
    router: str = "auto",
    device: str = "auto",
    progress: Callable[[Iterator[Any], int, str], Iterator[Any]] = lambda batches, total, label: batches,
) -> CalibratedRun:
    """Calibrates the routers of a run's checkpoint on held-out images and saves them with it.

    Costs are multiply-adds or, with the file of a latency table, its milliseconds. A ``budget`` that this
    router could not keep is an error, and nothing is saved.
    """
    folder = Path(folder)
    with _locked(folder):
        run = open_trained(folder, name, device=device)
        model, images = run.model, calibration_images(run)
        costs = CostTable.of_model(model, run.test.size)
        table = None if latency is None else LatencyTable.load(latency)
        if table is not None:
            table.check(model, model.head.classifier.weight.device, run.test.size)
            costs = table.costs()
        wanted = None if budget is None else parse_budget(budget, costs)
        routes = [model.space[i] for i in evenly_spaced(len(model.space), MOST)]
        batches = progress(run.seen(images), -(-len(images) // 256), "batch")
        outputs = collect(model, batches, routes)
        made = calibrate(outputs, costs, gate=has_trained_gates(run.saved))
        if wanted is not None:
            made.router(router, wanted).policy(wanted)
        name = name or default_name(folder)
        tensors = {group: values for group, values in run.saved.tensors.items() if group != "model"}
        low, high = made.budget_range()
        budgets = [low + share / 8 * (high - low) for share in range(9)]
        said = compare(outputs, made, budgets, images="held-out images").verdict
        routing = {**made.to_dict(), "verdict": None if said is None else said.to_dict()}
        data = {**run.saved.own_data, "routing": routing}
        save_checkpoint(folder, name, model, step=run.saved.data["step"], tensors=tensors, data=data)
    return CalibratedRun(run, name, outputs, made, table)


def calibration_images(run: TrainedRun) -> ImageDataset:
    """Held-out images that no part of the network has learnt from, its gates included."""
    gate = run.saved.data.get("gate")
    learnt = isinstance(gate, dict) and gate.get("images") == "held_out"
    return _halves(run, int(gate.get("seed", 0)))[1] if learnt and isinstance(gate, dict) else run.held_out


def _halves(run: TrainedRun, seed: int) -> tuple[ImageDataset, ImageDataset]:
    """The held-out images for learning and for judging, where gates learn from held-out ones."""
    learnt, judged = run.held_out.hold_out(0.5, seed=seed)
    if not len(learnt) or not len(judged):
        raise DsnetError(
            f"images=held_out needs some to learn from and some to judge by; of {len(run.held_out)} held-out "
            f"images there would be {len(learnt)} and {len(judged)}: use images=train, or hold out more"
        )
    return learnt, judged


def _images(run: TrainedRun, config: GateConfig) -> tuple[ImageDataset, ImageDataset]:
    """What the gates learn from, and what they are judged by."""
    return (run.train, run.held_out) if config.images == "train" else _halves(run, config.seed)


def _task(run: TrainedRun, config: GateConfig, rank: int) -> GateObjective:
    model = run.model
    device = model.head.classifier.weight.device
    costs = CostTable.of_model(model, run.test.size)
    if config.latency is not None:
        table = LatencyTable.load(config.latency)
        table.check(model, device, run.test.size)
        costs = table.costs()
    augment = run.config.augment if config.augment else Augment()
    crops = augment.crop
    if run.train.crops_in_workers:
        augment = replace(augment, crop=None, size=None)  # crops are made where files are decoded
    views = Views(augment, MixConfig(), run.channels, seed=config.seed, rank=rank, device=device)
    precision = torch.bfloat16 if run.config.run.precision == "bfloat16" else None
    return GateObjective(config, model, views, costs=costs, rank=rank, precision=precision, crops=crops)


def _state_facts(run: TrainedRun, task: GateObjective) -> dict[str, Any]:
    costs = hashlib.sha256(repr(task.costs).encode()).hexdigest()[:16]
    return {**state_facts(run.model, run.train, run.saved.data["step"]), "costs": costs}


def _passes(config: GateConfig, task: GateObjective, images: int, world: int) -> int:
    """How many passes over the images are kept in memory."""
    if len(task.options) > 1:
        if config.passes:
            raise DsnetError(
                f"passes={config.passes}: with several gates nothing can be kept, the network runs in every "
                "step; set passes=0"
            )
        return 0
    if config.passes is not None:
        if config.passes and world > 1:
            raise DsnetError(f"passes={config.passes}: signals are kept by one process; set passes=0")
        return min(config.passes, config.epochs)
    if world > 1:
        return 0
    return min(PASSES, config.epochs, FITS // (images * memory_of(task)))


def _optim(config: GateConfig, images: int) -> OptimConfig:
    batch = config.batch or max(1, min(512, images // 20))
    if batch > images:
        raise DsnetError(f"batch={batch} is more than the {images} images to learn from")
    return OptimConfig(
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=0.0,
        decay=config.decay,
        epochs=config.epochs,
        batch=batch,
    )


def _online(
    run: TrainedRun,
    objective: GateObjective,
    source: ImageDataset,
    config: GateConfig,
    optim: OptimConfig,
    folder: Path,
    *,
    ranks: Ranks,
    resume: bool,
    callback: Callback,
) -> RunStatus:
    """The network runs in every step; stops and goes on as Stage I does."""
    whole = replace(run.config, optim=optim, run=replace(run.config.run, seed=config.seed))
    if not config.augment:
        whole = replace(whole, augment=Augment())
    data = {**run.saved.own_data, "recipe": to_plain(whole), "gate": to_plain(config)}
    saved = load_checkpoint(folder, "last") if resume and has_last(folder) else None
    if saved is None and ranks.first and folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)  # of an earlier gate, whose later steps these would not replace
    if saved is not None and _learnt_by(saved.data.get("gate")) != _learnt_by(data["gate"]):
        raise DsnetError(f"{folder} was started with other settings; go on with those, or without --resume")
    task = ClassifierTask(
        whole,
        objective,
        source,
        None,
        channels=run.channels,
        ranks=ranks,
        callback=callback,
        data=data,
    )
    loop = task.loop(folder)
    if saved is not None:
        _same_weights(folder, saved, task.model)
        loop.restore(saved)
    with stop_on_signals(callback.on_message) as stop:
        return loop.run(stop)


def _learnt_by(gate: object) -> object:
    """The settings of a gate without that which may differ when its training goes on."""
    return {k: v for k, v in gate.items() if k != "timeout_minutes"} if isinstance(gate, dict) else gate


def _same_weights(folder: Path, saved: Checkpoint, model: Supernet) -> None:
    """Raises where training began with other weights or statistics than the network has now."""
    now = model.state_dict()
    for name, value in saved.tensors["model"].items():
        if ".routing." not in name and not torch.equal(value, now[name].cpu()):
            raise DsnetError(
                f"{folder} was started from other weights ({name} differs), so it cannot go on from these; "
                "start anew, without --resume"
            )
