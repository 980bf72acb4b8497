"""Dynamic weight slicing: one set of weights, a route for every image.

>>> import torch, dsnet
>>> model = dsnet.create_model("ds_mbnet_tiny")
>>> images = torch.zeros(2, 3, 16, 16)
>>> model(images, model.space.smallest).shape
torch.Size([2, 10])
"""

from dsnet.cost import cost, madds, params
from dsnet.counts import Cost
from dsnet.errors import DsnetError
from dsnet.extract import extract
from dsnet.models import Supernet, create_model, list_models, run_gated
from dsnet.routes import Route, RouteSpace, Slice
from dsnet.routing import Routed, load_routed
from dsnet.slicing import Mode
from dsnet.training import recalibrate

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
