"""Multiply-adds and parameters of a network, by arithmetic alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsnet.counts import Convention, Cost
from dsnet.errors import DsnetError

if TYPE_CHECKING:  # `import dsnet` imports this module, and not torch
    from torch import nn

    from dsnet.routes import Route

__all__ = ["cost", "madds", "params"]


def cost(
    model: nn.Module, route: Route | int | None = None, image_size: int | tuple[int, int] | None = None
) -> Cost:
    """Everything that is counted, for one image at a route of a supernet, or for a static twin."""
    from dsnet.models.counting import route_cost
    from dsnet.models.static_network import ReferenceNetwork
    from dsnet.models.supernet import Supernet

    if isinstance(model, Supernet):
        if route is None:
            raise DsnetError(
                "a supernet's cost depends on the route: give one, for example model.space.largest"
            )
        return route_cost(model, model.space.resolve(route).choices, model.input_spec.shape(image_size))
    if isinstance(model, ReferenceNetwork):
        if route is not None:
            raise DsnetError(f"{type(model).__name__} is a static network and has no routes")
        return model.cost(model.input_spec.shape(image_size))
    raise DsnetError(f"cannot count a {type(model).__name__}; possible: models of `dsnet.create_model`")


def madds(
    model: nn.Module,
    route: Route | int | None = None,
    image_size: int | tuple[int, int] | None = None,
    convention: Convention = "paper",
) -> int:
    """Multiply-adds for one image (see `dsnet.counts` for the two conventions).

    ``image_size`` is the model's own by default; a pair is (height, width).
    """
    return cost(model, route, image_size).madds(convention)


def params(model: nn.Module, route: Route | int | None = None) -> int:
    """Parameters of a route's stand-alone network: attention included, routing heads not."""
    return cost(model, route).params
