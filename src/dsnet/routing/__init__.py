"""Stage II and what it leads to: routers that send easy images down cheap routes, within a budget."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

# Imported when they are asked for, so that the settings of a gate can be listed without torch.
_LAZY = {
    "Calibration": "dsnet.routing.calibration",
    "calibrate": "dsnet.routing.calibration",
    "load_routed": "dsnet.routing.calibration",
    "GateConfig": "dsnet.routing.config",
    "CostTable": "dsnet.routing.costs",
    "calibrate_cascade": "dsnet.routing.curves",
    "calibrate_gate": "dsnet.routing.curves",
    "LatencyTable": "dsnet.routing.latency",
    "Outputs": "dsnet.routing.outputs",
    "collect": "dsnet.routing.outputs",
    "simulate": "dsnet.routing.outputs",
    "profile": "dsnet.routing.profiling",
    "Point": "dsnet.routing.router",
    "Routed": "dsnet.routing.router",
    "Router": "dsnet.routing.router",
    "parse_budget": "dsnet.routing.router",
    "CascadeRule": "dsnet.routing.rules",
    "GateRule": "dsnet.routing.rules",
    "RoutedOutput": "dsnet.routing.rules",
    "GateOutcome": "dsnet.routing.run",
    "open_trained": "dsnet.routing.run",
    "train_gate": "dsnet.routing.run",
}


if not TYPE_CHECKING:  # type checkers read the imports above instead

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
