"""Count the multiply-adds and parameters of a network by arithmetic; nothing runs."""

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
    """Count a supernet at a route, or a reference network, for one image.

    Args:
        model: A model of `create_model`.
        route: The route of a supernet; None for a reference network.
        image_size: Side of the image, or (height, width) (default: that of the model). A route with an image
            size of its own is counted at that.

    Returns:
        Parameters and multiply-adds by kind.

    Raises:
        DsnetError: A supernet is given without a route, a reference network with one, or the network does not
            run at the image size.

    Examples:
        >>> import dsnet
        >>> model = dsnet.create_model("ds_mbnet_tiny", device="meta")
        >>> dsnet.cost(model, model.space.largest)
        Cost(params=44142, layers=312992, pools=3648, routing=64, attention=0)
    """
    from dsnet.models.composite import CompositeNetwork
    from dsnet.models.counting import route_cost
    from dsnet.models.static_network import ReferenceNetwork
    from dsnet.models.supernet import Supernet

    if isinstance(model, Supernet):
        if route is None:
            raise DsnetError(
                "a supernet's cost depends on the route: give one, for example model.space.largest"
            )
        shape = model.input_spec.shape(image_size)
        if isinstance(model, CompositeNetwork):
            return model.cost(route)
        return route_cost(model, model.space.resolve(route).choices, shape)
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
    """Count the multiply-adds for one image, by a convention of `dsnet.counts`.

    Args:
        model: A model of `create_model`.
        route: The route of a supernet; None for a reference network.
        image_size: Side of the image, or (height, width) (default: that of the model).
        convention: ``paper``, or ``all``, which also counts routing heads and attention products.

    Examples:
        >>> import dsnet
        >>> dsnet.madds(dsnet.create_model("ds_mbnet", device="meta"), 0)
        132867296
    """
    return cost(model, route, image_size).madds(convention)


def params(model: nn.Module, route: Route | int | None = None) -> int:
    """Count the parameters of a route's stand-alone network, with attention and without routing heads.

    Args:
        model: A model of `create_model`.
        route: The route of a supernet; None for a reference network.

    Examples:
        >>> import dsnet
        >>> dsnet.params(dsnet.create_model("mobilenet_v1", device="meta"))
        4231976
    """
    return cost(model, route).params
