"""Make, draw and copy parameters."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

__all__ = ["Factory", "copy_parameter", "draw_normal", "draw_truncated", "new_parameter"]


class Factory(TypedDict, total=False):
    """Keyword arguments of all layers: device and precision of their parameters."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def new_parameter(*shape: int, **factory: Unpack[Factory]) -> nn.Parameter:
    """Return a parameter of this shape whose values are not set yet."""
    return nn.Parameter(torch.empty(shape, **factory))


def draw_normal(weight: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Draw a weight from a normal distribution."""
    if not weight.is_meta:  # nothing to draw, and torch would import its compiler for it
        nn.init.normal_(weight, std=std, generator=generator)


def draw_truncated(weight: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Draw a weight from a normal distribution, truncated at two standard deviations; 0 gives zeros."""
    if std == 0:
        nn.init.zeros_(weight)
    elif not weight.is_meta:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


def copy_parameter(values: Tensor) -> nn.Parameter:
    """Return a parameter with a contiguous copy of ``values``, trainable if they are."""
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), values.requires_grad)
