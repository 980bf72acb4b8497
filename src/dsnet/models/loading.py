"""Networks in checkpoints: save a network, and build it again with its weights and routing heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet.core.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from dsnet.errors import DsnetError, printable, shorten
from dsnet.gate import HeadForm
from dsnet.models import Supernet, create_model, list_models
from dsnet.models.registry import TIMM
from dsnet.routes import RouteSpace

__all__ = ["build_network", "check_finite", "load_classifier", "load_model", "save_checkpoint"]

LARGE = 2**16  # an option above this could take all memory
BUILD_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def save_checkpoint(
    run: Path,
    name: str,
    model: Supernet,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """Save a network with further tensors and plain data; see `dsnet.core.checkpoint.write_checkpoint`.

    Args:
        run: Folder of the run.
        name: Name of the checkpoint, such as ``last``.
        model: The network.
        step: Number of optimizer steps made.
        tensors: Further groups of tensors; a group ``model`` replaces the network's own state.
        data: Further plain data (JSON types).

    Returns:
        The folder of the checkpoint.
    """
    gates = [model.gate(stage) for stage in range(len(model.gates))]
    network = {
        "name": model.spec.name,
        "options": dict(model.spec.options),
        "space": model.space.to_dict(),
        "gates": [list(gate.choices) for gate in gates],
        "heads": [asdict(gate.form) for gate in gates],
    }
    groups = {"model": model.state_dict(), **(tensors or {})}
    return write_checkpoint(run, name, step=step, tensors=groups, data={"network": network, **(data or {})})


def build_network(checkpoint: Checkpoint) -> Supernet:
    """Build the network of a checkpoint with its weights, statistics and routing heads, in eval mode.

    Raises:
        DsnetError: If the network is not registered, or the checkpoint does not fit it.
    """
    try:
        options = checkpoint.data["network"]["options"]
        if any(type(value) is int and value > LARGE for value in options.values()):
            _check_shapes(_skeleton(checkpoint, "meta"), checkpoint.tensors["model"])
        model = _skeleton(checkpoint, None)
        model.load_state_dict(dict(checkpoint.tensors["model"]))
        check_finite(checkpoint.tensors["model"])
        return model
    except (*BUILD_ERRORS, MemoryError) as error:
        if isinstance(error, DsnetError):
            raise
        reason = f"{type(error).__name__}: {printable(str(error), 1000)}"
        raise DsnetError(f"the checkpoint's network cannot be built: {reason}") from error


def _skeleton(checkpoint: Checkpoint, device: str | None) -> Supernet:
    """The network with its routing heads, without the saved weights."""
    saved = checkpoint.data["network"]
    if saved["name"] not in list_models() and not str(saved["name"]).startswith(TIMM):
        raise DsnetError(
            f"the checkpoint's network {shorten(saved['name'])} is not a registered model; import the module "
            "that registers it first (on the command line: --import MODULE). A network converted by "
            "dsnet.convert is registered by a function of that name that builds it, "
            "dsnet.models.convert.register_network"
        )
    model: Supernet = create_model(saved["name"], device=device, **saved["options"])
    space = RouteSpace.from_dict(saved["space"])
    if space != model.space:
        raise DsnetError(f"the checkpoint's {saved['name']} has other routes than this version builds")
    forms = saved.get("heads") or [None] * len(saved["gates"])
    if not len(model.gates) == len(saved["gates"]) == len(forms):
        raise DsnetError(
            f"the checkpoint has choices for {len(saved['gates'])} gates and {len(forms)} heads, expected "
            f"{len(model.gates)} of each"
        )
    for stage, (choices, form) in enumerate(zip(saved["gates"], forms, strict=True)):
        unknown = sorted(set(choices) - set(space.choices[stage]))
        if unknown:
            raise DsnetError(f"gate {stage} of the checkpoint has unknown choices: {unknown}")
        model.gate(stage).replace_routing(tuple(choices), form=None if form is None else HeadForm(**form))
    return model


def _check_shapes(model: Supernet, tensors: Mapping[str, Tensor]) -> None:
    """Raise if a network does not fit its weights, before memory is allocated for it."""
    for key, value in model.state_dict().items():
        if key not in tensors or tensors[key].shape != value.shape:
            has = "no such tensor" if key not in tensors else f"shape {list(tensors[key].shape)}"
            raise DsnetError(
                f"the checkpoint's options do not fit its weights: {key} would have shape "
                f"{list(value.shape)}, the file has {has}"
            )


def check_finite(tensors: Mapping[str, Tensor], owner: str = "the checkpoint") -> None:
    """Raise if a weight is NaN or infinite."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            raise DsnetError(
                f"{owner}'s weights are not finite: {bad} of {value.numel()} values of "
                f"{printable(name, 120)} are NaN or infinite. Its training diverged, or the file is damaged: "
                "use another checkpoint of the run, or train again with a lower learning rate"
            )


def load_classifier(run: str | Path, name: str | None = None) -> Checkpoint:
    """Load a checkpoint as `load_checkpoint` does; raise if it is a detector's."""
    saved = load_checkpoint(run, name)
    if saved.is_detector:
        raise DsnetError(f"{run} holds a detector: use `dsnet detect evaluate` or `dsnet detect predict`")
    return saved


def load_model(path: str | Path, name: str | None = None) -> Supernet:
    """Load the network of a checkpoint, in eval mode; for arguments see `load_checkpoint`."""
    return build_network(load_checkpoint(path, name))
