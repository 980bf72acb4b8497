"""The base class of reference networks: plain static networks of torch's own layers, with their costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.models.input_spec import InputSpec
from dsnet.slicing.functional import conv_output_shape

__all__ = ["PlainBlock", "ReferenceNetwork", "plain_cost"]


class ReferenceNetwork(nn.Module):
    """A static network that a family is compared with. It has one size and takes no route.

    Attributes:
        input_spec: The images that the network takes.
        stem: First layers.
        blocks: Blocks after the stem.
        head: Layers from features to logits.
    """

    input_spec: InputSpec
    stem: nn.Sequential
    blocks: nn.Sequential
    head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits [B, classes] of images [B, 3, H, W]."""
        return cast(Tensor, self.head(self.blocks(self.stem(x))))

    def cost(self, image: Shape) -> Cost:
        """Compute the cost on an image of this shape."""
        return plain_cost(nn.Sequential(self.stem, self.blocks, self.head), image)[0]

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise as the supernets: He by fan-out, classifier with a standard deviation of 0.01."""
        if next(self.parameters()).is_meta:  # nothing to draw, and torch would import its compiler for it
            return
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] ** 2 * module.out_channels / module.groups
                nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01, generator=generator)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                module.reset_parameters()


class PlainBlock(nn.Module, ABC):
    """A block of a reference network that is no sequence of layers."""

    @abstractmethod
    def cost(self, shape: Shape) -> tuple[Cost, Shape]:
        """Compute the cost and output shape on an input of this shape."""


def plain_cost(module: nn.Module, shape: Shape) -> tuple[Cost, Shape]:
    """Compute the cost and output shape of a layer of torch, a `PlainBlock`, or a sequence of them."""
    params = sum(p.numel() for p in module.parameters())
    if isinstance(module, PlainBlock):
        return module.cost(shape)
    if isinstance(module, nn.Sequential):
        total = Cost()
        for child in module:
            cost, shape = plain_cost(child, shape)
            total += cost
        return total, shape
    if isinstance(module, nn.Conv2d):
        kernel, stride, padding = module.kernel_size[0], module.stride[0], int(module.padding[0])
        after = conv_output_shape(shape, module.out_channels, kernel, stride, padding)
        return Cost(params=params, layers=module.weight.numel() * after.area), after
    if isinstance(module, nn.Linear):
        cost = Cost(params=params, layers=module.weight.numel() * shape.area)
        return cost, shape._replace(channels=module.out_features)
    if isinstance(module, nn.AdaptiveAvgPool2d):
        return Cost(pools=shape.channels * shape.area), Shape(shape.channels, 1, 1)
    if isinstance(module, nn.MaxPool2d):
        return Cost(), conv_output_shape(shape, shape.channels, 3, 2, 1)
    return Cost(params=params), shape  # norms, activations, reshaping
