"""Torch as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["BACKEND", "Call"]


class _Eager:
    name = "eager"
    batch_invariant = False  # unless its parts are changed, see `dsnet.runtime.partition.batch_invariance`
    invariant_logits = False
    buckets = (1, 2, 4, 8, 16)

    def any_batch(self, device: torch.device) -> bool:
        """All sizes."""
        return True

    def recorded(self, device: torch.device) -> bool:
        """No."""
        return False

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Always there."""
        return None

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., Call]:
        """The module itself."""
        call = Call(module)
        return lambda *examples: call


class Call:
    """A module as an executable."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One tensor, or features and scores."""
        found = self.module(*inputs)
        return found if isinstance(found, tuple) else (found,)


BACKEND = _Eager()
