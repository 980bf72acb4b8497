"""Dynamic weight slicing: one set of weights, a route for every image.

>>> import torch, dsnet
>>> model = dsnet.create_model("ds_mbnet_tiny")
>>> images = torch.zeros(2, 3, 16, 16)
>>> model(images, model.space.smallest).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dsnet.cost import cost, madds, params  # by the names of their modules: bound before those can be
from dsnet.counts import Cost
from dsnet.errors import DsnetError
from dsnet.extract import extract

if TYPE_CHECKING:
    from dsnet import data as data
    from dsnet import detection as detection
    from dsnet import models as models
    from dsnet import routing as routing
    from dsnet import runtime as runtime
    from dsnet import training as training
    from dsnet.calibration import load_routed
    from dsnet.models import Supernet, create_model, list_models, run_gated
    from dsnet.routes import Route, RouteSpace, Slice
    from dsnet.routing import Routed
    from dsnet.slicing import Mode
    from dsnet.training.bn_calibration import recalibrate

__version__ = "0.1.0"

__all__ = [
    "create_model",
    "list_models",
    "Supernet",
    "Mode",
    "run_gated",
    "recalibrate",
    "Routed",
    "load_routed",
    "Route",
    "RouteSpace",
    "Slice",
    "extract",
    "madds",
    "params",
    "cost",
    "Cost",
    "DsnetError",
    "__version__",
]

# What needs torch is imported when it is asked for: `import dsnet` and the command's help take no time.
_LAZY = {
    "create_model": "dsnet.models",
    "list_models": "dsnet.models",
    "Supernet": "dsnet.models",
    "run_gated": "dsnet.models",
    "Mode": "dsnet.slicing",
    "recalibrate": "dsnet.training",
    "Routed": "dsnet.routing",
    "load_routed": "dsnet.calibration",
    "Route": "dsnet.routes",
    "RouteSpace": "dsnet.routes",
    "Slice": "dsnet.routes",
}
_SUBMODULES = ("data", "detection", "models", "routing", "runtime", "training")


if not TYPE_CHECKING:  # type checkers read the imports above instead

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES})
