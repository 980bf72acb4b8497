"""Routing: policies that choose a route for every image, and routers that keep a budget."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsnet.models.group_by_route import Routable
    from dsnet.routing.cost_table import CostTable
    from dsnet.routing.latency import LatencyTable
    from dsnet.routing.policies import (
        CascadePolicy,
        GatePolicy,
        OperatingPoint,
        Policy,
        RoutedOutput,
        list_routers,
        register_router,
        run_gated_routes,
    )
    from dsnet.routing.route_outputs import RouteOutputs
    from dsnet.routing.router import Routed, Router, parse_budget
    from dsnet.routing.session import Drift, Session

__all__ = [
    "CascadePolicy",
    "CostTable",
    "Drift",
    "GatePolicy",
    "LatencyTable",
    "OperatingPoint",
    "Policy",
    "Routable",
    "RouteOutputs",
    "Routed",
    "RoutedOutput",
    "Router",
    "Session",
    "list_routers",
    "parse_budget",
    "register_router",
    "run_gated_routes",
]

# Imported on first use, so that command-line help needs no torch.
_LAZY = {
    "CostTable": "dsnet.routing.cost_table",
    "LatencyTable": "dsnet.routing.latency",
    "CascadePolicy": "dsnet.routing.policies",
    "GatePolicy": "dsnet.routing.policies",
    "OperatingPoint": "dsnet.routing.policies",
    "Policy": "dsnet.routing.policies",
    "RoutedOutput": "dsnet.routing.policies",
    "list_routers": "dsnet.routing.policies",
    "register_router": "dsnet.routing.policies",
    "run_gated_routes": "dsnet.routing.policies",
    "Routable": "dsnet.models.group_by_route",
    "RouteOutputs": "dsnet.routing.route_outputs",
    "Routed": "dsnet.routing.router",
    "Router": "dsnet.routing.router",
    "parse_budget": "dsnet.routing.router",
    "Drift": "dsnet.routing.session",
    "Session": "dsnet.routing.session",
}


if not TYPE_CHECKING:  # type checkers read the imports above instead

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
