"""The transformer's two-layer MLP, sliced in embedding and hidden width."""

from __future__ import annotations

from typing import Unpack, cast

import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost
from dsnet.slicing.linear import SlicedLinear
from dsnet.slicing.parameters import Factory

__all__ = ["SlicedMLP"]


class SlicedMLP(nn.Module):
    """MLP ``W2[:E, :hidden] gelu(W1[:hidden, :E] x)`` with biases (Eq. 19).

    Args:
        width: Width of the embedding at full size.
        hidden: Hidden width at full size.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> import torch
        >>> SlicedMLP(64, 128)(torch.zeros(2, 5, 48), hidden=96).shape
        torch.Size([2, 5, 48])
    """

    def __init__(self, width: int, hidden: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.fc1 = SlicedLinear(width, hidden, **factory)
        self.fc2 = SlicedLinear(hidden, width, **factory)

    def forward(self, x: Tensor, hidden: int) -> Tensor:
        """Map ``x`` [..., E] to the same shape, with ``hidden`` hidden features."""
        return cast(Tensor, self.fc2(F.gelu(self.fc1(x, hidden)), x.shape[-1]))

    def cost(self, width: int, hidden: int, tokens: int) -> Cost:
        """Count parameters and multiply-adds at these sizes, on ``tokens`` tokens."""
        return self.fc1.cost(width, hidden, tokens) + self.fc2.cost(hidden, width, tokens)

    def extract(self, width: int, hidden: int) -> nn.Sequential:
        """Extract the stand-alone MLP of these sizes."""
        return nn.Sequential(self.fc1.extract(width, hidden), nn.GELU(), self.fc2.extract(hidden, width))
