"""Build layers of torch from copies of existing weights."""

from __future__ import annotations

from torch import Tensor, fx, nn

from dsnet.slicing.parameters import copy_parameter

__all__ = ["fuse", "plain_batch_norm", "plain_conv2d", "plain_linear", "traced"]


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Build an ``nn.Linear`` with copies of these tensors."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = copy_parameter(weight)
    if bias is not None:
        layer.bias = copy_parameter(bias)
    return layer


def plain_conv2d(
    weight: Tensor, bias: Tensor | None, *, stride: int, padding: int, dilation: int, groups: int
) -> nn.Conv2d:
    """Build an ``nn.Conv2d`` with copies of these tensors."""
    out, group_in, kernel, _ = weight.shape
    layer = nn.Conv2d(
        group_in * groups, out, kernel, stride, padding, dilation, groups, bias is not None, device="meta"
    )
    layer.weight = copy_parameter(weight)
    if bias is not None:
        layer.bias = copy_parameter(bias)
    return layer


def plain_batch_norm(
    weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *, eps: float, momentum: float
) -> nn.BatchNorm2d:
    """Build an ``nn.BatchNorm2d`` in eval mode with copies of these tensors."""
    layer = nn.BatchNorm2d(weight.shape[0], eps, momentum, device=weight.device, dtype=weight.dtype)
    layer.weight, layer.bias = copy_parameter(weight), copy_parameter(bias)
    layer.running_mean, layer.running_var = mean.detach().clone(), var.detach().clone()
    return layer.eval()


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
