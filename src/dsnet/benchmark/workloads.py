"""Mixes of routes that a benchmark runs: even, given, or as a calibrated router takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from dsnet.calibration.calibration import Calibration
from dsnet.core.formats import MIX
from dsnet.core.schema import read_json
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.routing.router import format_cost, parse_budget
from dsnet.runtime.forced_routes import adding_up

__all__ = ["Cascade", "Mix", "decided_routes", "measured_mix", "mix_of", "read_mix", "shares_of"]

MOST = 32  # routes of an even mix; of more, so many are drawn
CASCADE_SHARE = 0.2  # of the images that go on from the smallest route to the largest, unless measured


class Cascade(NamedTuple):
    """Routes that run one after the other, and the share of all images that runs each."""

    routes: tuple[int, ...]
    shares: tuple[float, ...]  # 1 for the first

    @property
    def answered(self) -> dict[int, float]:
        """The share of images that each route answers, by its place."""
        following = (*self.shares[1:], 0.0)
        return {place: a - b for place, (a, b) in enumerate(zip(self.shares, following, strict=True))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What the images of a benchmark take."""

    shares: Mapping[int, float]  # by route; they add up to 1
    cascade: Cascade
    source: str  # where they are from, in words


def mix_of(model: Supernet, mix: str | Mapping[int, float] | Mix) -> Mix:
    """``uniform``, or shares by route, as a mix; with a cascade from the smallest route to the largest."""
    if isinstance(mix, Mix):
        return mix
    source = "as given"
    if isinstance(mix, str):
        decided = len(decided_routes(model))
        source = f"uniform over {MOST} of {decided} routes, drawn" if decided > MOST else "uniform"
    return Mix(shares=shares_of(model, mix), cascade=_fixed_cascade(model), source=source)


def read_mix(path: Path) -> dict[int, float]:
    """Shares by route from a JSON file, as ``{"0": 0.7, "13": 0.3}``."""
    missing = f"--mix {path} cannot be read: there is no such file; or give uniform or measured"
    return {int(route): float(share) for route, share in read_json(path, MIX, missing=missing).items()}


def measured_mix(model: Supernet, calibration: Calibration, budget: str | float, router: str = "auto") -> Mix:
    """What the router takes at this budget on the images that it was calibrated on.

    Where it is a cascade, that cascade; the shares are then those of the routes that answer.
    """
    cost = parse_budget(budget, calibration.costs)
    chosen = calibration.router(router, cost)
    point = chosen.point(cost)
    images = sum(count for _, count in point.route_counts)
    if not images:
        raise DsnetError("this calibration does not say which routes are taken; `dsnet calibrate` it anew")
    shares = {
        model.space.resolve(route).number: count / images for route, count in sorted(point.route_counts)
    }
    cascade = _fixed_cascade(model)
    if chosen.kind == "cascade":
        counts = dict(point.route_counts)
        beyond = [sum(counts.get(r, 0) for r in point.routes[i:]) for i in range(len(point.routes))]
        run = [(route, count / images) for route, count in zip(point.routes, beyond, strict=True) if count]
        cascade = Cascade(tuple(route for route, _ in run), tuple(share for _, share in run))
    at = format_cost(cost, calibration.costs.unit)
    source = f"as its {chosen.kind} takes them at {at}, on {images} calibration images"
    return Mix(shares=shares, cascade=cascade, source=source)


def _fixed_cascade(model: Supernet) -> Cascade:
    ends = (model.space.smallest.number, model.space.largest.number)
    return Cascade(ends, (1.0, CASCADE_SHARE)) if ends[0] != ends[1] else Cascade(ends[:1], (1.0,))


def shares_of(model: Supernet, mix: str | Mapping[int, float]) -> dict[int, float]:
    """Shares by route: ``uniform`` over what the gates decide between, or as given, made to add up to 1.

    Of more than 32 routes an even mix takes 32, drawn always alike.
    """
    decided = decided_routes(model)
    if isinstance(mix, str):
        if mix != "uniform":
            raise DsnetError(f"unknown mix {shorten(mix)}; possible: uniform, or shares by route")
        if len(decided) > MOST:
            order = torch.randperm(len(decided), generator=torch.Generator().manual_seed(0)).tolist()
            decided = sorted(decided[place] for place in order[:MOST])
        return dict.fromkeys(decided, 1 / len(decided))
    for number in mix:
        if model.space.resolve(number).number not in decided:
            whose = "gate does" if len(model.gates) == 1 else "gates do"
            has = ", ".join(map(str, decided[:MOST])) + (", …" if len(decided) > MOST else "")
            raise DsnetError(f"the {whose} not decide for route {number}; possible: {has}")
    return adding_up(mix)


def decided_routes(model: Supernet) -> list[int]:
    """The routes whose choices the gates have."""
    options = [set(model.gate(stage).choices) for stage in range(len(model.gates))]
    return [
        route.number
        for route in model.space
        if all(choice in own for choice, own in zip(route.choices, options, strict=True))
    ]
