"""Budget search: at which Lagrange multiplier which image switches to which cheaper choice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Switches", "best_within", "cheaper_switches"]


class Switches(NamedTuple):
    """M switches of images to cheaper choices; those of one image are in the order of their weights."""

    weight: Tensor  # [M]: the Lagrange multiplier at which it happens
    image: Tensor  # [M]
    before: Tensor  # [M]: the choice before
    after: Tensor  # [M]: the cheaper choice


def cheaper_switches(scores: Tensor, costs: Tensor, start: Tensor) -> Switches:
    """Return all switches of argmax(scores − λ · costs) as λ rises from where the choices are ``start``.

    The argmax is the upper envelope of K lines in λ, so an image switches at most K − 1 times, each time to
    a cheaper choice.

    Args:
        scores: [N, K], float64.
        costs: [K], float64.
        start: [N], positions among the K choices.
    """
    now, rounds = start, []
    for _ in range(len(costs) - 1):
        saving = costs[now][:, None] - costs
        crossing = (scores.gather(1, now[:, None]) - scores) / saving
        weight, after = crossing.masked_fill(saving <= 0, torch.inf).min(1)
        image = torch.isfinite(weight).nonzero()[:, 0]
        rounds.append(Switches(weight[image], image, now[image], after[image]))
        now = now.index_put((image,), after[image])
    empty = torch.empty(0, dtype=torch.long, device=scores.device)
    none = Switches(torch.empty(0, dtype=scores.dtype, device=scores.device), empty, empty, empty)
    return Switches(*(torch.cat(columns) for columns in zip(none, *rounds, strict=True)))


def best_within(scores: Tensor, costs: Tensor, allowance: float) -> Tensor:
    """Return the best choices [N] that together cost at most ``allowance``, or else the cheapest ones."""
    scores, costs = scores.double(), costs.to(scores.device, torch.float64)
    choices = scores.argmax(1)
    excess = float(costs[choices].sum()) - allowance
    if excess <= 0:
        return choices
    switches = cheaper_switches(scores, costs, choices)
    order = switches.weight.argsort(stable=True)
    saved = (costs[switches.before] - costs[switches.after])[order].cumsum(0)
    first = order[: int((saved < excess).sum()) + 1]
    # An image's switches are in the order of their weights, so the last of these is its final choice.
    for image, after in zip(switches.image[first].tolist(), switches.after[first].tolist(), strict=True):
        choices[image] = after
    return choices
