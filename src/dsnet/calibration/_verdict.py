"""Whether routing pays: a router compared with the best single route, both chosen on held-out images.

Both are evaluated on the same images. Routing pays where the router is correct on significantly more images:
a sign test over the images on which exactly one of the two is correct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsnet.routing.cost_table import Unit
from dsnet.routing.router import format_cost

__all__ = ["PairedTest", "RouterComparison", "Verdict", "verdict"]

SIGNIFICANCE = 0.025  # level of the one-sided sign test: about two standard errors
EXACT = 1000  # images that only one side gets right, up to which the sign test is exact


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two classifiers on the same images."""

    images: int
    wins: int  # images on which only the first is correct
    losses: int  # images on which only the second is correct

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> PairedTest:
        """Return the test of two tensors [N] that say where each classifier is correct."""
        return cls(images=len(first), wins=int((first & ~second).sum()), losses=int((second & ~first).sum()))

    @property
    def difference(self) -> float:
        """Accuracy of the first minus that of the second."""
        return (self.wins - self.losses) / self.images

    @property
    def standard_error(self) -> float:
        """Standard error of the difference, which is a mean over paired images."""
        if self.images < 2:
            return 0.0
        squares = (self.wins + self.losses) / self.images - self.difference**2
        return math.sqrt(max(squares, 0.0) / (self.images - 1))

    @property
    def p_value(self) -> float:
        """Probability of at least as many wins where neither is better."""
        decided = self.wins + self.losses
        if decided > EXACT:
            return 0.5 * math.erfc((self.wins - decided / 2 - 0.5) / math.sqrt(decided / 2))
        return sum(math.comb(decided, k) for k in range(self.wins, decided + 1)) / (1 << decided)

    @property
    def significant(self) -> bool:
        """Whether the first is better by more than chance explains."""
        return self.wins > self.losses and self.p_value < SIGNIFICANCE

    def __str__(self) -> str:
        return f"{100 * self.difference:+.2f} ± {100 * self.standard_error:.2f} points"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterComparison:
    """A router and the best single route within the same budget, chosen on held-out images."""

    router: str
    budget: float
    cost: float  # mean of an image, on the evaluated images
    accuracy: float
    expected_gain: float  # accuracy above the single route's on the held-out images
    route: int
    route_cost: float
    route_accuracy: float
    paired: PairedTest


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether and where routing pays, or which single route to use."""

    best: RouterComparison  # where held-out images favour routing most
    largest: RouterComparison  # at the largest budget
    unit: Unit
    images: str  # the evaluated images in words: test images

    @property
    def deciding(self) -> RouterComparison:
        """The first comparison that the router wins, else the one where it was favoured most."""
        best_pays, largest_pays = self.best.paired.significant, self.largest.paired.significant
        return self.largest if largest_pays and not best_pays else self.best

    @property
    def pays(self) -> bool:
        """Whether the router is significantly better than the single route."""
        return self.deciding.paired.significant

    @property
    def route(self) -> int:
        """The single route to use where routing does not pay: the best within the largest budget."""
        return self.largest.route

    def __str__(self) -> str:
        row, use, unit = self.deciding, self.largest, self.unit
        cost = format_cost(row.cost, unit)
        routed = f"within {format_cost(row.budget, unit)} the {row.router} gets {_percent(row.accuracy)}"
        if self.pays:
            single = f"{_percent(row.route_accuracy)} at {format_cost(row.route_cost, unit)}"
            return (
                f"Routing pays here: {routed} of the {self.images} right at a mean of {cost}, {row.paired} "
                f"above route {row.route} for all images ({single}), the best single route within that "
                "budget on held-out images."
            )
        than = "it" if row.route == use.route else f"route {row.route}"
        explained = ", no more than chance explains" if row.paired.difference > 0 else ""
        return (
            f"Routing does not pay here: use route {use.route} for all images (--route {use.route}), "
            f"{_percent(use.route_accuracy)} of the {self.images} right at "
            f"{format_cost(use.route_cost, unit)}; {routed} at a mean of {cost}, {row.paired} against "
            f"{than}{explained}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types)."""
        row, single = self.deciding, self.deciding if self.pays else self.largest
        return {
            "pays": self.pays,
            "text": str(self),
            "router": row.router,
            "budget": row.budget,
            "cost": row.cost,
            "accuracy": row.accuracy,
            "route": single.route,
            "route_cost": single.route_cost,
            "route_accuracy": single.route_accuracy,
            "beside": row.route,
            "difference": row.paired.difference,
            "error": row.paired.standard_error,
            "chance": row.paired.p_value,
        }


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def verdict(comparisons: Sequence[RouterComparison], unit: Unit, images: str) -> Verdict | None:
    """Return the verdict on comparisons at several budgets; None if there are none.

    Held-out images alone decide which comparisons count.
    """
    if not comparisons:
        return None
    highest = max(row.budget for row in comparisons)
    return Verdict(
        best=max(comparisons, key=lambda row: (row.expected_gain, -row.budget)),
        largest=max((row for row in comparisons if row.budget == highest), key=lambda row: row.expected_gain),
        unit=unit,
        images=images,
    )
