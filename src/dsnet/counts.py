"""Costs of layers, as integers that add up.

Two conventions turn a `Cost` into one number of multiply-adds:

``paper``
    convolutions and linear layers, including the gates' first layers and attention heads, plus one
    for each element that an average pool reads. The paper's tables count like this.
``all``
    ``paper`` plus the routing heads and the attention products QKᵀ and AV.

Neither counts norms, activations, biases and max-pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dsnet.errors import DsnetError, shorten

__all__ = ["CONVENTIONS", "Convention", "Cost", "Shape", "human"]

Convention = Literal["paper", "all"]
CONVENTIONS: tuple[Convention, ...] = ("paper", "all")


class Shape(NamedTuple):
    """Shape of the features of one image. A sequence of tokens has height = tokens and width = 1."""

    channels: int
    height: int
    width: int

    @property
    def area(self) -> int:
        """Number of positions."""
        return self.height * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Parameters, and multiply-adds for one image by kind."""

    params: int = 0  # weights, biases, γ and β of the slice, without routing heads and statistics
    layers: int = 0  # convolutions and linear layers
    pools: int = 0  # elements read by average pools
    routing: int = 0  # routing heads
    attention: int = 0  # QKᵀ and AV

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            params=self.params + other.params,
            layers=self.layers + other.layers,
            pools=self.pools + other.pools,
            routing=self.routing + other.routing,
            attention=self.attention + other.attention,
        )

    def madds(self, convention: Convention = "paper") -> int:
        """Return the multiply-adds by a convention."""
        if convention == "paper":
            return self.layers + self.pools
        if convention == "all":
            return self.layers + self.pools + self.routing + self.attention
        raise DsnetError(f"unknown convention {shorten(convention)}; possible: {', '.join(CONVENTIONS)}")


def human(count: float) -> str:
    """Format a count with three or four digits and a unit.

    >>> human(132_867_296), human(5.77e9)
    ('132.9M', '5.77B')
    """
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            value = count / limit
            return f"{value:.2f}{letter}" if value < 10 else f"{value:.1f}{letter}"
    return f"{count:.0f}"
