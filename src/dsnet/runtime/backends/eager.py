"""Torch as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["BACKEND"]


class _Eager:
    name = "eager"
    any_batch = True
    buckets = (1, 2, 4, 8, 16)

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Always there."""
        return None

    def convert(self, module: nn.Module, example: Tensor) -> Callable[[Tensor], _Call]:
        """The module itself."""
        call = _Call(module)
        return lambda example: call


class _Call:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.module(x)
        return found if isinstance(found, tuple) else (found,)


BACKEND = _Eager()
