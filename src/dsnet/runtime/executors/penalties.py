"""What is taken off a gate's scores, so that a budget is kept: the same on every program of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsnet.routing.cost_table import CostPenalties, CostTable
from dsnet.runtime.executors.buffers import GatePlaces

__all__ = ["Prices", "prices_of", "set_prices"]

Prices = CostPenalties


def set_prices(gates: Sequence[GatePlaces], before: Prices | None, prices: Prices | None) -> None:
    """Where they are others than before."""
    if prices == before:
        return
    for number, gate in enumerate(gates):
        if prices is None:
            gate.prices.zero_()
        else:
            gate.prices.copy_(torch.tensor(prices[number], dtype=torch.float64))


def prices_of(
    costs: CostTable, weight: float, choices: Sequence[Sequence[int]], held: Sequence[Sequence[int]]
) -> Prices | None:
    """``weight`` · cost / cost of the largest route: choices of every gate behind all that are held."""
    return None if weight == 0 else costs.penalties(weight, choices, ((0,), *held[:-1]))
