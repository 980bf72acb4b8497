"""What is taken off a gate's scores, so that a budget is kept: the same on every program of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dsnet.errors import DsnetError
from dsnet.routing.cost_table import CostTable
from dsnet.runtime.executors.buffers import GatePlaces

__all__ = ["Prices", "prices_of", "set_prices"]

Prices = tuple[tuple[tuple[float, ...], ...], ...]
"""What is taken off every score: by gate, the choice before it, its own choice, all by position."""


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
    if not math.isfinite(weight):
        raise DsnetError(f"the weight of cost must be finite, not {weight}")
    if weight == 0:
        return None
    price = weight / costs.largest
    before = ((0,), *held[:-1])
    return tuple(
        tuple(tuple(price * costs.segment(gate, previous, choice) for choice in own) for previous in rows)
        for gate, (rows, own) in enumerate(zip(before, choices, strict=True))
    )
