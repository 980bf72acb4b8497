"""Cost penalties in the memory that captured programs read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsnet.routing.cost_table import CostPenalties
from dsnet.runtime.executors.buffers import GatePlaces

__all__ = ["set_penalties"]


def set_penalties(
    gates: Sequence[GatePlaces], before: CostPenalties | None, penalties: CostPenalties | None
) -> None:
    """Write penalties for the choices that are held, if they differ from those of ``before``."""
    if penalties == before:
        return
    previous: Sequence[int] = (0,)
    for number, gate in enumerate(gates):
        if penalties is None:
            gate.prices.zero_()
        else:
            gate.prices.copy_(torch.tensor([penalties[number][row] for row in previous], dtype=torch.float64))
        previous = gate.held
