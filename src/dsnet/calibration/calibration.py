"""Routers calibrated on held-out images: kept with a checkpoint, asked for any budget afterwards."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from dsnet.calibration.route_outputs import RouteOutputs, simulate
from dsnet.calibration.search import calibrate_cascade, calibrate_gate, calibrate_single
from dsnet.core.checkpoint import Checkpoint
from dsnet.core.device import pick_device
from dsnet.core.formats import ROUTING
from dsnet.core.schema import check
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.models.loading import build_network, load_classifier
from dsnet.routing.cost_table import CostTable
from dsnet.routing.router import OperatingPoint, Routed, Router, RouterKind, format_cost, parse_budget

__all__ = ["Calibration", "Pick", "RouterName", "calibrate", "has_trained_gates", "load_routed"]

RouterName = Literal["auto", "gate", "cascade", "single"]
FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A router for a budget, and how much better it was than the next best one."""

    kind: RouterKind
    gain: float | None  # accuracy on the calibration images; none where there is no other that keeps it


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Routers whose settings were found on the same images."""

    images: int
    digest: str  # of the images and labels
    routers: Mapping[RouterKind, Router]
    singles: Mapping[int, float]  # accuracy of every route by itself, by number

    @property
    def costs(self) -> CostTable:
        """What all routers count."""
        return next(iter(self.routers.values())).costs

    def budget_range(self, name: RouterName = "auto") -> tuple[float, float]:
        """The least and the largest mean cost that can be kept."""
        curves = [r.curve for kind, r in self.routers.items() if name in ("auto", kind)]
        return min(c[0].cost for c in curves), max(c[-1].cost for c in curves)

    def pick(self, budget: float, kinds: Collection[RouterKind] | None = None) -> Pick:
        """The router, of all or of some kinds, that was most accurate at this budget.

        Of equals one route for all images, which needs no router.
        """
        found = {
            kind: r.point(budget).accuracy
            for kind, r in sorted(self.routers.items(), key=lambda item: item[0] != "single")
            if r.keeps(budget) and (kinds is None or kind in kinds)
        }
        if not found:
            low, high = self.budget_range()
            unit = self.costs.unit
            raise DsnetError(
                f"a mean cost of {format_cost(budget, unit)} is out of reach: the routers go from "
                f"{format_cost(low, unit)} to {format_cost(high, unit)}"
            )
        best = max(found, key=lambda kind: round(self.images * found[kind]))  # the first of equals
        others = [accuracy for kind, accuracy in found.items() if kind != best]
        return Pick(kind=best, gain=found[best] - max(others) if others else None)

    def router(self, name: RouterName, budget: float | None = None) -> Router:
        """The router of that name; ``auto``: the most accurate one at the budget."""
        if name not in get_args(RouterName):
            raise DsnetError(f"unknown router {shorten(name)}; possible: {', '.join(get_args(RouterName))}")
        if name == "auto":
            if budget is None:
                raise DsnetError("router auto needs a budget: it picks the most accurate one there")
            name = self.pick(budget).kind
        if name not in self.routers:
            raise DsnetError(f"there is no {name} here; calibrated: {', '.join(self.routers)}")
        return self.routers[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        return {
            "format": FORMAT,
            "images": self.images,
            "digest": self.digest,
            "routers": {kind: router.to_dict() for kind, router in self.routers.items()},
            "singles": {str(number): accuracy for number, accuracy in self.singles.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """The calibration that `to_dict` wrote."""
        if isinstance(data, Mapping) and data.get("format", FORMAT) != FORMAT:
            given = shorten(data["format"])
            raise DsnetError(f"calibration format {given}; this version reads {FORMAT}")
        check(ROUTING, data, "the calibration")
        try:
            routers = {kind: Router.from_dict(router) for kind, router in data["routers"].items()}
            if any(kind != router.kind for kind, router in routers.items()):
                raise DsnetError(f"a calibration's routers are called what they are, not {list(routers)}")
            singles = {int(number): float(accuracy) for number, accuracy in data["singles"].items()}
            if not all(map(math.isfinite, singles.values())):
                raise DsnetError("the accuracies of a calibration's routes are numbers")
            return cls(images=data["images"], digest=data["digest"], routers=routers, singles=singles)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, DsnetError):
                raise
            raise DsnetError(f"the calibration is damaged ({error!r})") from error

    @classmethod
    def of(cls, saved: Checkpoint, where: str | Path) -> Calibration:
        """The calibration that a checkpoint holds; ``where`` as `dsnet calibrate` takes it."""
        alone = saved.data.get("route")
        if alone is not None:
            raise DsnetError(f"{where} was trained at route {alone} alone: there is nothing to choose")
        data = saved.data.get("routing")
        if data is None:
            raise DsnetError(f"{where} is not calibrated; run `dsnet calibrate {where}` first")
        try:
            made = cls.from_dict(data)
            _check_choices(made, saved)
            return made._with_single(saved.data["network"]["space"]["routes"])
        except (DsnetError, KeyError, TypeError) as error:
            raise DsnetError(f"{where}: {error}; `dsnet calibrate {where}` makes it anew") from error

    def _with_single(self, routes: Sequence[Mapping[str, Any]]) -> Calibration:
        """With a router of single routes, which calibrations of earlier versions lack."""
        if "single" in self.routers:
            return self
        choices = {route["number"]: tuple(route["choices"]) for route in routes}
        points = [
            OperatingPoint(
                cost=self.costs.of(choices[number]),
                accuracy=accuracy,
                routes=(number,),
                route_counts=((number, self.images),),
            )
            for number, accuracy in self.singles.items()
        ]
        points.sort(key=lambda point: (point.cost, point.accuracy))
        single = Router(kind="single", costs=self.costs, curve=tuple(points))
        return replace(self, routers={**self.routers, "single": single}) if points else self


def _check_choices(calibration: Calibration, saved: Checkpoint) -> None:
    """Raises where a router counts the costs of other choices than the checkpoint's network has."""
    choices = zip(*(route["choices"] for route in saved.data["network"]["space"]["routes"]), strict=True)
    expected = [len(set(gate)) for gate in choices]
    for kind, router in calibration.routers.items():
        given = [len(gate[0]) for gate in router.costs.segments]
        if given != expected:
            raise DsnetError(f"routers.{kind}.costs has {given} choices at the gates, expected {expected}")


