"""Optimisers and schedules of the paper's recipes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from dsnet.errors import DsnetError, shorten
from dsnet.gate import Gate, RoutingHead
from dsnet.training.config import OptimConfig

__all__ = ["cosine", "learning_rate", "make_optimizer", "parameter_groups", "set_learning_rate"]


def parameter_groups(
    modules: Iterable[nn.Module], weight_decay: float, *, routing: bool = False
) -> list[dict[str, Any]]:
    """Weights with decay; gates, norms, biases, positions and the class token without.

    Whatever has one dimension is a bias, a norm's γ or β, or a token; positions are named. Routing heads are
    left out unless ``routing`` asks for them.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for module in modules:
        in_gates = {id(p) for m in module.modules() if isinstance(m, Gate) for p in m.parameters()}
        in_heads = {id(p) for m in module.modules() if isinstance(m, RoutingHead) for p in m.parameters()}
        for name, parameter in module.named_parameters():
            if id(parameter) in in_heads and not routing:
                continue
            bare = id(parameter) in in_gates or parameter.ndim == 1 or name.endswith("positions")
            (plain if bare else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def make_optimizer(
    kind: Literal["sgd", "adamw"], groups: list[dict[str, Any]], *, lr: float, momentum: float = 0.9
) -> Optimizer:
    """SGD with Nesterov momentum, or AdamW."""
    if kind == "sgd":
        return SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
    if kind == "adamw":
        return AdamW(groups, lr=lr)
    raise DsnetError(f"unknown optimizer {shorten(kind)}; possible: sgd, adamw")


def cosine(step: int, *, steps: int, warmup: int) -> float:
    """The learning rate's factor: a line up to 1 over ``warmup`` steps, then half a cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    if steps <= warmup:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (steps - warmup))))


def learning_rate(optim: OptimConfig, step: int, *, steps: int, epoch_steps: int) -> float:
    """The learning rate of a step."""
    warmup = round(optim.warmup * epoch_steps)
    if optim.decay is None:
        return optim.lr * cosine(step, steps=steps, warmup=warmup)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return optim.lr * rise * optim.decay ** (step // epoch_steps)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
