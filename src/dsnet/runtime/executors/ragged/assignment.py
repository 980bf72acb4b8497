"""Which image runs at which route: decided, sorted into tiles, or all at the only one."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.kernels import decide as deciding

__all__ = ["TILE", "Which", "decide", "kept_on", "launched_on", "power_of_two"]

TILE = 16  # images of one route that a linear layer takes together


class Which(NamedTuple):
    """The routes of a batch, by place."""

    routes: Tensor  # [images], int32; a negative one: the image is left out
    order: Tensor | None = None  # [tiles, TILE]: images of one route each; none: there is one route
    tiles: Tensor | None = None  # [tiles]: routes
    reach: int | None = None  # only the first so many routes occur

    @classmethod
    def single(cls, images: int, device: torch.device) -> Which:
        """All images at the only route."""
        return cls(torch.zeros(images, dtype=torch.int32, device=device))

    @classmethod
    def admitted(cls, images: int, valid: Tensor) -> Which:
        """The first of them, ``valid`` [1], at the only route, the others left out."""
        routes = torch.empty(images, dtype=torch.int32, device=valid.device)
        with launched_on(valid.device):
            deciding.admit[(-(-images // 128),)](valid, routes, images, 128)
        return cls(routes)

    @classmethod
    def arranged(cls, routes: Tensor, count: int) -> Which:
        """Every image at its own [images], one of so many; a negative one: the image is left out."""
        held = kept_on(tuple((route,) for route in (*range(count), -1)), routes.device)
        valid = torch.full((1,), len(routes), dtype=torch.long, device=routes.device)
        return cls.taken(torch.where(routes < 0, count, routes).long(), valid, held, count)

    @classmethod
    def taken(
        cls,
        taken: Tensor,
        valid: Tensor,
        route_of: Tensor,
        count: int,
        asked: Tensor | None = None,
        reach: int | None = None,
    ) -> Which:
        """What images [images] take, by place in ``route_of``; no more than ``valid`` [1], none not asked."""
        images, device = len(taken), taken.device
        most = -(-images // TILE) + count
        routes = torch.empty(images, dtype=torch.int32, device=device)
        order = torch.empty(most, TILE, dtype=torch.int32, device=device)
        tiles = torch.empty(most, dtype=torch.int32, device=device)
        block = power_of_two(images)
        with launched_on(device):
            deciding.arrange[(1,)](
                taken, taken if asked is None else asked, valid, route_of, routes, order, tiles, images,
                asked is not None, count, TILE, block, power_of_two(most), most,
                num_warps=8 if block >= 1024 else 4,
            )  # fmt: skip
        return cls(routes, order, tiles, reach)


def decide(scores: Tensor, prices: Tensor, places: Tensor, taken: Tensor) -> None:
    """Into ``taken`` [images] what has the best score [images, choices] less its price, by its place."""
    images, choices = scores.shape
    with launched_on(scores.device):
        deciding.decide[(-(-images // 128),)](
            scores, prices, places, taken, images, scores.stride(0), choices, 128
        )


def launched_on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, whatever tensors they are given."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def kept_on(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Kept for good: graphs read it, and while one is recorded nothing can be copied there."""
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int32, device=device)


def power_of_two(number: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (number - 1).bit_length())
