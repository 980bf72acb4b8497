"""Optimizers, learning-rate schedules and the optimizer state in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from dsnet.core.checkpoint import check_tensors
from dsnet.errors import DsnetError, shorten
from dsnet.gate import Gate, RoutingHead

__all__ = [
    "cosine",
    "make_optimizer",
    "optimizer_tensors",
    "parameter_groups",
    "restore_optimizer",
    "scheduled_rate",
    "set_learning_rate",
]


def parameter_groups(
    modules: Iterable[nn.Module], weight_decay: float, *, routing: bool = False
) -> list[dict[str, Any]]:
    """Return two parameter groups: weights with decay, all other parameters without.

    Parameters of gates and one-dimensional ones (biases, norms, tokens) and position embeddings have no
    decay. Routing heads are left out unless ``routing`` is set.
    """
    with_decay: list[nn.Parameter] = []
    without: list[nn.Parameter] = []
    for module in modules:
        in_gates, in_heads = (
            {p for m in module.modules() if isinstance(m, kind) for p in m.parameters()}
            for kind in (Gate, RoutingHead)
        )
        for name, parameter in module.named_parameters():
            if parameter in in_heads and not routing:
                continue
            exempt = parameter in in_gates or parameter.ndim == 1 or name.endswith("positions")
            (without if exempt else with_decay).append(parameter)
    return [{"params": with_decay, "weight_decay": weight_decay}, {"params": without, "weight_decay": 0.0}]


def make_optimizer(
    kind: Literal["sgd", "adamw"], groups: list[dict[str, Any]], *, lr: float, momentum: float = 0.9
) -> Optimizer:
    """Create SGD with Nesterov momentum, or AdamW."""
    if kind == "sgd":
        return SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
    if kind == "adamw":
        return AdamW(groups, lr=lr)
    raise DsnetError(f"unknown optimizer {shorten(kind)}; possible: sgd, adamw")


def cosine(step: int, *, steps: int, warmup: int) -> float:
    """Return the factor of the learning rate: linear warm-up to 1, then half a cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    if steps <= warmup:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (steps - warmup))))


def scheduled_rate(
    lr: float, step: int, *, steps: int, warmup: int = 0, factor: float | None = None
) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine down to 0, or lr · ``factor``.

    Args:
        lr: The largest learning rate.
        step: The step, from 0.
        steps: Steps of the run.
        warmup: Steps of the warm-up.
        factor: The factor of a stepwise schedule in this step; None: the cosine.
    """
    if factor is None:
        return lr * cosine(step, steps=steps, warmup=warmup)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return lr * rise * factor


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state as tensors named ``INDEX.KEY``, by the index of the parameter."""
    state = optimizer.state_dict()["state"].items()
    return {f"{i}.{key}": value for i, entry in state for key, value in entry.items() if value is not None}


def restore_optimizer(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], unused: Iterable[Tensor] = ()
) -> None:
    """Load the state that `optimizer_tensors` returned into an optimizer over the same parameters.

    Args:
        optimizer: SGD or AdamW.
        tensors: The saved state.
        unused: Parameters that may have no state because no step used them.

    Raises:
        DsnetError: If a tensor is missing, unexpected or of another shape.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    idle = {id(parameter) for parameter in unused}
    expected: dict[str, tuple[int, ...]] = {}
    for index, parameter in enumerate(parameters):
        names = {f"{index}.{key}": shape for key, shape in _state_shapes(optimizer, parameter).items()}
        if id(parameter) in idle and not names.keys() & tensors.keys():
            continue
        expected |= names
    check_tensors("optimizer", tensors, expected)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index_of, key = name.split(".", 1)
        state.setdefault(int(index_of), {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _state_shapes(optimizer: Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    shape = tuple(parameter.shape)
    if isinstance(optimizer, SGD):
        return {"momentum_buffer": shape} if optimizer.defaults["momentum"] else {}
    if isinstance(optimizer, AdamW):
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    raise DsnetError(f"the state of {type(optimizer).__name__} cannot be restored; possible: SGD, AdamW")
