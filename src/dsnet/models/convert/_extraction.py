"""Extract graphs of converted networks at one size, with torch's own layers."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import fx, nn

from dsnet.counts import Shape
from dsnet.models.convert._counting import count
from dsnet.models.convert._layers import (
    ConvertedBatchNorm,
    ConvertedConv,
    Sizes,
    SlicedTensor,
    axis_width,
)
from dsnet.slicing.static import fuse

__all__ = ["Extraction"]


class Extraction:
    """The graph of one size for images of one shape, of torch's own layers with copies of the weights."""

    def __init__(self, body: fx.GraphModule, shape: Shape, sizes: Sizes, key: int, *, fold_bn: bool) -> None:
        self.body, self.sizes, self.key = body, sizes, key
        self.sides = count(body, shape, sizes).sides
        self.norms = _norms_behind(body) if fold_bn else {}  # by the convolution that they fold into
        self.graph, self.modules = fx.Graph(), dict[str, Any]()

    def run(self) -> fx.GraphModule:
        env: dict[fx.Node, Any] = {}
        given = {"sizes": self.sizes, "key": self.key, "mode": None}
        for node in self.body.graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "placeholder":
                env[node] = given[node.target] if node.target in given else self.graph.placeholder("x")
            elif node.op == "output":
                self.graph.output(args[0])
            elif node.name in self.sides:
                env[node] = self.sides[node.name]
            elif node.target is axis_width or (node.op == "call_function" and _are_integers(args, kwargs)):
                env[node] = node.target(*args)
            elif node.op == "call_module":
                env[node] = self._module(node, args, kwargs)
            else:
                env[node] = self.graph.create_node(node.op, node.target, args, kwargs)
        return fx.GraphModule(self.modules, self.graph)

    def _module(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Add the static layer of a node."""
        name = str(node.target)
        layer: Any = self.body.get_submodule(name)
        name = name.replace(".", "_")
        if isinstance(layer, SlicedTensor):
            self.modules[name] = layer.extract(self.sizes)
            return self.graph.get_attr(name)
        if isinstance(layer, ConvertedBatchNorm):
            if node in self.norms.values():
                return cast(fx.Node, args[0])
            self.modules[name] = layer.extract(layer.axis.width(self.sizes), self.key)
            return self.graph.call_module(name, args[:1])
        if not hasattr(layer, "extract"):
            self.modules[name] = copy.deepcopy(layer)
            return self.graph.call_module(name, args, kwargs)
        self.modules[name] = layer.extract(self.sizes)
        if node in self.norms:
            norm = cast(ConvertedBatchNorm, self.body.get_submodule(str(self.norms[node].target)))
            self.modules[name] = fuse(self.modules[name], norm.extract(norm.axis.width(self.sizes), self.key))
        return self.graph.call_module(name, args[:1])


def _are_integers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args) and not kwargs and all(type(arg) is int for arg in args)


def _norms_behind(body: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Return the batch norm behind each convolution that nothing else reads."""

    def calls(node: fx.Node, kind: type[nn.Module]) -> bool:
        return node.op == "call_module" and isinstance(body.get_submodule(str(node.target)), kind)

    return {
        node: next(iter(node.users))
        for node in body.graph.nodes
        if calls(node, ConvertedConv)
        and len(node.users) == 1
        and calls(next(iter(node.users)), ConvertedBatchNorm)
    }
