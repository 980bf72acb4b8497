"""The losses of Stage II as pure functions of scores, draws and the outputs of the routes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.errors import DsnetError, shorten
from dsnet.routing.cost_table import CostTable

__all__ = [
    "Strategy",
    "complexity_penalty",
    "even_weights",
    "expected_costs",
    "mixed_loss",
    "sgs_loss",
    "sgs_targets",
    "value_loss",
]


Strategy = Literal["try_best", "give_up"]


def sgs_targets(easy: Tensor, solved: Tensor, choices: int, strategy: Strategy = "try_best") -> Tensor:
    """Return the position [B] of the choice that each image should take.

    Easy images should take the first choice. With ``try_best`` the others should take the last one; with
    ``give_up`` only if the largest route solves them, else the first.

    Args:
        easy: Whether the smallest route is right [B].
        solved: Whether the largest route is right [B].
        choices: Number of choices of the gate.
        strategy: ``try_best`` or ``give_up``.

    Raises:
        DsnetError: The strategy is unknown.
    """
    if strategy not in ("try_best", "give_up"):
        raise DsnetError(f"unknown strategy {shorten(strategy)}; possible: try_best, give_up")
    first = easy if strategy == "try_best" else easy | ~solved
    return torch.where(first, 0, choices - 1)


def even_weights(targets: Tensor) -> Tensor:
    """Return weights [B] of mean 1 by which each target counts as much as any other, however rare."""
    counts = (targets[:, None] == targets).sum(1)  # images of the same target
    distinct = counts.reciprocal().sum().round()
    return len(targets) / distinct / counts


def sgs_loss(scores: Sequence[Tensor], targets: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
    """Compute the cross-entropy of each gate's scores with its targets; mean over images and gates."""
    by_gate = [F.cross_entropy(s, t, reduction="none") for s, t in zip(scores, targets, strict=True)]
    losses = torch.stack(by_gate).mean(0)
    return losses.mean() if weights is None else (weights * losses).mean()


def expected_costs(draws: Sequence[Tensor], table: CostTable, options: Sequence[Sequence[int]]) -> Tensor:
    """Compute the costs [B] of drawn routes, with gradients for the draws: prefix + Σ φ(s−1)ᵀ C(s) φ(s).

    Args:
        draws: One-hot draws [B, choices] of each gate.
        table: Costs of the prefix and the segments.
        options: Choices of each gate.
    """
    first, device = draws[0], draws[0].device
    costs = _segment_costs(table, tuple(map(tuple, options)), device, first.dtype)
    total = first.new_full((len(first),), table.prefix) + first @ costs[0][0]
    for previous, draw, segment in zip(draws, draws[1:], costs[1:], strict=False):
        total = total + torch.einsum("bi,ij,bj->b", previous, segment, draw)
    return total


@functools.cache
def _segment_costs(
    table: CostTable, options: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the costs [previous choice, choice] of each gate; cached, since graphs read their addresses."""
    with torch.inference_mode(False):
        return tuple(
            torch.tensor([[table.segment(gate, b, c) for c in choices] for b in before]).to(device, dtype)
            for gate, (before, choices) in enumerate(zip(((0,), *options[:-1]), options, strict=True))
        )


def complexity_penalty(costs: Tensor, total: float) -> Tensor:
    """Compute the mean over images of (cost / total)², where ``total`` is the cost of the largest route."""
    return (costs / total).square().mean()


def mixed_loss(draw: Tensor, losses: Tensor, pull: Tensor) -> Tensor:
    """Compute the cross-entropy of logits mixed by one-hot draws, with gradients for the draws.

    If the draw of an image is k, its mixed logits are z_k, and the derivative of the loss by the share of
    candidate r is (p_k − y)ᵀ z_r. So the logits, which may have thousands of classes, are not needed.

    Args:
        draw: One-hot draws [B, R].
        losses: Cross-entropies [B, R] of the candidates.
        pull: (p_k − y)ᵀ z_r of each image [B, k, r].
    """
    chosen = draw.argmax(1)
    images = torch.arange(len(draw), device=draw.device)
    linear = (draw * pull[images, chosen]).sum(1)
    return (losses[images, chosen] + linear - linear.detach()).mean()


def value_loss(scores: Tensor, right: Tensor) -> Tensor:
    """Compute the squared error of scores [B, R] as probabilities that each route is right [B, R].

    With these scores, score − λ · cost is the expected accuracy minus the cost penalty, which makes the best
    use of a budget. A gate that learns nothing from images scores the routes' mean accuracies, and the
    decision is the best single route.
    """
    return (scores - right.to(scores.dtype)).square().mean()
