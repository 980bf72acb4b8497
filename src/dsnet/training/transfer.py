"""Transfer: start a run with the weights and the normalisation of another."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.settings import override
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.loading import build_network, check_finite, load_classifier
from dsnet.routes import RouteSpace
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
CLASSIFIER = re.compile(r"(networks\.\d+\.)?head\.classifier\.")  # at the start of a name
EPOCHS, WARMUP = 70, 15  # the paper's schedule of transfer
SGD_RATE = 0.7 / 1024  # the paper's learning rate of transfer, for every image of a batch
GATE_SETTINGS = ("space", "goal", "head", "first_layer", "width", "strategy", *LossWeights._fields, "even")
ADAMW = OptimConfig(kind="adamw", lr=1e-3, batch=1024)  # the paper's training of DS-ViT++


def transfer_rate(optim: OptimConfig, trained: OptimConfig) -> float:
    """Return the learning rate to fine-tune with, for the optimizer and batch of ``optim``.

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
    """Return a run's settings for fine-tuning on other data, with those ``given`` by the user.

    The schedule is the paper's, the learning rate that of `transfer_rate`. An external teacher knows the
    classes of the first data only: unless another one is given, the networks learn from labels.
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
    """Return the changes of a scheme whose teacher knows other classes."""
    if scheme.teacher is None or {"teacher", "scheme.teacher"} & set(given):
        return {}
    parts = [part for part in scheme.name.split("+") if part.strip() not in ("ed", "label")]
    return {"scheme.name": "+".join(["label", *parts]), "scheme.teacher": None}


def checkpoint_of(run: str | Path) -> Checkpoint:
    """Load the checkpoint of a run to start from.

    Raises:
        DsnetError: There is no such folder, or it holds a detector.
    """
    folder = Path(run)
    if not folder.is_dir():
        recipe = folder.name if folder.parent.name == "runs" else f"RECIPE --out {folder}"
        raise DsnetError(f"there is no folder {folder} to start from; `dsnet train {recipe}` would make it")
    return load_classifier(folder)


def trained_on(saved: Checkpoint, run: str | Path) -> dict[str, Any]:
    """Return the size, mean and standard deviation of the images that a run was trained on."""
    known = saved.data.get("input")
    if not isinstance(known, dict) or "size" not in known:
        raise DsnetError(f"{run} does not say what it was trained on: `dsnet train` did not make it")
    return known


def start_from(model: Supernet, run: str | Path) -> Checkpoint:
    """Load all weights of a run but its classifier and routing heads; return the run's checkpoint.

    Raises:
        DsnetError: The run is of another network, or one with other shapes.
    """
    saved = _fitting(model, run)
    weights = saved.tensors["model"]
    model.load_state_dict({**model.state_dict(), **{name: weights[name] for name in _shared(model)}})
    return saved


def check_start(model: Supernet, run: str | Path, size: int) -> None:
    """Raise if a network, which may be on the meta device, cannot start from a run on such images."""
    channels_of(_fitting(model, run), run, size)


def routing_from(model: Supernet, run: str | Path) -> None:
    """Load the routing heads of a run (gate transfer); they must decide between the same choices."""
    saved = checkpoint_of(run)
    _check_network(model, saved, run)
    for number, theirs in enumerate(saved.data["network"]["gates"]):
        choices = list(model.gate(number).choices)
        if choices != theirs:
            raise DsnetError(f"{run} has heads for the choices {theirs}, not {choices}: give the same space")
    _check_sizes(model, saved, run)
    mine, heads = model.state_dict(), saved.tensors["model"]
    names = [name for name in mine if ROUTING in name]
    if any(name not in heads or heads[name].shape != mine[name].shape for name in names):
        raise DsnetError(f"{run} has heads of another form: give the same head, first_layer and width")
    shared = {name: heads[name] for name in names}
    check_finite(shared, str(run))
    model.load_state_dict({**mine, **shared})


def _check_sizes(model: Supernet, saved: Checkpoint, run: str | Path) -> None:
    """Raise unless the numbers that gates choose from are routes of the same sizes, images included."""

    def sizes(space: RouteSpace) -> list[tuple[object, ...]]:
        return [(space.resolve(n).image_size, space.resolve(n).stages) for n in model.gate(0).choices]

    theirs = RouteSpace.from_dict(saved.data["network"]["space"])
    every = {route.image_size for space in (model.space, theirs) for route in space}
    if every != {None} and sizes(theirs) != sizes(model.space):
        given, mine = (
            ", ".join(map(str, sorted({route.image_size for route in space if route.image_size}))) or "none"
            for space in (theirs, model.space)
        )
        raise DsnetError(
            f"{run} has heads for the routes of other image sizes ({given}, not {mine}): give the same "
            "options.image_sizes"
        )


def channels_of(saved: Checkpoint, run: str | Path, size: int) -> Channels:
    """Return the means and deviations that a run's images were normalised by.

    Raises:
        DsnetError: They had another size.
    """
    known = trained_on(saved, run)
    if known["size"] != size:
        raise DsnetError(
            f"{run} was trained on images of {known['size']} pixels, these have {size}; set "
            f"data.size={known['size']}, as `dsnet transfer` does where none is given"
        )
    return tuple(known["mean"]), tuple(known["std"])


def _shared(model: Supernet) -> list[str]:
    """Return the names of the tensors that are taken over from another run."""
    return [name for name in model.state_dict() if ROUTING not in name and not CLASSIFIER.match(name)]


def _fitting(model: Supernet, run: str | Path) -> Checkpoint:
    """Load the checkpoint of a run to start from; raise if the network does not fit it."""
    saved = checkpoint_of(run)
    _check_network(model, saved, run)
    mine, theirs = model.state_dict(), saved.tensors["model"]
    shared = _shared(model)
    for name in shared:
        if name not in theirs or theirs[name].shape != mine[name].shape:
            raise DsnetError(f"{run} does not fit {model.name} with these options: {name} has another shape")
    check_finite({name: theirs[name] for name in shared}, str(run))
    return saved


def _check_network(model: Supernet, saved: Checkpoint, run: str | Path) -> None:
    name = saved.data["network"]["name"]
    if name != model.name:
        raise DsnetError(f"{run} holds {name}, not {model.name}: give model={name}")


def gate_like(saved: Checkpoint) -> dict[str, object]:
    """Return the settings of a run's gate: its choices, losses and form of head; none without a gate.

    Loss weights that are the defaults of its space are left out, so that another space brings its own.
    """
    plain = saved.data.get("gate")
    if not isinstance(plain, dict):
        return {}
    weights = build_network(saved).gate_weights
    defaults = LossWeights(*weights.get(plain.get("space") or "", LossWeights()))._asdict()
    return {
        key: plain[key]
        for key in GATE_SETTINGS
        if key in plain and (key not in defaults or defaults[key] != plain[key])
    }
