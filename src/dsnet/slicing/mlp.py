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
    """``W2[:e, :hidden] gelu(W1[:hidden, :e] x)`` (Eq. 19), with biases."""

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
        """Runs on the features that ``x`` has, with ``hidden`` features inside."""
        return cast(Tensor, self.fc2(F.gelu(self.fc1(x, hidden)), x.shape[-1]))

    def cost(self, width: int, hidden: int, tokens: int) -> Cost:
        """Cost at these sizes on so many tokens."""
        return self.fc1.cost(width, hidden, tokens) + self.fc2.cost(hidden, width, tokens)

    def extract(self, width: int, hidden: int) -> nn.Sequential:
        """The stand-alone MLP of these sizes."""
        return nn.Sequential(self.fc1.extract(width, hidden), nn.GELU(), self.fc2.extract(hidden, width))
