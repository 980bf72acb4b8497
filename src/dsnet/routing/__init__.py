"""Stage II and what it leads to: routers that send easy images down cheap routes, within a budget."""

from dsnet.routing.calibration import Calibration, calibrate, load_routed
from dsnet.routing.config import GateConfig
from dsnet.routing.costs import CostTable
from dsnet.routing.curves import calibrate_cascade, calibrate_gate
from dsnet.routing.latency import LatencyTable
from dsnet.routing.outputs import Outputs, collect, simulate
from dsnet.routing.profiling import profile
from dsnet.routing.router import Point, Routed, Router, parse_budget
from dsnet.routing.rules import CascadeRule, GateRule, RoutedOutput
from dsnet.routing.run import GateOutcome, open_trained, train_gate

__all__ = [
    "Calibration",
    "CascadeRule",
    "CostTable",
    "GateConfig",
    "GateOutcome",
    "GateRule",
    "LatencyTable",
    "Outputs",
    "Point",
    "Routed",
    "RoutedOutput",
    "Router",
    "calibrate",
    "calibrate_cascade",
    "calibrate_gate",
    "collect",
    "load_routed",
    "open_trained",
    "parse_budget",
    "profile",
    "simulate",
    "train_gate",
]
