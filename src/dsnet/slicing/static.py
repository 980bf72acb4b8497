"""Build layers of torch from copies of existing weights."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, fx, nn

from dsnet.slicing.parameters import copy_parameter

__all__ = ["fuse", "plain_linear", "traced", "with_copies"]

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


def with_copies(layer: Layer, weight: Tensor, bias: Tensor | None) -> Layer:
    """Set copies of a weight and a bias as the parameters of a layer, and return the layer."""
    layer.weight = copy_parameter(weight)
    if bias is not None:
        layer.bias = copy_parameter(bias)
    return layer


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Build an ``nn.Linear`` with copies of these tensors."""
    out, features = weight.shape
    return with_copies(nn.Linear(features, out, bias=bias is not None, device="meta"), weight, bias)


def fuse(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """Fold a batch norm in eval mode into the convolution before it."""
    fused: nn.Conv2d = nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), norm.eval())
    return fused


def traced(module: nn.Module) -> fx.GraphModule:
    """Trace a module to a graph of torch's own layers, which does not need the module's class."""
    graph = fx.symbolic_trace(module)
    for node in graph.graph.nodes:
        node.type = None  # annotations are strings, which a graph cannot pickle
    graph.recompile()
    return graph
