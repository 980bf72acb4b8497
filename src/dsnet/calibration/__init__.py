"""Calibration: from held-out images to routers that keep a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsnet.core.lazy import lazy_imports

if TYPE_CHECKING:
    from dsnet.calibration.calibration import Calibration, calibrate
    from dsnet.calibration.search import calibrate_cascade, calibrate_gate
    from dsnet.routing.route_outputs import RouteOutputs, collect, simulate
else:
    __getattr__, __dir__ = lazy_imports(__name__)

__all__ = [
    "Calibration",
    "RouteOutputs",
    "calibrate",
    "calibrate_cascade",
    "calibrate_gate",
    "collect",
    "simulate",
]
