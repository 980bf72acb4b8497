"""Find the groups of channels of a traced network, operation by operation."""

from __future__ import annotations

from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models.convert._axes import (
    Group,
    keep_whole,
    resolve,
)
from dsnet.models.convert._axis_map import Analysis, Call, whole_axes
from dsnet.models.convert._operations import bind, operation_call
from dsnet.models.convert._rules import RULES, unknown
from dsnet.models.convert._tracing import TracedGraph, value_of

__all__ = ["analyse"]


def analyse(traced: TracedGraph) -> Analysis:
    """Find the axes of all tensors and weights of a traced network.

    Raises:
        DsnetError: A weight is used by two layers.
    """
    analysis = Analysis(traced)
    for node in traced.graph.nodes:
        if node.op in ("output", "get_attr"):
            continue
        if node.op == "placeholder":
            analysis.axes[node] = whole_axes(value_of(node))
            continue
        name, args, kwargs = operation_call(analysis, node)
        module = str(node.target) if node.op == "call_module" else None
        function, signature = RULES.get(name, (None, None))
        if name == "size" or not isinstance(value_of(node), Tensor | tuple | list):
            continue
        if function is None or signature is None:
            analysis.axes[node] = unknown(Call(analysis, node, {}, module))
            continue
        try:
            call = Call(analysis, node, bind(signature, args, kwargs), module)
        except TypeError:  # an unusual form of the call
            analysis.axes[node] = unknown(Call(analysis, node, {}, module))
            continue
        analysis.axes[node] = function(call)
    for axis in analysis.of(traced.output):
        keep_whole(axis, "classes")
    _check_shared(analysis)
    _keep_alternating(analysis)
    return analysis


def _check_shared(analysis: Analysis) -> None:
    """Raise if a weight has two users: sliced for one, it would be sliced for the other."""
    users: dict[str, str] = {}
    for node, layer in analysis.layers.items():
        for name in layer.tensors.values():
            if name in users:
                raise DsnetError(
                    f"the weight {name} is used twice (nodes {users[name]} and {node.name}): shared modules "
                    "cannot be sliced. Give each place a module of its own, for example by copy.deepcopy"
                )
            users[name] = node.name


def _keep_alternating(analysis: Analysis) -> None:
    """Keep whole what a batch norm could not slice from the front: it updates its statistics in place."""
    for layer in analysis.layers.values():
        if layer.kind == "batch_norm":
            axis = resolve(analysis.weights[layer.tensors["mean"]][0])
            inner = (factor for factor in axis[0][1:] if isinstance(factor, Group))
            if len(axis) > 1 or any(group.reason is None for group in inner):
                keep_whole(axis, "a batch norm reads it beside other channels")
