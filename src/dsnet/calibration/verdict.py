"""Whether routing pays: a router beside the best single route, both chosen on held-out images.

The two are compared on the same images, pair by pair. Routing pays where the router is right more often than
chance explains: a sign test over the images on which exactly one of the two is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsnet.routing.cost_table import Unit
from dsnet.routing.router import RouterKind, format_cost

__all__ = ["CHANCE", "Contest", "Paired", "Verdict", "verdict"]

CHANCE = 0.025  # of as many wins where neither is better: about two standard errors
EXACT = 1000  # images that are decided for one side, up to which the sign test is exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Two ways of answering the same images."""

    images: int
    wins: int  # images on which the first alone is right
    losses: int  # images on which the second alone is right

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> Paired:
        """From what is right [N] by each."""
        return cls(images=len(first), wins=int((first & ~second).sum()), losses=int((second & ~first).sum()))

    @property
    def difference(self) -> float:
        """Accuracy of the first less that of the second."""
        return (self.wins - self.losses) / self.images

    @property
    def error(self) -> float:
        """Standard error of the difference, which is a mean over paired images."""
        if self.images < 2:
            return 0.0
        squares = (self.wins + self.losses) / self.images - self.difference**2
        return math.sqrt(max(squares, 0.0) / (self.images - 1))

    @property
    def chance(self) -> float:
        """How likely as many wins are where neither is better."""
        decided = self.wins + self.losses
        if decided > EXACT:
            return 0.5 * math.erfc((self.wins - decided / 2 - 0.5) / math.sqrt(decided / 2))
        ways = sum(math.comb(decided, k) for k in range(self.wins, decided + 1))
        return ways / (1 << decided)

    @property
    def clear(self) -> bool:
        """Whether the first is better by more than chance explains."""
        return self.wins > self.losses and self.chance < CHANCE

    def __str__(self) -> str:
        return f"{100 * self.difference:+.2f} ± {100 * self.error:.2f} points"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A router and the best single route within the same budget, chosen on held-out images."""

    router: RouterKind
    budget: float
    cost: float  # mean of an image, on the images that both are judged on
    accuracy: float
    expected: float  # accuracy above the single route's on the held-out images
    route: int
    route_cost: float
    route_accuracy: float
    paired: Paired


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether routing pays, and where; or which single route to use."""

    best: Contest  # where held-out images favour routing most
    largest: Contest  # at the largest budget
    unit: Unit
    images: str  # what they were judged on, in words: test images

    @property
    def at(self) -> Contest:
        """The contest that decides: the first that the router wins, else where it was favoured most."""
        return self.largest if self.largest.paired.clear and not self.best.paired.clear else self.best

    @property
    def pays(self) -> bool:
        """Whether the router is better than the single route, beyond chance."""
        return self.at.paired.clear

    @property
    def route(self) -> int:
        """The single route to use where routing does not pay: the best within the largest budget."""
        return self.largest.route

    def __str__(self) -> str:
        at, use = self.at, self.largest
        cost = format_cost(at.cost, self.unit)
        alone = f"{_percent(at.route_accuracy)} at {format_cost(at.route_cost, self.unit)}"
        routed = f"within {format_cost(at.budget, self.unit)} the {at.router} gets {_percent(at.accuracy)}"
        if self.pays:
            return (
                f"Routing pays here: {routed} of the {self.images} right at a mean of {cost}, {at.paired} "
                f"above route {at.route} for all images ({alone}), the best single route within that budget "
                "on held-out images."
            )
        than = "it" if at.route == use.route else f"route {at.route}"
        explained = ", no more than chance explains" if at.paired.difference > 0 else ""
        return (
            f"Routing does not pay here: use route {use.route} for all images (--route {use.route}), "
            f"{_percent(use.route_accuracy)} of the {self.images} right at "
            f"{format_cost(use.route_cost, self.unit)}; {routed} at a mean of {cost}, {at.paired} against "
            f"{than}{explained}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        at, single = self.at, self.at if self.pays else self.largest
        return {
            "pays": self.pays,
            "text": str(self),
            "router": at.router,
            "budget": at.budget,
            "cost": at.cost,
            "accuracy": at.accuracy,
            "route": single.route,
            "route_cost": single.route_cost,
            "route_accuracy": single.route_accuracy,
            "beside": at.route,
            "difference": at.paired.difference,
            "error": at.paired.error,
            "chance": at.paired.chance,
        }


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def verdict(contests: list[Contest], unit: Unit, images: str) -> Verdict | None:
    """From a router's contests at every budget; none where no router but single routes was there.

    Which contests count is decided by the held-out images alone.
    """
    if not contests:
        return None
    dearest = max(contest.budget for contest in contests)
    return Verdict(
        best=max(contests, key=lambda contest: (contest.expected, -contest.budget)),
        largest=max((c for c in contests if c.budget == dearest), key=lambda contest: contest.expected),
        unit=unit,
        images=images,
    )
