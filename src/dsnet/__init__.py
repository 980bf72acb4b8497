"""Dynamic weight slicing: one set of weights, a route for every image.

Examples:
    >>> import torch, dsnet
    >>> model = dsnet.create_model("ds_mbnet_tiny")
    >>> images = torch.zeros(2, 3, 16, 16)
    >>> model(images, model.space.smallest).shape
    torch.Size([2, 10])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsnet.core.lazy import lazy_imports
from dsnet.cost import cost, madds, params  # by the names of their modules: bound before those can be
from dsnet.counts import Cost
from dsnet.errors import DsnetError
from dsnet.extract import extract

if TYPE_CHECKING:
    from dsnet import calibration as calibration
    from dsnet import data as data
    from dsnet import detection as detection
    from dsnet import models as models
    from dsnet import routing as routing
    from dsnet import runtime as runtime
    from dsnet import slicing as slicing
    from dsnet import training as training
    from dsnet.inference import Classifier, load
    from dsnet.models import Supernet, create_model, list_models, run_gated
    from dsnet.models._cascade import cascade
    from dsnet.models.convert import convert
    from dsnet.routes import Route, RouteSpace, Slice
    from dsnet.routing import Routed
    from dsnet.slicing import Mode
    from dsnet.training import recalibrate
else:  # what needs torch is imported on first use: `import dsnet` and the command's help take no time
    __getattr__, __dir__ = lazy_imports(__name__)

__version__ = "0.1.0"

__all__ = [
    "create_model",
    "convert",
    "cascade",
    "list_models",
    "Supernet",
    "Mode",
    "run_gated",
    "recalibrate",
    "load",
    "Classifier",
    "Routed",
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
