"""Beginning with what another run has learnt: its weights, and what its images were normalised by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.settings import override
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.loading import build_network, load_classifier
from dsnet.training.config import OptimConfig, SchemeConfig, TrainConfig
from dsnet.training.stage1.teacher import Channels
from dsnet.training.stage2.config import LossWeights

__all__ = [
    "channels_of",
    "check_start",
    "checkpoint_of",
    "fine_tuning",
    "gate_like",
    "routing_from",
    "start_from",
    "trained_on",
    "transfer_rate",
]

ROUTING = ".routing."  # in the names of routing heads
CLASSIFIER = "head.classifier."
EPOCHS, WARMUP = 70, 15  # the paper's schedule of transfer
SGD_RATE = 0.7 / 1024  # the paper's learning rate of transfer, for every image of a batch
ADAMW = OptimConfig(kind="adamw", lr=1e-3, batch=1024)  # the paper's training of DS-ViT++


def transfer_rate(optim: OptimConfig, trained: OptimConfig) -> float:
    """The learning rate to fine-tune with, by the optimiser and batch of ``optim``.

    SGD: the paper's 0.7 for a batch of 1024, in proportion to the batch. AdamW: the rate that the network was
    ``trained`` with by AdamW, else 1e-3 for a batch of 1024, times the square root of the ratio of batches.
    AdamW's steps do not grow with the gradient, so a rate of SGD's size overshoots; the square root is what
    was measured (docs/training.md).
    """
    if optim.kind == "sgd":
        return SGD_RATE * optim.batch
    known = trained if trained.kind == "adamw" else ADAMW
    return known.lr * math.sqrt(optim.batch / known.batch)


def fine_tuning(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """A run's settings for fine-tuning on other data, with some of them ``given`` by the user.

    The schedule is the paper's, the learning rate that of `transfer_rate`. An external teacher knows the
    classes of the first data alone: without another one given its networks learn from labels.
    """
    schedule: dict[str, Any] = {"optim.epochs": EPOCHS, **_scheme(config.scheme, given)}
    chosen = override(config, {**schedule, **given})
    optim = chosen.optim
    if not {"warmup", "optim.warmup"} & set(given):
        optim = replace(optim, warmup=WARMUP * optim.epochs / EPOCHS)
    if not {"lr", "optim.lr"} & set(given):
        optim = replace(optim, lr=transfer_rate(optim, config.optim))
    return replace(chosen, optim=optim)


def _scheme(scheme: SchemeConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What changes of a scheme whose teacher knows other classes."""
    if scheme.teacher is None or {"teacher", "scheme.teacher"} & set(given):
        return {}
    parts = [part for part in scheme.name.split("+") if part.strip() not in ("ed", "label")]
    return {"scheme.name": "+".join(["label", *parts]), "scheme.teacher": None}


def checkpoint_of(run: str | Path) -> Checkpoint:
    """The checkpoint of a run to begin with."""
    folder = Path(run)
    if not folder.is_dir():
        made = folder.name if folder.parent.name == "runs" else f"RECIPE --out {folder}"
        raise DsnetError(f"there is no folder {folder} to start from; `dsnet train {made}` would make it")
    return load_classifier(folder)


def trained_on(saved: Checkpoint, run: str | Path) -> dict[str, Any]:
    """Size, mean and deviation of the images that a run was trained on."""
    known = saved.data.get("input")
    if not isinstance(known, dict) or "size" not in known:
        raise DsnetError(f"{run} does not say what it was trained on: `dsnet train` did not make it")
    return known


def start_from(model: Supernet, run: str | Path) -> Checkpoint:
    """Gives a network all weights of a run's but its classifier and routing heads; the run's checkpoint."""
    saved = _fitting(model, run)
    theirs = saved.tensors["model"]
    model.load_state_dict({**model.state_dict(), **{name: theirs[name] for name in _taken(model)}})
    return saved


def check_start(model: Supernet, run: str | Path, size: int) -> None:
    """Raises where a network, which may be on the meta device, cannot begin with a run on such images."""
    channels_of(_fitting(model, run), run, size)


def routing_from(model: Supernet, run: str | Path) -> None:
    """Gives a network the routing heads of a run's (gate transfer); they decide between the same choices."""
    saved = checkpoint_of(run)
    _check_network(model, saved, run)
    for number, theirs in enumerate(saved.data["network"]["gates"]):
        own = list(model.gate(number).choices)
        if own != theirs:
            raise DsnetError(f"{run} has heads for the choices {theirs}, not {own}: give the same space")
    mine, heads = model.state_dict(), saved.tensors["model"]
    wanted = [name for name in mine if ROUTING in name]
    if any(name not in heads or heads[name].shape != mine[name].shape for name in wanted):
        raise DsnetError(f"{run} has heads of another form: give the same head, first_layer and width")
    model.load_state_dict({**mine, **{name: heads[name] for name in wanted}})


def channels_of(saved: Checkpoint, run: str | Path, size: int) -> Channels:
    """Means and deviations that a run's images were normalised by; they had ``size`` pixels a side, too."""
    known = trained_on(saved, run)
    if known["size"] != size:
        raise DsnetError(
            f"{run} was trained on images of {known['size']} pixels, these have {size}; set "
            f"data.size={known['size']}, as `dsnet transfer` does where none is given"
        )
    return tuple(known["mean"]), tuple(known["std"])


def _taken(model: Supernet) -> list[str]:
    """Names of what is taken over from another run."""
    return [name for name in model.state_dict() if ROUTING not in name and not name.startswith(CLASSIFIER)]


def _fitting(model: Supernet, run: str | Path) -> Checkpoint:
    """The checkpoint of a run to begin with; raises where the network does not fit it."""
    saved = checkpoint_of(run)
    _check_network(model, saved, run)
    own, theirs = model.state_dict(), saved.tensors["model"]
    for name in _taken(model):
        if name not in theirs or theirs[name].shape != own[name].shape:
            raise DsnetError(f"{run} does not fit {model.name} with these options: {name} has another shape")
    return saved


def _check_network(model: Supernet, saved: Checkpoint, run: str | Path) -> None:
    theirs = saved.data["network"]
    if theirs["name"] != model.name:
        raise DsnetError(f"{run} holds {theirs['name']}, not {model.name}: give model={theirs['name']}")


def gate_like(saved: Checkpoint) -> dict[str, object]:
    """The same choices, losses and form of head as the run's gate.

    Weights of losses that belong to its space are left to the space, so that another one brings its own.
    """
    plain = saved.data.get("gate")
    kept = (
        "space",
        "goal",
        "head",
        "first_layer",
        "width",
        "strategy",
        "target",
        "complexity",
        "sgs",
        "even",
    )
    if not isinstance(plain, dict):
        return {}
    weights = build_network(saved).gate_weights
    own = LossWeights(*weights.get(plain.get("space") or "", LossWeights()))._asdict()
    return {key: plain[key] for key in kept if key in plain and (key not in own or own[key] != plain[key])}
