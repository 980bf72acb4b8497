"""Mixes of routes that a benchmark runs: uniform, given, or as measured with a calibrated router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dsnet.calibration.calibration import Calibration
from dsnet.core.formats import MIX
from dsnet.core.schema import read_json
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.routing.router import format_cost, parse_budget
from dsnet.runtime.forced_routes import normalized_shares

__all__ = ["Cascade", "Mix", "gated_routes", "measured_mix", "mix_of", "read_mix"]

MAX_ROUTES = 32  # of a uniform mix; a larger space is sampled
CASCADE_SHARE = 0.2  # of the images go on from the smallest route to the largest, unless measured


@dataclass(frozen=True, slots=True)
class Cascade:
    """Routes that run one after the other, and the share of all images that runs each (1 for the first)."""

    routes: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def final_shares(self) -> dict[int, float]:
        """The share of images that ends at each position in ``routes``."""
        following = (*self.shares[1:], 0.0)
        return {step: a - b for step, (a, b) in enumerate(zip(self.shares, following, strict=True))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The routes of a benchmark's images.

    Attributes:
        shares: The share of the images at each route; they add up to 1.
        cascade: The cascade to time.
        source: Where the shares come from, in words.
    """

    shares: Mapping[int, float]
    cascade: Cascade
    source: str


def mix_of(model: Supernet, mix: str | Mapping[int, float] | Mix) -> Mix:
    """Return the mix that ``mix`` describes, with a cascade from the smallest route to the largest.

    Args:
        model: The network.
        mix: ``uniform`` for equal shares of the routes that the gates decide for, or of 32 of them, always
            the same, if there are more; or shares by route, which are scaled to add up to 1; or a mix.

    Raises:
        DsnetError: If the shares are invalid, or the gates do not decide for one of the routes.
    """
    if isinstance(mix, Mix):
        return mix
    routes = gated_routes(model)
    if not isinstance(mix, str):
        for number in mix:
            if model.space.resolve(number).number not in routes:
                gates = "gate does" if len(model.gates) == 1 else "gates do"
                possible = ", ".join(map(str, routes[:MAX_ROUTES]))
                more = ", …" if len(routes) > MAX_ROUTES else ""
                raise DsnetError(f"the {gates} not decide for route {number}; possible: {possible}{more}")
        return Mix(shares=normalized_shares(mix), cascade=_default_cascade(model), source="as given")
    if mix != "uniform":
        raise DsnetError(f"unknown mix {shorten(mix)}; possible: uniform, or shares by route")
    source = "uniform"
    if len(routes) > MAX_ROUTES:
        source = f"uniform over {MAX_ROUTES} of {len(routes)} routes, sampled"
        order = torch.randperm(len(routes), generator=torch.Generator().manual_seed(0)).tolist()
        routes = sorted(routes[index] for index in order[:MAX_ROUTES])
    shares = dict.fromkeys(routes, 1 / len(routes))
    return Mix(shares=shares, cascade=_default_cascade(model), source=source)


def read_mix(path: Path) -> dict[int, float]:
    """Read shares by route from a JSON file such as ``{"0": 0.7, "13": 0.3}``."""
    missing = f"--mix {path} cannot be read: there is no such file; or give uniform or measured"
    return {int(route): float(share) for route, share in read_json(path, MIX, missing=missing).items()}


def measured_mix(model: Supernet, calibration: Calibration, budget: str | float, router: str = "auto") -> Mix:
    """Return the shares of routes that a calibrated router chose for the calibration images at a budget.

    If the router is a cascade, that cascade is timed, and the shares are those of the routes at which images
    end.

    Raises:
        DsnetError: If the budget is out of reach, or the calibration has no counts of routes.
    """
    cost = parse_budget(budget, calibration.costs)
    chosen = calibration.router(router, cost)
    point = chosen.point(cost)
    counts = dict(point.route_counts)
    images = sum(counts.values())
    if not images:
        raise DsnetError("this calibration has no counts of routes; run `dsnet calibrate` again")
    shares = {model.space.resolve(route).number: count / images for route, count in sorted(counts.items())}
    cascade = _default_cascade(model)
    if chosen.kind == "cascade":
        reaching = [sum(counts.get(r, 0) for r in point.routes[i:]) for i in range(len(point.routes))]
        steps = [
            (route, count / images) for route, count in zip(point.routes, reaching, strict=True) if count
        ]
        cascade = Cascade(*zip(*steps, strict=True))
    at = format_cost(cost, calibration.costs.unit)
    source = f"as chosen by its {chosen.kind} at {at} for {images} calibration images"
    return Mix(shares=shares, cascade=cascade, source=source)


def _default_cascade(model: Supernet) -> Cascade:
    ends = (model.space.smallest.number, model.space.largest.number)
    return Cascade(ends, (1.0, CASCADE_SHARE)) if ends[0] != ends[1] else Cascade(ends[:1], (1.0,))


def gated_routes(model: Supernet) -> list[int]:
    """Return the numbers of the routes that the gates decide for, smallest first."""
    options = [set(model.gate(stage).choices) for stage in range(len(model.gates))]
    return [
        route.number
        for route in model.space
        if all(choice in possible for choice, possible in zip(route.choices, options, strict=True))
    ]
