"""Stage II and what it leads to: routers that send easy images down cheap routes, within a budget."""

from dsnet.routing.costs import CostTable
from dsnet.routing.curves import calibrate_cascade, calibrate_gate
from dsnet.routing.outputs import Outputs, collect, simulate
from dsnet.routing.router import Point, Routed, Router, parse_budget
from dsnet.routing.rules import CascadeRule, GateRule, RoutedOutput

__all__ = [
    "CascadeRule",
    "CostTable",
    "GateRule",
    "Outputs",
    "Point",
    "Routed",
    "RoutedOutput",
    "Router",
    "calibrate_cascade",
    "calibrate_gate",
    "collect",
    "parse_budget",
    "simulate",
]
