"""Stand-alone gates of torch's own layers, for extracted networks and runtime plans."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dsnet.slicing.static import traced

__all__ = [
    "InferenceGate",
    "RoutingInferenceGate",
    "SingleRouteInferenceGate",
    "channel_attention",
    "is_channel_attention",
    "scalar_scores",
]


def scalar_scores(s: Tensor, routes: int) -> Tensor:
    """Turn the output ``s`` [B, 1] of a scalar head into scores [B, routes].

    The largest score is that of the interval of [0, 1], divided evenly among the routes, that ``s`` lies in.

    Examples:
        >>> scalar_scores(torch.tensor([[0.1], [0.6]]), 4).argmax(1).tolist()
        [0, 2]
    """
    t = torch.arange(routes, device=s.device, dtype=s.dtype)
    return -((s * routes - t - 0.5) ** 2)


class InferenceGate(nn.Module):
    """A gate that scales channels and scores its choices, in float32 or better for any input.

    Args:
        first: Shared layer, pooled features [B, C] → [B, hidden].
        attention: Attention head, [B, hidden] → [B, C].
        last: Last layer of the routing head.
        separate: First layer of a routing head that does not use the shared one, or None.
        routes: Number of routes of a scalar head; None if the head has one score for each choice.
    """

    def __init__(
        self,
        first: nn.Linear,
        attention: nn.Linear,
        last: nn.Linear,
        separate: nn.Linear | None,
        *,
        routes: int | None,
    ) -> None:
        super().__init__()
        self.first, self.attention, self.last, self.separate = first, attention, last, separate
        self.routes = routes  # of a scalar head; None: one score a route

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale features [B, C, H, W] and score the choices [B, choices]."""
        scores, attention = self.decide(x.mean((2, 3), dtype=self.first.weight.dtype))
        return x * (1 + torch.tanh(attention)).to(x.dtype)[:, :, None, None], scores

    def decide(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Compute scores [B, choices] and attention [B, C] before 1 + tanh from pooled features [B, C]."""
        hidden = self.run(self.first, pooled, "relu")
        encoding = hidden if self.separate is None else self.run(self.separate, pooled, "relu")
        scores = self.run(self.last, encoding)
        if self.routes is not None:
            scores = scalar_scores(scores.sigmoid(), self.routes)
        return scores, self.run(self.attention, hidden)

    def run(self, layer: nn.Linear, x: Tensor, act: Literal["none", "relu"] = "none") -> Tensor:
        """Run a layer and its activation; a fused gate overrides this."""
        y: Tensor = layer(x)
        return F.relu(y) if act == "relu" else y


class RoutingInferenceGate(nn.Module):
    """A gate without channel attention that scores its choices in float32 or better.

    Args:
        first: First layer of the routing head.
        last: Last layer of the routing head.
        routes: Number of routes of a scalar head; None if the head has one score for each choice.
    """

    def __init__(self, first: nn.Linear, last: nn.Linear, *, routes: int | None) -> None:
        super().__init__()
        self.first, self.last, self.routes = first, last, routes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, C, H, W] and scores [B, choices]."""
        scores = self.last(F.relu(self.first(x.mean((2, 3), dtype=self.first.weight.dtype))))
        if self.routes is not None:
            scores = scalar_scores(scores.sigmoid(), self.routes)
        return x, scores


class SingleRouteInferenceGate(nn.Module):
    """The gate of a network of one route: features pass unchanged, and the only choice scores 0."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, C, H, W] and scores [B, 1]."""
        return x, x.new_zeros(len(x), 1, dtype=torch.float32)


class _ChannelAttention(nn.Module):
    def __init__(self, first: nn.Linear, attention: nn.Linear) -> None:
        super().__init__()
        self.pool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.first, self.act, self.attention = first, nn.ReLU(), attention

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + torch.tanh(self.attention(self.act(self.first(self.flatten(self.pool(x))))))
        return x * scale.unsqueeze(-1).unsqueeze(-1)


def channel_attention(first: nn.Linear, attention: nn.Linear) -> fx.GraphModule:
    """Build the channel attention of these two layers as a graph."""
    return traced(_ChannelAttention(first, attention))


def is_channel_attention(module: nn.Module) -> bool:
    """Tell whether a module is the result of `channel_attention`."""
    return type(module).__name__ == _ChannelAttention.__name__ and isinstance(module, fx.GraphModule)
