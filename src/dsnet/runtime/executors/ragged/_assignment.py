"""Which image runs at which route: one choice for all, or images sorted into tiles of one route each."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.kernels.dispatch import first_images, tile_by_route

__all__ = ["RouteAssignment", "constant_tensor"]


class RouteAssignment(NamedTuple):
    """The routes of a batch, by their index among the routes of a network."""

    routes: Tensor  # [images], int32; negative: the image is skipped
    order: Tensor | None = None  # [tiles, TILE]: images of one route per tile; none: there is one route
    tile_routes: Tensor | None = None  # [tiles]
    route_limit: int | None = None  # only routes below this occur (default: all)

    @classmethod
    def single(cls, images: int, device: torch.device) -> RouteAssignment:
        """Assign all images to the only route."""
        return cls(torch.zeros(images, dtype=torch.int32, device=device))

    @classmethod
    def single_padded(cls, images: int, valid: Tensor) -> RouteAssignment:
        """Assign the first ``valid`` [1] images to the only route and skip the padding."""
        return cls(first_images(images, valid))

    @classmethod
    def of_routes(cls, routes: Tensor, count: int) -> RouteAssignment:
        """Assign each image to its route [images], one of ``count``; negative: skip the image."""
        route_of = constant_tensor(tuple((route,) for route in (*range(count), -1)), routes.device)
        valid = torch.full((1,), len(routes), dtype=torch.long, device=routes.device)
        return cls.of_choices(torch.where(routes < 0, count, routes).long(), valid, route_of, count)

    @classmethod
    def of_choices(
        cls,
        chosen: Tensor,
        valid: Tensor,
        route_of: Tensor,
        count: int,
        active: Tensor | None = None,
        route_limit: int | None = None,
    ) -> RouteAssignment:
        """Assign images by their choices; see `tile_by_route` for the arguments."""
        return cls(*tile_by_route(chosen, valid, route_of, count, active), route_limit)


@functools.cache
def constant_tensor(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return a tensor that is never freed: CUDA graphs read it, and a capture cannot copy from the host."""
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int32, device=device)
