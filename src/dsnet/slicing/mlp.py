"""The transformer's two-layer MLP, sliced in embedding and hidden width."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost
from dsnet.slicing.linear import SlicedLinear

__all__ = ["SlicedMLP"]


class SlicedMLP(nn.Module):
    """MLP ``W2[:e, :hidden] gelu(W1[:hidden, :e] x)`` with biases (Eq. 19)."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = SlicedLinear(width, hidden, device=device, dtype=dtype)
        self.fc2 = SlicedLinear(hidden, width, device=device, dtype=dtype)

    def forward(self, x: Tensor, hidden: int) -> Tensor:
        """Map ``x`` [..., E] to the same shape, with ``hidden`` hidden features."""
        return cast(Tensor, self.fc2(F.gelu(self.fc1(x, hidden)), x.shape[-1]))

    def cost(self, width: int, hidden: int, tokens: int) -> Cost:
        """Compute the cost at these sizes."""
        return self.fc1.cost(width, hidden, tokens) + self.fc2.cost(hidden, width, tokens)

    def extract(self, width: int, hidden: int) -> nn.Sequential:
        """Extract the stand-alone MLP of these sizes."""
        return nn.Sequential(self.fc1.extract(width, hidden), nn.GELU(), self.fc2.extract(hidden, width))
