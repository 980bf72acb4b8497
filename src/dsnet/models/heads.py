"""Heads: features → one vector an image → logits."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.models.blocks import Block, drop_features
from dsnet.routes import Slice
from dsnet.slicing import Factory, Mode, SlicedLinear

__all__ = ["Head", "PoolHead"]


class Head(Block):
    """Base class of heads: features are pooled to one vector for each image, and classified.

    Attributes:
        classifier: The last layer.
    """

    classifier: SlicedLinear

    @abstractmethod
    def pool(self, x: Tensor) -> Tensor:
        """Pool features [B, …] to [B, C]."""

    def columns(self, size: Slice, features: int) -> Tensor:
        """Return the columns [C] of the classifier's weight that a size reads, which gives C ``features``."""
        return torch.arange(features)


class PoolHead(Head):
    """Global average pool and a classifier on the channels of its input.

    Args:
        channels: Channels of the input at full width.
        num_classes: Number of classes.
        factory: Device and precision of the parameters.

    Examples:
        >>> import torch
        >>> PoolHead(64, 10, {})(torch.zeros(2, 48, 4, 4), Slice(width=48)).shape
        torch.Size([2, 10])
    """

    def __init__(self, channels: int, num_classes: int, factory: Factory) -> None:
        super().__init__()
        self.classifier = SlicedLinear(channels, num_classes, init_std=0.01, **factory)

    def forward(self, x: Tensor, size: Slice, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Compute logits [B, classes] of features [B, C, H, W]."""
        return cast(Tensor, self.classifier(drop_features(self.pool(x), mode)))

    def pool(self, x: Tensor) -> Tensor:
        """Average over all positions."""
        return x.mean((2, 3))

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Compute the cost and the shape of the logits."""
        classes = self.classifier.out_features
        linear = self.classifier.cost(shape.channels, classes)
        return linear + Cost(pools=shape.channels * shape.area), Shape(classes, 1, 1)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract pool and classifier."""
        classifier = self.classifier.extract(shape.channels, self.classifier.out_features)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier)
