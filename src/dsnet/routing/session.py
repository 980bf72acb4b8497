"""Sessions: what a routed network has run. All state is here, none on the network or the router."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dsnet.errors import DsnetError, DsnetWarning
from dsnet.routing.policies import RoutedOutput
from dsnet.routing.router import Routed, format_cost, parse_budget

__all__ = ["Drift", "Session"]

MIN_IMAGES = 100  # below, nothing is said of drift
SIGNIFICANCE = 1e-4  # probability of such a difference where nothing has changed
MIN_DISTANCE = 0.05  # share of images that must have changed route for it to matter


class RoutedPlan(Protocol):
    """A plan of a routed network, as `dsnet.runtime.Plan`, which this package does not import."""

    @property
    def routed(self) -> Routed | None:
        """Its network with a router; None if it has no router."""

    def run(self, x: Tensor) -> RoutedOutput:
        """Return logits, and the number of the route that gave each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How the routes of the last images differ from those of the calibration images."""

    images: int
    distance: float  # share of images at another route than expected
    chance: float  # probability of a difference as large where nothing has changed

    @property
    def drifted(self) -> bool:
        """Whether images are no longer like those that the budget was calibrated on."""
        return self.images >= MIN_IMAGES and self.chance < SIGNIFICANCE and self.distance > MIN_DISTANCE

    def __str__(self) -> str:
        if not self.drifted:
            return f"no drift in the last {self.images} images"
        return (
            f"drift: {self.distance:.0%} of the last {self.images} images take another route than at "
            "calibration; calibrate again on images like these"
        )


class Session:
    """Run a routed network; count its routes and costs, detect drift and, optionally, cap the mean cost.

    With a ``cap`` the mean cost of the last ``window`` images is never above it after a batch, whatever the
    images: routes then depend on earlier images. Threads may share a session.

    An image whose logits are not finite has no answer: it is counted in `failed`, its cost is counted, and it
    is left out of `route_counts` and of drift. A batch with such images warns; ``output.finite`` tells which.

    Args:
        routed: A routed network, or a plan of one.
        window: Number of images that the cap and drift look back on.
        cap: Maximum mean cost, as `parse_budget` takes it (default: none).

    Raises:
        DsnetError: If the window is not a positive number, the plan has no router, or the cap is below the
            cost of the cheapest route.
    """

    def __init__(
        self, routed: Routed | RoutedPlan, *, window: int = 1000, cap: float | str | None = None
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= 2**31:
            raise DsnetError(f"a window is a number of images, at least 1, not {window!r}")
        network = routed if isinstance(routed, Routed) else getattr(routed, "routed", routed)
        if not isinstance(network, Routed):
            given = "a plan with no router" if network is None else f"a {type(routed).__name__}"
            raise DsnetError(
                "a session runs a Routed network (`dsnet.load(RUN).routed(budget)`, after `dsnet calibrate "
                f"RUN`) or a plan of one, not {given}"
            )
        self.routed, self.window, self._run = network, window, routed.run
        costs = network.router.costs
        self.cap = None if cap is None else parse_budget(cap, costs)
        lowest = network.policy.min_cost(network.model)
        if self.cap is not None and self.cap < lowest:
            raise DsnetError(
                f"a cap of {format_cost(self.cap, costs.unit)} cannot be kept: an image costs at least "
                f"{format_cost(lowest, costs.unit)}"
            )
        self._lock = threading.Lock()
        self._recent: deque[tuple[int | None, float]] = deque(maxlen=window)  # (route that answered, cost)
        self._route_counts: Counter[int] = Counter()
        self._total_cost = 0.0
        self._failed = 0

    def __call__(self, x: Tensor) -> RoutedOutput:
        """Run a batch [B, C, H, W]; return logits, and the number of the route that gave each."""
        if self.cap is None:
            output = self._run(x)
            with self._lock:
                self._count(output)
            return output
        with self._lock:  # what a batch may cost depends on all before it
            parts = []
            for part in torch.split(x, self.window) if len(x) else (x,):
                parts.append(
                    self.routed.policy(self.routed.model, part, self._allowance(self.cap, len(part)))
                )
                self._count(parts[-1])
        return RoutedOutput(torch.cat([p.logits for p in parts]), torch.cat([p.routes for p in parts]))

    def _allowance(self, cap: float, images: int) -> float:
        """Return what the next images may cost together."""
        counted = min(len(self._recent) + images, self.window)
        earlier = list(self._recent)[len(self._recent) - (counted - images) :]
        return cap * counted - sum(cost for _, cost in earlier)

    def _count(self, output: RoutedOutput) -> None:
        routes, finite = output.routes.tolist(), output.finite.tolist()
        costs = {route: self.routed.cost(route) for route in set(routes)}
        for route, answered in zip(routes, finite, strict=True):
            self._recent.append((route if answered else None, costs[route]))
            self._total_cost += costs[route]
            self._route_counts[route] += answered
        failed = finite.count(False)
        self._failed += failed
        if failed:
            warnings.warn(
                f"{failed} of {len(routes)} images have no answer: their logits are not finite. "
                "`output.finite` says which; look at these images and at the weights",
                DsnetWarning,
                stacklevel=3,
            )

    @property
    def images(self) -> int:
        """Number of all images, including those without an answer."""
        return sum(self._route_counts.values()) + self._failed

    @property
    def failed(self) -> int:
        """Number of images without an answer, because their logits were not finite."""
        return self._failed

    @property
    def route_counts(self) -> dict[int, int]:
        """Number of images by the route that answered them."""
        return {route: count for route, count in sorted(self._route_counts.items()) if count}

    @property
    def mean_cost(self) -> float:
        """Mean cost of all images."""
        return self._total_cost / max(self.images, 1)

    @property
    def recent_cost(self) -> float:
        """Mean cost of the last ``window`` images."""
        with self._lock:
            return sum(cost for _, cost in self._recent) / max(len(self._recent), 1)

    def drift(self) -> Drift | None:
        """Compare the last ``window`` images with the calibration images.

        None if nothing says what to expect: without a budget, or with a cap, which changes routes itself.
        """
        budget = self.routed.budget
        if budget is None or self.cap is not None:
            return None
        expected = dict(self.routed.router.point(float(budget)).route_counts)
        if not expected:
            return None
        with self._lock:
            live = Counter(route for route, _ in self._recent if route is not None)
        routes = sorted({*expected, *live})
        observed = torch.tensor([live[route] for route in routes], dtype=torch.float64)
        calibrated = torch.tensor([expected.get(route, 0) for route in routes], dtype=torch.float64)
        n, m = float(observed.sum()), float(calibrated.sum())
        if n == 0 or len(routes) < 2:
            return Drift(images=int(n), distance=0.0, chance=1.0)
        distance = float((observed / n - calibrated / m).abs().sum() / 2)
        # Pearson's test that two histograms come from the same distribution.
        statistic = (
            ((m / n) ** 0.5 * observed - (n / m) ** 0.5 * calibrated).square() / (observed + calibrated)
        ).sum()
        degrees = torch.tensor((len(routes) - 1) / 2, dtype=torch.float64)
        chance = float(torch.special.gammaincc(degrees, statistic / 2))
        return Drift(images=int(n), distance=distance, chance=chance)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types), for logs."""
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
