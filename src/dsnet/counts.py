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
    """Shape of the features of one image. A sequence of tokens has height = tokens and width = 1.

    Examples:
        >>> Shape(channels=8, height=4, width=4).area
        16
    """

    channels: int
    height: int
    width: int

    @property
    def area(self) -> int:
        """Number of positions."""
        return self.height * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Parameters, and multiply-adds for one image by kind. Costs add up.

    Attributes:
        params: Weights, biases, γ and β of the slice, without routing heads and statistics.
        layers: Multiply-adds of convolutions and linear layers.
        pools: Elements read by average pools.
        routing: Multiply-adds of routing heads.
        attention: Multiply-adds of QKᵀ and AV.

    Examples:
        >>> cost = Cost(layers=100, pools=16) + Cost(layers=50, routing=4)
        >>> cost.madds(), cost.madds("all")
        (166, 170)
    """

    params: int = 0
    layers: int = 0
    pools: int = 0
    routing: int = 0
    attention: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            params=self.params + other.params,
            layers=self.layers + other.layers,
            pools=self.pools + other.pools,
            routing=self.routing + other.routing,
            attention=self.attention + other.attention,
        )

    def madds(self, convention: Convention = "paper") -> int:
        """Return the multiply-adds by a convention.

        Args:
            convention: ``paper``, or ``all``, see the module's description.
        """
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
