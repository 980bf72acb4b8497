"""The slimmable projector of H-IB, from the features of a small network to those of the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.models import Supernet
from dsnet.slicing import SlicedLinear

__all__ = ["Projector", "Stages"]

Stages = Literal["last", "all"]


class Projector(nn.Module):
    """An MLP for each supervised stage, with sliced input and full hidden layer and output (C → C → C).

    It is trained with the network; the moving average and the final checkpoint do not contain it.

    Args:
        widths: Full width of each stage.
        device: Device of the parameters.
        dtype: Precision of the parameters.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.first, self.last = (
            nn.ModuleList(SlicedLinear(c, c, init_std=c**-0.5, device=device, dtype=dtype) for c in widths)
            for _ in range(2)
        )

    @classmethod
    def of(cls, model: Supernet, stages: Stages = "last") -> Projector:
        """Create the projector for the last dynamic stage of a network, or for all of them."""
        widths = [size.width for size in model.space.largest.stages]
        weight = model.head.classifier.weight
        return cls(widths if stages == "all" else widths[-1:], device=weight.device, dtype=weight.dtype)

    def select(self, stages: Sequence[Tensor]) -> Sequence[Tensor]:
        """Select the features of the supervised stages, which are the last ones."""
        return stages[-len(self.first) :]

    def forward(self, stages: Sequence[Tensor]) -> list[Tensor]:
        """Predict the largest network's features [B, C] of each supervised stage."""
        layers = zip(self.first, self.last, self.select(stages), strict=True)
        return [cast(Tensor, last(F.relu(first(features)))) for first, last, features in layers]
