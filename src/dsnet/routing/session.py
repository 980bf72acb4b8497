"""A routed network in use: what has history is kept here, never on the network or the router."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dsnet.errors import DsnetError, DsnetWarning
from dsnet.routing.policies import RoutedOutput
from dsnet.routing.router import Routed, format_cost, parse_budget

__all__ = ["Drift", "Session"]

ENOUGH = 100  # images, before anything is said of drift
SURE = 1e-4  # chance of such a difference where nothing has changed
FAR = 0.05  # share of images that must have changed route for it to matter


@runtime_checkable
class Planned(Protocol):
    """A routed network made ready for a device, as `dsnet.runtime.Plan`."""

    @property
    def routed(self) -> Routed | None:
        """Its parts with a router; none: its gates decide by themselves."""

    def run(self, x: Tensor) -> RoutedOutput:
        """Logits, and the number of the route that gave each."""


def _routed_of(plan: object) -> Routed:
    """What a session counts, of a plan."""
    if not isinstance(plan, Planned):
        raise DsnetError(
            "a session runs a Routed network (`dsnet.load(RUN).routed(budget)`) or a plan of one, "
            f"not a {type(plan).__name__}"
        )
    if plan.routed is None:
        raise DsnetError(
            "this plan has no router, so a session has no costs to count; compile what "
            "dsnet.load(RUN).routed(budget) gives, after `dsnet calibrate RUN`"
        )
    return plan.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How the routes of the last images differ from those of the calibration images."""

    images: int
    distance: float  # share of images at another route than was expected
    chance: float  # of a difference as large where nothing has changed

    @property
    def drifted(self) -> bool:
        """Whether images are no longer like those that the budget was calibrated on."""
        return self.images >= ENOUGH and self.chance < SURE and self.distance > FAR

    def __str__(self) -> str:
        if not self.drifted:
            return f"no drift in the last {self.images} images"
        return (
            f"drift: {self.distance:.0%} of the last {self.images} images take another route than at "
            "calibration; calibrate again on images like these"
        )


class Session:
    """Counts routes and costs of a routed network, watches them drift and, if told so, caps their mean cost.

    With a ``cap`` the mean cost of the last ``window`` images is never above it after a batch, whatever the
    images: routes then depend on what came before. Threads may share a session. A plan made from a routed
    network can be given in its place.

    An image whose logits are not finite has no answer: it is counted in `failed`, its cost is paid, and it is
    left out of `taken` and of drift. A batch with such images warns; ``output.finite`` says which they are.
    """

    def __init__(
        self, routed: Routed | Planned, *, window: int = 1000, cap: float | str | None = None
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= 2**31:
            raise DsnetError(f"a window is a number of images, at least 1, not {window!r}")
        found = routed if isinstance(routed, Routed) else _routed_of(routed)
        self.routed, self.window, self._run = found, window, routed.run
        costs = found.router.costs
        self.cap = None if cap is None else parse_budget(cap, costs)
        least = found.policy.min_cost(found.model)
        if self.cap is not None and self.cap < least:
            unit = costs.unit
            raise DsnetError(
                f"a cap of {format_cost(self.cap, unit)} cannot be kept: an image costs at least "
                f"{format_cost(least, unit)}"
            )
        self._lock = threading.Lock()
        self._recent: deque[tuple[int | None, float]] = deque(maxlen=window)  # (route that answered, cost)
        self._taken: Counter[int] = Counter()
        self._spent = 0.0
        self._failed = 0

    def __call__(self, x: Tensor) -> RoutedOutput:
        """Runs a batch: logits, and the number of the route that gave each."""
        if self.cap is None:
            output = self._run(x)
            with self._lock:
                self._note(output)
            return output
        with self._lock:  # what one batch may cost depends on all before it
            parts = []
            for part in torch.split(x, self.window) if len(x) else (x,):
                parts.append(self.routed.policy(self.routed.model, part, self._allowance(len(part))))
                self._note(parts[-1])
        return RoutedOutput(torch.cat([p.logits for p in parts]), torch.cat([p.routes for p in parts]))

    def _allowance(self, images: int) -> float:
        assert self.cap is not None
        counted = min(len(self._recent) + images, self.window)
        old = list(self._recent)[len(self._recent) - (counted - images) :]
        return self.cap * counted - sum(cost for _, cost in old)

    def _note(self, output: RoutedOutput) -> None:
        routes, finite = output.routes.tolist(), output.finite.tolist()
        prices = {route: self.routed.cost(route) for route in set(routes)}
        for route, answered in zip(routes, finite, strict=True):
            self._recent.append((route if answered else None, prices[route]))
            self._spent += prices[route]
            if answered:
                self._taken[route] += 1
        failed = finite.count(False)
        self._failed += failed
        if failed:
            warnings.warn(
                f"{failed} of {len(routes)} images have no answer: their logits are not finite. "
                "`output.finite` says which; look at these images and at the weights",
                DsnetWarning,
                stacklevel=3,
            )

    # --- what has been seen ----------------------------------------------------------------------------
    @property
    def images(self) -> int:
        """How many images there have been, those without an answer among them."""
        return sum(self._taken.values()) + self._failed

    @property
    def failed(self) -> int:
        """How many images had no answer, because their logits were not finite."""
        return self._failed

    @property
    def route_counts(self) -> dict[int, int]:
        """Route → images that it answered, of all."""
        return dict(sorted(self._taken.items()))

    @property
    def mean_cost(self) -> float:
        """Of all images."""
        return self._spent / max(self.images, 1)

    @property
    def recent_cost(self) -> float:
        """Of the last window."""
        with self._lock:
            return sum(cost for _, cost in self._recent) / max(len(self._recent), 1)

    def drift(self) -> Drift | None:
        """The last window against the calibration images.

        None where nothing says what to expect: without a budget, or with a cap, which changes routes itself.
        """
        expected = {} if self.cap is not None else self._expected()
        if not expected:
            return None
        with self._lock:
            live = Counter(route for route, _ in self._recent if route is not None)
        routes = sorted({*expected, *live})
        seen = torch.tensor([live[route] for route in routes], dtype=torch.float64)
        known = torch.tensor([expected.get(route, 0) for route in routes], dtype=torch.float64)
        n, m = float(seen.sum()), float(known.sum())
        if n == 0 or len(routes) < 2:
            return Drift(images=int(n), distance=0.0, chance=1.0)
        distance = float((seen / n - known / m).abs().sum() / 2)
        # Pearson's test that two histograms come from the same distribution.
        statistic = (((m / n) ** 0.5 * seen - (n / m) ** 0.5 * known).square() / (seen + known)).sum()
        degrees = torch.tensor((len(routes) - 1) / 2, dtype=torch.float64)
        chance = float(torch.special.gammaincc(degrees, statistic / 2))
        return Drift(images=int(n), distance=distance, chance=chance)

    def _expected(self) -> dict[int, int]:
        budget = self.routed.budget
        return {} if budget is None else dict(self.routed.router.point(float(budget)).route_counts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types), for logs."""
        drift = self.drift()
        return {
            "images": self.images,
            "failed": self.failed,
            "mean_cost": self.mean_cost,
            "recent_cost": self.recent_cost,
            "taken": {str(route): count for route, count in self.route_counts.items()},
            "drift": None if drift is None else {"distance": drift.distance, "chance": drift.chance},
            "drifted": bool(drift and drift.drifted),
        }
