"""Extract a route of a supernet as a stand-alone network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dsnet.counts import Shape
from dsnet.errors import DsnetError

if TYPE_CHECKING:  # `import dsnet` imports this module, and not torch
    from torch import nn

    from dsnet.models.blocks import Step
    from dsnet.models.supernet import Supernet
    from dsnet.routes import Route

__all__ = ["extract"]


def extract(
    model: Supernet,
    route: Route | int,
    *,
    fold_bn: bool = True,
    image_size: int | tuple[int, int] | None = None,
) -> nn.Sequential:
    """Build the network of one route from torch's own layers, with copies of the weights, in eval mode.

    Args:
        model: The supernet.
        route: The route, or its number.
        fold_bn: Fold batch norms into the convolutions before them. Without it the result can be trained.
        image_size: Side of the images (default: that of the model). A transformer's positions are resized.

    Returns:
        A network that computes the same logits [B, classes] from images [B, C, H, W] as the route. Where the
        route has an image size, they are images of that size.

    Raises:
        DsnetError: The route is not one of the model, or it lacks norm statistics.

    Examples:
        >>> from dsnet import create_model
        >>> model = create_model("ds_mbnet_tiny")
        >>> sum(p.numel() for p in extract(model, model.space.smallest, fold_bn=False).parameters())
        2606
    """
    from torch import nn

    from dsnet.models.blocks import extract_steps
    from dsnet.models.supernet import Supernet

    if not isinstance(model, Supernet):
        raise DsnetError(f"only a supernet has routes to extract, not a {type(model).__name__}")
    network, route = model.at(route)
    if network is not model:
        model.input_spec.shape(image_size)
        return extract(network, route, fold_bn=fold_bn)
    model.require_statistics(route)
    names = {module: name.replace(".", "_") for name, module in model.named_modules()}

    def chain(steps: Iterable[Step], shape: Shape) -> tuple[nn.Sequential, Shape]:
        modules, shape = extract_steps(steps, shape, fold_bn=fold_bn)
        return nn.Sequential(OrderedDict((names[block], m) for block, m in modules.items())), shape

    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["prefix"], shape = chain(model.chain(()), model.input_spec.shape(image_size))
    for stage in range(len(model.gates)):
        parts[f"gate{stage}"] = model.gate(stage).extract(shape.channels)
        parts[f"segment{stage}"], shape = chain(model.chain(route.choices[: stage + 1]), shape)
    block, size, key = model.head_step(route.choices)
    parts["head"] = block.extract(shape, size, key, fold_bn=fold_bn)
    return nn.Sequential(parts).eval()
