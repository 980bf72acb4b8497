"""What networks with several image sizes are compared with: ordinary networks on images resized by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import dsnet
from dsnet.models import Supernet
from dsnet.models.composite import CompositeNetwork
from dsnet.routes import Route
from dsnet.slicing import Mode


def shrink(x: Tensor, size: int) -> Tensor:
    """Resize square images by triangular filters, written as matrices."""
    side = x.shape[-1]
    if side == size:
        return x
    scale = max(1.0, side / size)
    filters = torch.zeros(size, side, dtype=torch.float64)
    for row in range(size):
        centre = (row + 0.5) * side / size
        for column in range(side):
            filters[row, column] = max(0.0, 1 - abs(column + 0.5 - centre) / scale)
    filters /= filters.sum(1, keepdim=True)
    return (filters @ x.double() @ filters.T).to(x.dtype)


def pairs_by_cost(network: Supernet, sizes: Sequence[int]) -> list[tuple[int, Route]]:
    """All pairs of an image size and a route of an ordinary network, cheapest first."""
    pairs = [(size, route) for size in sizes for route in network.space]
    return sorted(pairs, key=lambda pair: dsnet.madds(network, pair[1], pair[0]))


class ByHand:
    """An ordinary network with the weights of a composite one, which runs the composite's routes."""

    def __init__(self, model: CompositeNetwork) -> None:
        options = {key: value for key, value in model.spec.options if key != "image_sizes"}
        dtype = next(model.parameters()).dtype
        self.network = dsnet.create_model(model.spec.name, dtype=dtype, **options).train(model.training)
        parameters = dict(self.network.named_parameters())
        with torch.no_grad():
            for name, value in model.networks[0].named_parameters():
                if "routing" not in name:  # it has another number of choices
                    parameters[name].copy_(value)
        self.pairs = pairs_by_cost(self.network, model.image_sizes)

    def run_stages(
        self, x: Tensor, route: Route, mode: Mode | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute logits and pooled features at a route of the composite network."""
        size, own = self.pairs[route.number]
        return self.network.run_stages(shrink(x, size), own, mode)
