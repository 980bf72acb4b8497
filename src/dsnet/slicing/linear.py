"""Linear layer whose input and output widths can be sliced."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from dsnet.counts import Cost
from dsnet.slicing import functional as SF
from dsnet.slicing.parameters import Factory, draw_truncated, new_parameter
from dsnet.slicing.static import plain_linear

__all__ = ["SlicedLinear"]


class SlicedLinear(nn.Module):
    """Linear layer ``y = W[:out, :in] x + b[:out]``, where ``in`` follows from the input.

    Args:
        in_features: Input features at full size.
        out_features: Output features at full size.
        bias: Whether to add a bias.
        init_std: Standard deviation of the initial weights; 0 sets them to zero.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> layer = SlicedLinear(8, 16)
        >>> layer(torch.zeros(2, 4), out=6).shape
        torch.Size([2, 6])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_std: float = 0.02,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.init_std = in_features, out_features, init_std
        self.weight = new_parameter(out_features, in_features, **factory)
        self.bias = new_parameter(out_features, **factory) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise by a truncated normal of ``init_std``, or zero if that is 0; the bias is zero."""
        draw_truncated(self.weight, self.init_std, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, out: int | None = None) -> Tensor:
        """Map ``x`` [..., in] to [..., out] (default: all output features)."""
        return SF.linear(x, self.weight, self.bias, self.out_features if out is None else out)

    def cost(self, in_features: int, out: int, positions: int = 1) -> Cost:
        """Count parameters and multiply-adds at this size, on ``positions`` positions."""
        self._check(in_features, out)
        madds = in_features * out
        return Cost(params=madds + out * (self.bias is not None), layers=madds * positions)

    def extract(self, in_features: int, out: int) -> nn.Linear:
        """Extract the stand-alone layer of this size."""
        self._check(in_features, out)
        return plain_linear(self.weight[:out, :in_features], None if self.bias is None else self.bias[:out])

    def _check(self, in_features: int, out: int) -> None:
        SF.check_size("input width", in_features, self.in_features)
        SF.check_size("output width", out, self.out_features)

    def extra_repr(self) -> str:
        """Return the sizes for printing."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
