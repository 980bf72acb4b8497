"""Blocks and head of converted networks: graphs that run with sliced layers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx, nn

from dsnet.counts import Cost, Shape
from dsnet.models.blocks import Block, drop_features
from dsnet.models.convert._counting import count
from dsnet.models.convert._extraction import Extraction
from dsnet.models.convert._layers import (
    ConvertedLinear,
    Sizes,
)
from dsnet.models.heads import Head
from dsnet.routes import Slice
from dsnet.slicing import Mode

__all__ = ["GraphBlock", "GraphHead"]


def _sizes(size: Slice) -> Sizes:
    return size.groups or ()


class GraphBlock(Block):
    """A part of a converted network.

    Blocks pass maps [B, C, H, W]; tokens [B, N, C] become maps [B, C, N, 1], without a copy.

    Args:
        body: The graph of `Builder.body`.
        name: Name of the part in the original network.
        stride: Factor by which the resolution shrinks.
    """

    def __init__(self, body: fx.GraphModule, *, name: str, stride: int) -> None:
        super().__init__()
        self.body, self.name, self.stride = body, name, stride

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Run at this size."""
        return cast(Tensor, self.body(x, _sizes(size), key, mode))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Count the block, by running it on the meta device once for each shape and size."""
        counted = count(self.body, shape, _sizes(size))
        return counted.cost, Shape(*counted.shape)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract the graph with torch's layers."""
        return Extraction(self.body, shape, _sizes(size), key, fold_bn=fold_bn).run()

    def extra_repr(self) -> str:
        """Return the name for printing."""
        return self.name


class GraphHead(Head):
    """The last part of a converted network: its pooling and its classifier.

    Args:
        body: The graph up to the input of the classifier, or None if that is the input of the head.
        classifier: The classifier.
    """

    def __init__(self, body: fx.GraphModule, classifier: ConvertedLinear) -> None:
        super().__init__()
        self.body = body
        self.classifier = classifier  # type: ignore[assignment]  # has the same attributes as a sliced layer

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Compute logits [B, classes]."""
        features = self.body(x, _sizes(size), key, mode)
        return cast(Tensor, self.classifier(drop_features(features, mode), _sizes(size)))

    def pool(self, x: Tensor) -> Tensor:
        """Average over all positions."""
        return x.mean((2, 3))

    def columns(self, size: Slice, features: int) -> Tensor:
        """Return the columns of the classifier's weight that a size reads; they may be of several groups."""
        layer = cast(ConvertedLinear, self.classifier)
        return layer.inner.take(torch.arange(layer.in_features)[None], 1, _sizes(size))[0]

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Count pooling and classifier."""
        cost = count(self.body, shape, _sizes(size)).cost
        layer = cast(ConvertedLinear, self.classifier)
        return cost + layer.cost(_sizes(size), 1), Shape(layer.out_features, 1, 1)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract pooling and classifier."""
        body = Extraction(self.body, shape, _sizes(size), key, fold_bn=fold_bn).run()
        return nn.Sequential(body, cast(ConvertedLinear, self.classifier).extract(_sizes(size)))
