"""Routers on networks whose gates decide differently from image to image."""

from __future__ import annotations

import torch

import dsnet
from dsnet.routing import CostTable, OperatingPoint, Routed, Router
from tests.support import images, random_model, spread_gates

ONE, SEVERAL = "ds_mbnet_tiny", "ds_resnet_tiny"


def spread(name: str, batch: int = 24) -> tuple[dsnet.Supernet, torch.Tensor]:
    """A network of its own whose gates are of different minds about these images."""
    model = random_model(name)
    own = dsnet.create_model(name, dtype=torch.float64)
    own.load_state_dict(model.state_dict())
    x = images(own, batch)
    return spread_gates(own, x).requires_grad_(False), x


def gate(name: str, *, weight: float = 0.0) -> tuple[dsnet.Supernet, torch.Tensor, Routed]:
    model, x = spread(name, 40)
    costs = CostTable.of_model(model)
    points = tuple(
        OperatingPoint(
            cost=costs.largest * share, accuracy=0.5, parameters=(weight,), route_counts=((0, 60), (1, 40))
        )
        for share in (0.1, 1.0)
    )
    return model, x, Routed(model, Router(kind="gate", costs=costs, curve=points), costs.largest)


def cascade(name: str, threshold: float) -> tuple[dsnet.Supernet, torch.Tensor, Routed]:
    model, x = spread(name, 40)
    costs = CostTable.of_model(model)
    routes = (0, model.space[1].number, model.space.largest.number)
    point = OperatingPoint(cost=costs.largest, accuracy=0.5, parameters=(threshold, threshold), routes=routes)
    return model, x, Routed(model, Router(kind="cascade", costs=costs, curve=(point,)), costs.largest)
