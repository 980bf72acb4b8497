"""The slimmable projector of H-IB: from a small network's features to the largest one's."""

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
    """For every supervised stage an MLP whose input is sliced, hidden and output full (C → C → C).

    Trained with the network, left out of its EMA and of the final checkpoint.
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
        """A projector for a network's last dynamic stage, or for all of them."""
        widths = [size.width for size in model.space.largest.stages]
        weight = model.head.classifier.weight
        return cls(widths if stages == "all" else widths[-1:], device=weight.device, dtype=weight.dtype)

    def select(self, stages: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of all stages' features those that are supervised: the last ones."""
        return stages[-len(self.first) :]

    def forward(self, stages: Sequence[Tensor]) -> list[Tensor]:
        """What every supervised stage predicts of the largest network's features: [B, C] each."""
        layers = zip(self.first, self.last, self.select(stages), strict=True)
        return [cast(Tensor, last(F.relu(first(features)))) for first, last, features in layers]
