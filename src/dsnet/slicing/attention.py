"""Multi-head self-attention, sliced in embedding, heads and features per head."""

from __future__ import annotations

from typing import Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost
from dsnet.slicing import functional as SF
from dsnet.slicing.linear import SlicedLinear
from dsnet.slicing.parameters import Factory
from dsnet.slicing.static import plain_linear, traced

__all__ = ["SlicedAttention", "StaticAttention"]


class SlicedAttention(nn.Module):
    """Attention of the first ``heads`` heads, with the first ``head_dim`` features of each (Eq. 16 to 18).

    Q, K and V are separate layers, sliced separately. The scale is 1/√(features per head).

    Args:
        width: Width of the embedding at full size.
        heads: Number of heads at full size.
        head_dim: Features of each head at full size.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> layer = SlicedAttention(64, heads=4, head_dim=16)
        >>> layer(torch.zeros(2, 5, 48), heads=3).shape
        torch.Size([2, 5, 48])
    """

    def __init__(self, width: int, heads: int, head_dim: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.width, self.heads, self.head_dim = width, heads, head_dim
        inner = heads * head_dim
        self.q, self.k, self.v = (SlicedLinear(width, inner, **factory) for _ in range(3))
        self.proj = SlicedLinear(inner, width, **factory)

    def forward(self, x: Tensor, heads: int, head_dim: int | None = None) -> Tensor:
        """Attend over tokens.

        Args:
            x: Tokens [B, N, E]; E is the slice of the embedding.
            heads: Number of heads.
            head_dim: Features of each head (default: all).

        Returns:
            Tokens [B, N, E].

        Raises:
            DsnetError: The layer has no such size.
        """
        head_dim = self.head_dim if head_dim is None else head_dim
        self._check(x.shape[-1], heads, head_dim)
        layers = (self.q, self.k, self.v)
        if head_dim == self.head_dim:  # the slices are leading rows: no gather
            q, k, v = (layer(x, heads * head_dim) for layer in layers)
            return cast(Tensor, self.proj(SF.attention(q, k, v, heads), x.shape[-1]))
        q, k, v = (F.linear(x, *self._rows(layer, x.shape[-1], heads, head_dim)) for layer in layers)
        weight, bias = self._columns(x.shape[-1], heads, head_dim)
        return F.linear(SF.attention(q, k, v, heads), weight, bias)

    def _check(self, width: int, heads: int, head_dim: int) -> None:
        SF.check_size("embedding", width, self.width)
        SF.check_size("number of heads", heads, self.heads)
        SF.check_size("features per head", head_dim, self.head_dim)

    def _rows(self, layer: SlicedLinear, width: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        assert layer.bias is not None
        weight = SF.slice_head_features(layer.weight, heads, head_dim, self.head_dim)
        return weight[:, :width], SF.slice_head_features(layer.bias, heads, head_dim, self.head_dim)

    def _columns(self, width: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        assert self.proj.bias is not None
        columns = SF.slice_head_features(self.proj.weight.t(), heads, head_dim, self.head_dim)
        return columns.t()[:width], self.proj.bias[:width]

    def cost(self, width: int, heads: int, head_dim: int, tokens: int) -> Cost:
        """Count parameters, multiply-adds and attention products at these sizes."""
        self._check(width, heads, head_dim)
        inner = heads * head_dim
        project = self.q.cost(width, inner, tokens)
        products = Cost(attention=2 * tokens * tokens * inner)
        return project + project + project + products + self.proj.cost(inner, width, tokens)

    def extract(self, width: int, heads: int, head_dim: int) -> nn.Module:
        """Extract the stand-alone layer of these sizes, with Q, K and V as one matrix."""
        self._check(width, heads, head_dim)
        parts = [self._rows(layer, width, heads, head_dim) for layer in (self.q, self.k, self.v)]
        qkv = plain_linear(torch.cat([w for w, _ in parts]), torch.cat([b for _, b in parts]))
        return traced(
            StaticAttention(qkv, plain_linear(*self._columns(width, heads, head_dim)), heads, head_dim)
        )


class StaticAttention(nn.Module):
    """Multi-head self-attention of one size, with Q, K and V as one matrix."""

    def __init__(self, qkv: nn.Linear, proj: nn.Linear, heads: int, head_dim: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.head_dim = qkv, proj, heads, head_dim

    def forward(self, x: Tensor) -> Tensor:
        """Attend over tokens ``x`` [B, N, E]."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.proj(y.transpose(1, 2).flatten(2)))
