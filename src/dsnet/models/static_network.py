"""The base class of reference networks: plain static networks of torch's own layers, with their costs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from dsnet.counts import Cost, Shape
from dsnet.models.input_spec import InputSpec
from dsnet.slicing.functional import conv_output_shape

__all__ = ["ReferenceNetwork", "plain_cost"]


class ReferenceNetwork(nn.Module, ABC):
    """A static network that a family is compared with. It has one size and takes no route."""

    input_spec: InputSpec

    @abstractmethod
    def cost(self, image: Shape) -> Cost:
        """Compute the cost on an image of this shape."""

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


def plain_cost(module: nn.Module, shape: Shape) -> tuple[Cost, Shape]:
    """Compute the cost and output shape of a layer of torch, or a sequence of them."""
    params = sum(p.numel() for p in module.parameters())
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
