"""How decisions change with the price of cost: which image moves to which cheaper choice, and when."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Moves", "cheaper_moves", "within"]


class Moves(NamedTuple):
    """M moves; those of one image come in the order of their prices."""

    price: Tensor  # [M]: the weight of cost at which it happens
    image: Tensor  # [M]
    before: Tensor  # [M]: the choice that is left
    after: Tensor  # [M]: the choice that is taken


def cheaper_moves(scores: Tensor, costs: Tensor, start: Tensor) -> Moves:
    """All moves of argmax(score − price · cost) as the price rises, from the choices [N] of ``start`` on.

    ``scores`` [N, K] and ``costs`` [K] in float64. The argmax is the upper envelope of K lines in the price,
    so an image moves at most K − 1 times, each time to a cheaper choice.
    """
    now, found = start, []
    for _ in range(len(costs) - 1):
        gap = costs[now][:, None] - costs
        at = (scores.gather(1, now[:, None]) - scores) / gap
        price, after = at.masked_fill(gap <= 0, torch.inf).min(1)
        image = torch.isfinite(price).nonzero()[:, 0]
        found.append(Moves(price[image], image, now[image], after[image]))
        now = now.index_put((image,), after[image])
    empty = torch.empty(0, dtype=torch.long, device=scores.device)
    none = Moves(torch.empty(0, dtype=scores.dtype, device=scores.device), empty, empty, empty)
    return Moves(*(torch.cat(columns) for columns in zip(none, *found, strict=True)))


def within(scores: Tensor, costs: Tensor, allowance: float) -> Tensor:
    """The best choices [N] that together cost no more than ``allowance``; the cheapest ones if none do."""
    scores, costs = scores.double(), costs.to(scores.device, torch.float64)
    taken = scores.argmax(1)
    over = float(costs[taken].sum()) - allowance
    if over <= 0:
        return taken
    moves = cheaper_moves(scores, costs, taken)
    order = moves.price.argsort(stable=True)
    saved = (costs[moves.before] - costs[moves.after])[order].cumsum(0)
    enough = int((saved < over).sum()) + 1  # so many moves
    made = order[:enough]
    # An image's moves come in order of price, so its last one among those made says where it ends.
    for image, after in zip(moves.image[made].tolist(), moves.after[made].tolist(), strict=True):
        taken[image] = after
    return taken
