"""Routing: policies that choose a route for every image, and routers that keep a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsnet.core.lazy import lazy_imports

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
else:
    __getattr__, __dir__ = lazy_imports(__name__)

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