def has_trained_gates(saved: Checkpoint) -> bool:
    """Whether the gates of a checkpoint learnt to decide: in Stage II, or together with the weights."""
    recipe = saved.data.get("recipe")
    scheme = recipe.get("scheme", {}) if isinstance(recipe, dict) else {}
    return "gate" in saved.data or scheme.get("joint") is not None


def calibrate(outputs: RouteOutputs, costs: CostTable, *, gate: bool = True) -> Calibration:
    """All settings of single routes, cascade and trained gates, with the routes that each would take."""
    made = [calibrate_cascade(outputs, costs), calibrate_single(outputs, costs)]
    if gate:
        made.insert(0, calibrate_gate(outputs, costs))
    routers = {router.kind: _with_histograms(router, outputs) for router in made}
    singles = {point.routes[0]: point.accuracy for point in made[-1].curve}
    return Calibration(images=len(outputs), digest=outputs.digest, routers=routers, singles=singles)


def _with_histograms(router: Router, outputs: RouteOutputs) -> Router:
    points = []
    for point in router.curve:
        counts = np.bincount(simulate(router.policy_at(point), outputs).columns.numpy()).tolist()
        taken = tuple((outputs.routes[c].number, n) for c, n in enumerate(counts) if n)
        points.append(replace(point, route_counts=taken))
    return replace(router, curve=tuple(points))


def load_routed(
    run: str | Path,
    budget: float | str | None = None,
    *,
    router: RouterName = "auto",
    name: str | None = None,
    device: torch.device | str = "cpu",
) -> Routed:
    """The network of a calibrated run, routed within a budget (``"300M"``, ``"45%"``, or a number)."""
    saved = load_classifier(run, name)
    calibration = Calibration.of(saved, run if name is None else f"{run} --name {name}")
    model: Supernet = build_network(saved).to(pick_device(str(device)))
    number = None if budget is None else parse_budget(budget, calibration.costs)
    return Routed(model, calibration.router(router, number), number)
