"""What a gate pays in Stage II: pure functions of scores, draws and what the routes said of the images."""

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
    """The position [B] that each image should take, of so many choices.

    ``easy``: the smallest route is right; ``solved``: the largest is. Easy images go to the first choice.
    The others go to the last one (``try_best``); or only if it solves them, else to the first (``give_up``).
    """
    if strategy not in ("try_best", "give_up"):
        raise DsnetError(f"unknown strategy {shorten(strategy)}; possible: try_best, give_up")
    first = easy if strategy == "try_best" else easy | ~solved
    return torch.where(first, 0, choices - 1)


def even_weights(targets: Tensor) -> Tensor:
    """Weights [B], of mean 1, that make every target count as much as every other, however rare."""
    like = (targets[:, None] == targets).sum(1)  # images of the same target
    kinds = like.reciprocal().sum().round()
    return len(targets) / kinds / like


def sgs_loss(scores: Sequence[Tensor], targets: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of every gate's softmax, without noise, to its target; mean over images and gates."""
    each = [F.cross_entropy(s, t, reduction="none") for s, t in zip(scores, targets, strict=True)]
    paid = torch.stack(each).mean(0)
    return paid.mean() if weights is None else (weights * paid).mean()


def expected_costs(draws: Sequence[Tensor], table: CostTable, options: Sequence[Sequence[int]]) -> Tensor:
    """Cost [B] of drawn routes, with the gradient of the draws: prefix + Σ φ(s−1)ᵀ C(s) φ(s)."""
    total = draws[0].new_full((len(draws[0]),), table.prefix)
    previous: Tensor | None = None
    kind = draws[0].device, draws[0].dtype
    for draw, costs in zip(draws, _segments(table, tuple(map(tuple, options)), *kind), strict=True):
        if previous is None:
            total = total + draw @ costs[0]
        else:
            total = total + torch.einsum("bi,ij,bj->b", previous, costs, draw)
        previous = draw
    return total


@functools.cache
def _segments(
    table: CostTable, options: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Costs [before, own] of every gate, kept on the device for good: graphs read them."""
    with torch.inference_mode(False):
        return tuple(
            torch.tensor([[table.segment(gate, b, choice) for choice in own] for b in before]).to(
                device, dtype
            )
            for gate, (before, own) in enumerate(zip(((0,), *options[:-1]), options, strict=True))
        )


def complexity_penalty(costs: Tensor, total: float) -> Tensor:
    """Mean over images of (cost / total)², total being the largest route's cost."""
    return (costs / total).square().mean()


def mixed_loss(draw: Tensor, losses: Tensor, pull: Tensor) -> Tensor:
    """Cross-entropy of the candidates' logits mixed by one-hot draws [B, R], as value and as gradient.

    ``losses`` [B, R] are the candidates' own cross-entropies, ``pull[b, k, r]`` is (p_k − y)ᵀ z_r: where
    the draw is k, the mix is z_k, and this is what its loss changes by with the share of candidate r. The
    logits themselves, which may have thousands of classes, are not needed any more.
    """
    drawn = draw.argmax(1)
    every = torch.arange(len(draw), device=draw.device)
    linear = (draw * pull[every, drawn]).sum(1)
    return (losses[every, drawn] + linear - linear.detach()).mean()


def value_loss(scores: Tensor, right: Tensor) -> Tensor:
    """Squared error of scores [B, R] as the chance that each route is right [B, R].

    A gate that learns this and nothing else gets the most out of a budget: score − λ · cost is then the
    expected accuracy less its price. Where images tell it nothing its scores are the routes' mean accuracies,
    and the decision is the best single route at that price.
    """
    return (scores - right.to(scores.dtype)).square().mean()
