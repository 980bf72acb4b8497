"""Names and arguments of the operations of a traced graph, whether functions, methods or modules."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from dsnet.models.convert._axis_map import Analysis

__all__ = ["bind", "module_of", "operation_call"]


def module_of(analysis: Analysis, node: fx.Node) -> nn.Module:
    return analysis.traced.root.get_submodule(str(node.target))


DISPATCHED = {  # these functions are wrappers without a name of their own
    F.max_pool2d: "max_pool2d",
    F.adaptive_max_pool2d: "adaptive_max_pool2d",
}
ALIASES = {
    "avgpool2d": "avg_pool2d",
    "maxpool2d": "max_pool2d",
    "adaptiveavgpool2d": "adaptive_avg_pool2d",
    "adaptivemaxpool2d": "adaptive_max_pool2d",
    "leakyrelu": "leaky_relu",
    "zeropad2d": "pad",
    "upsamplingnearest2d": "upsample",
    "upsamplingbilinear2d": "upsample",
}


def operation_call(analysis: Analysis, node: fx.Node) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return the name of a node's operation and its arguments, those of a module's layer included."""
    if node.op == "call_module":
        module = module_of(analysis, node)
        return _of_module(str(node.target), module, node.args, dict(node.kwargs))
    if node.op == "call_method":
        return str(node.target), node.args, dict(node.kwargs)
    target: Any = node.target
    name = str(DISPATCHED.get(target) or getattr(target, "__name__", type(target).__name__))
    return name.lstrip("_"), node.args, dict(node.kwargs)


def _of_module(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    def tensors(**roles: str) -> dict[str, Any]:
        return {k: f"{name}.{v}" if getattr(module, v, None) is not None else None for k, v in roles.items()}

    both = tensors(weight="weight", bias="bias")
    if type(module) is nn.Conv2d:
        keys = ("stride", "padding", "dilation", "groups")
        settings = {key: getattr(module, key) for key in keys} | {"mode": module.padding_mode}
        return "conv2d", args, {**kwargs, **both, **settings}
    if isinstance(module, nn.Linear):
        return "linear", args, {**kwargs, **both}
    if type(module) is nn.BatchNorm2d:
        statistics = tensors(mean="running_mean", var="running_var")
        return "batch_norm", args, {**both, **statistics, "eps": module.eps, "momentum": module.momentum}
    if type(module) is nn.LayerNorm:
        return "layer_norm", args, {**both, "normalized_shape": module.normalized_shape, "eps": module.eps}
    if type(module) is nn.GroupNorm:
        return "group_norm", args, {**both, "num_groups": module.num_groups, "eps": module.eps}
    if isinstance(module, nn.Flatten):
        return "flatten", args, {"start_dim": module.start_dim, "end_dim": module.end_dim}
    if isinstance(module, nn.Softmax | nn.LogSoftmax):
        return "softmax", args, {"dim": module.dim}
    kind = type(module).__name__.lower()
    return ALIASES.get(kind, kind), args, kwargs


def bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {"x": "input", "self": "input", "running_mean": "mean", "running_var": "var", "axis": "dim",
             "split_size": "size", "split_size_or_sections": "size", "chunks": "size"}  # fmt: skip
    bound = signature.bind(*args, **{names.get(key, key): value for key, value in kwargs.items()})
    bound.apply_defaults()
    return dict(bound.arguments)
