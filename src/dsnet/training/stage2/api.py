"""A run of Stage II: training of the gates of a trained supernet."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsnet.calibration.difficulty import GateReport, gate_reports
from dsnet.core.checkpoint import Checkpoint, has_last, load_checkpoint
from dsnet.core.device import pick_device
from dsnet.core.distributed.ranks import Ranks, joined
from dsnet.core.interrupt import stop_on_signals
from dsnet.core.seeding import seeded
from dsnet.core.settings import to_plain
from dsnet.data.dataset import ImageDataset
from dsnet.data.transforms.augment import Augment
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.models.loading import save_checkpoint
from dsnet.routing.route_outputs import collect
from dsnet.training.agreement import settings_facts, state_facts
from dsnet.training.callbacks import Callback
from dsnet.training.classifier_task import ClassifierTask
from dsnet.training.config import MixConfig, OptimConfig
from dsnet.training.loop import RunStatus
from dsnet.training.run_dir import going_on
from dsnet.training.stage1.views import Views
from dsnet.training.stage2._cache import cached_bytes, train_from_signals
from dsnet.training.stage2.config import GateConfig
from dsnet.training.stage2.task import GateObjective
from dsnet.training.stage2.trained_run import TrainedRun, lock_run, open_trained
from dsnet.training.transfer import routing_from

__all__ = ["GateOutcome", "train_gate"]

MAX_CACHED = 2 * 2**30  # bytes of signals that are cached by default
MAX_PASSES = 3  # over the images that are cached by default


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOutcome:
    """The results of gate training."""

    folder: Path
    name: str
    status: RunStatus
    goal: str = "paper"
    first: bool = True  # whether this process reports
    cached_passes: int = 0  # over the images; 0: the network ran in every step
    reports: tuple[GateReport, ...] = ()  # the gates' own decisions on held-out images

    @property
    def done(self) -> bool:
        """Whether all steps were made."""
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
    said: Callable[[str], None] = lambda message: None,
) -> GateOutcome:
    """Train new routing heads on a run's network, and save both as a checkpoint of the run.

    Args:
        folder: Folder of the run.
        config: Settings of Stage II.
        name: Checkpoint to start from (default: ``final``, else ``last``).
        save_as: Name of the checkpoint to write.
        device: Device, or ``auto``.
        resume: Continue where a stopped run of Stage II is.
        callback: Observes training.
        said: Gets a line about the routes that the gates decide between, and the weights of their losses.

    Raises:
        DsnetError: The run held no images out, or the settings do not fit its network.

    Examples:
        ``train_gate("runs/digits", GateConfig(goal="value"))``
    """
    folder, callback = Path(folder), callback or Callback()
    if save_as in ("last", "best", "final") or re.fullmatch(r"[A-Za-z][\w-]*", save_as, re.ASCII) is None:
        raise DsnetError(
            f"gates cannot be saved as {shorten(save_as)}: a name has letters, digits, _ and -, and is not "
            "last, best or final, which Stage I made"
        )
    if name is None and (folder / "final").is_file():
        name = "final"
    work, torch_device = folder / f"{save_as}.stage2", pick_device(device)
    with (
        joined(torch_device, timeout=60 * config.timeout_minutes, kept=lambda: going_on(work)) as ranks,
        lock_run(folder, ranks),
    ):
        callback = callback if ranks.first else Callback()
        run = open_trained(folder, name, device=device, callback=callback)
        more = {"name": name, "save_as": save_as, "resume": resume}
        ranks.agree(lambda: settings_facts(config, run.config.model, torch_device, **more), "settings")
        model = run.model
        if ranks.first:
            said(f"{model.name}, {config.chosen(model)}")
        config = config.resolved(model)
        _reset_heads(model, config)
        source, judged = (run.train, run.held_out) if config.images == "train" else run.halves(config.seed)
        task, objective = _task(run, config, source, ranks, callback)
        ranks.agree(lambda: _state_facts(run, objective), "images, weights or costs")
        passes = _passes(config, objective, len(source), ranks.world)
        if passes:
            if resume:
                callback.on_message(
                    "training from cached signals takes little time and starts from the beginning"
                )
            status = train_from_signals(task, objective, passes, work)
        else:
            status = _train_online(task, work, resume=resume)
        reports: list[GateReport] = []
        if status.finished:
            model.requires_grad_(True)
            reports = gate_reports(collect(model, run.seen(judged)), objective.costs)
            if ranks.first:
                gate_data = {
                    "gate": to_plain(config),
                    "gate_reports": [report.to_dict() for report in reports],
                }
                data = {key: value for key, value in run.saved.own_data.items() if key != "routing"}
                data |= gate_data
                save_checkpoint(folder, save_as, model, step=run.saved.data["step"], data=data)
            ranks.wait()
    return GateOutcome(
        folder=folder,
        name=save_as,
        status=status,
        goal=config.goal,
        first=ranks.first,
        cached_passes=passes,
        reports=tuple(reports),
    )


def _reset_heads(model: Supernet, config: GateConfig) -> None:
    """Give a network new routing heads, with initial weights that do not depend on the device."""
    device = model.head.classifier.weight.device
    generator = seeded(config.seed, "routing heads")
    model.cpu().reset_routing(config.routes(model), form=config.form, generator=generator)
    if config.start is not None:
        routing_from(model, config.start)
    model.to(device)


def _task(
    run: TrainedRun, config: GateConfig, source: ImageDataset, ranks: Ranks, callback: Callback
) -> tuple[ClassifierTask, GateObjective]:
    model, before = run.model, run.config
    batch = config.batch or max(1, min(512, len(source) // 20))
    if batch > len(source):
        raise DsnetError(f"batch={batch} is more than the {len(source)} images to learn from")
    optim = OptimConfig(
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=0.0,
        decay=config.decay,
        epochs=config.epochs,
        batch=batch,
    )
    settings = replace(
        before,
        augment=before.augment if config.augment else Augment(),
        mix=MixConfig(),
        optim=optim,
        run=replace(before.run, seed=config.seed, channels_last=False),
    )
    device, in_workers = model.head.classifier.weight.device, run.train.crops_in_workers
    views = Views.of(settings, run.channels, device, rank=ranks.rank, crops_in_workers=in_workers)
    precision = torch.bfloat16 if before.run.precision == "bfloat16" else None
    costs, _ = run.costs(config.latency)
    objective = GateObjective(config, model, views, costs=costs, precision=precision)
    data = {**run.saved.own_data, "recipe": to_plain(settings), "gate": to_plain(config)}
    task = ClassifierTask(settings, objective, source, None, ranks=ranks, callback=callback, data=data)
    return task, objective


def _state_facts(run: TrainedRun, objective: GateObjective) -> dict[str, Any]:
    costs = hashlib.sha256(repr(objective.costs).encode()).hexdigest()[:16]
    return {**state_facts(run.model, run.train, run.saved.data["step"]), "costs": costs}


def _passes(config: GateConfig, objective: GateObjective, images: int, world: int) -> int:
    """Return the number of passes over the images whose signals are cached."""
    several = len(objective.options) > 1
    if config.passes and several:
        raise DsnetError(f"passes={config.passes}: signals of several gates cannot be cached; set passes=0")
    if config.passes and world > 1:
        raise DsnetError(f"passes={config.passes}: only a single process can cache signals; set passes=0")
    if several or world > 1:
        return 0
    if config.passes is not None:
        return min(config.passes, config.epochs)
    return min(MAX_PASSES, config.epochs, MAX_CACHED // (images * cached_bytes(objective)))


def _train_online(task: ClassifierTask, folder: Path, *, resume: bool) -> RunStatus:
    """Run the network in every step; this can be stopped and resumed as Stage I."""
    saved = load_checkpoint(folder, "last") if resume and has_last(folder) else None
    if saved is None and task.ranks.first and folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)  # of an earlier gate, whose later steps these would not replace
    loop = task.loop(folder)
    if saved is not None:
        if _resumable(saved.data.get("gate")) != _resumable(task.data["gate"]):
            raise DsnetError(
                f"{folder} was started with other settings; resume it with those, or start without --resume"
            )
        _check_weights(folder, saved, task.model)
        loop.restore(saved)
    with stop_on_signals(task.callback.on_message) as stop:
        return loop.run(stop)


def _resumable(gate: object) -> object:
    """Return a gate's settings without those that may differ when its training is resumed."""
    return {k: v for k, v in gate.items() if k != "timeout_minutes"} if isinstance(gate, dict) else gate


def _check_weights(folder: Path, saved: Checkpoint, model: Supernet) -> None:
    """Raise if training began with other weights or statistics than the network has now."""
    now = model.state_dict()
    for name, value in saved.tensors["model"].items():
        if ".routing." not in name and not torch.equal(value, now[name].cpu()):
            raise DsnetError(
                f"{folder} was started from other weights ({name} differs), so it cannot be resumed; "
                "start without --resume"
            )
