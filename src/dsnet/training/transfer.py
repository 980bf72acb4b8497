"""Beginning with what another run has learnt: its weights, and what its images were normalised by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.training.checkpoint import Checkpoint, load_classifier
from dsnet.training.teacher import Channels

__all__ = ["channels_of", "check_start", "checkpoint_of", "routing_from", "start_from", "trained_on"]

ROUTING = ".routing."  # in the names of routing heads
CLASSIFIER = "head.classifier."


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
