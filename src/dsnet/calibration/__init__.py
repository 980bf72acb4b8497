"""Calibration: from held-out images to routers that keep a budget."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsnet.calibration.calibration import Calibration, calibrate, load_routed
    from dsnet.calibration.search import calibrate_cascade, calibrate_gate
    from dsnet.routing.route_outputs import RouteOutputs, collect, simulate

__all__ = [
    "Calibration",
    "RouteOutputs",
    "calibrate",
    "calibrate_cascade",
    "calibrate_gate",
    "collect",
    "load_routed",
    "simulate",
]

# Imported on first use, so that command-line help needs no torch.
_LAZY = {
    "Calibration": "dsnet.calibration.calibration",
    "calibrate": "dsnet.calibration.calibration",
    "load_routed": "dsnet.calibration.calibration",
    "RouteOutputs": "dsnet.routing.route_outputs",
    "collect": "dsnet.routing.route_outputs",
    "simulate": "dsnet.routing.route_outputs",
    "calibrate_cascade": "dsnet.calibration.search",
    "calibrate_gate": "dsnet.calibration.search",
}


if not TYPE_CHECKING:  # type checkers read the imports above instead

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
