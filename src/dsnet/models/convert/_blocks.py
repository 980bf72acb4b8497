"""Blocks and head of converted networks: parts of the traced graph that run with sliced layers."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from dsnet.counts import Cost, Shape
from dsnet.models.blocks import Block, drop_features
from dsnet.models.convert._analysis import Analysis, Layer
from dsnet.models.convert._axes import Axis, Group, resolve
from dsnet.models.convert._chain import Form, Piece, operation
from dsnet.models.convert._layers import (
    ConvertedBatchNorm,
    ConvertedConv,
    ConvertedGroupNorm,
    ConvertedLayerNorm,
    ConvertedLinear,
    Sizes,
    SlicedAxis,
    SlicedTensor,
    axis_width,
)
from dsnet.models.convert._tracing import value_of
from dsnet.models.heads import Head
from dsnet.routes import Slice
from dsnet.slicing import Mode
from dsnet.slicing.static import fuse

__all__ = ["Builder", "GraphBlock", "GraphHead"]

DROPOUTS = {"Dropout", "Dropout2d", "dropout", "dropout2d"}


class Builder:
    """Builds blocks from the pieces of a network.

    Args:
        analysis: The analysed network.
        weights: Its weights by name, in the order in which channels are to be sliced.
        positions: Position of each sliced group among the sizes of a stage.
        keys: Number of norm keys.
    """

    def __init__(
        self, analysis: Analysis, weights: Mapping[str, Tensor], positions: Mapping[Group, int], keys: int
    ) -> None:
        self.analysis, self.weights, self.positions, self.keys = analysis, weights, positions, keys

    def axis(self, axis: Axis) -> SlicedAxis:
        """Return an axis in terms of the sizes of a stage."""
        terms: list[tuple[tuple[int, int], ...]] = []
        for term in resolve(axis):
            factors: list[tuple[int, int]] = []
            for factor in term:
                position = -1 if isinstance(factor, int) else self.positions.get(factor, -1)
                size = factor if isinstance(factor, int) else factor.size
                if factors and position < 0 and factors[-1][1] < 0:
                    factors[-1] = (factors[-1][0] * size, -1)
                else:
                    factors.append((size, position))
            if all(position < 0 for _, position in factors):
                factors = [(math.prod(size for size, _ in factors), -1)]
                if terms and len(terms[-1]) == 1 and terms[-1][0][1] < 0:
                    factors = [(factors[0][0] + terms.pop()[0][0], -1)]
            terms.append(tuple(factors))
        return SlicedAxis(tuple(terms))

    def layer(self, layer: Layer) -> nn.Module:
        """Build a layer."""
        tensors = {role: self.weights[name] for role, name in layer.tensors.items()}
        axes = {role: list(map(self.axis, self.analysis.weights[n])) for role, n in layer.tensors.items()}
        weight, bias = tensors.get("weight"), tensors.get("bias")
        groups = None if layer.groups is None else self.axis(layer.groups)
        if layer.kind == "conv":
            assert weight is not None
            out, inner = axes["weight"][:2]
            return ConvertedConv(weight, bias, out=out, inner=inner, groups=groups, **layer.settings)
        if layer.kind == "linear":
            assert weight is not None
            return ConvertedLinear(weight, bias, out=axes["weight"][0], inner=axes["weight"][1])
        if layer.kind == "batch_norm":
            statistics: Any = tensors | {"axis": axes["mean"][0], "keys": self.keys}
            return ConvertedBatchNorm(**statistics, **layer.settings)
        if layer.kind == "layer_norm":
            axis = groups or SlicedAxis(())
            return ConvertedLayerNorm(weight, bias, axis=axis, **layer.settings)
        if layer.kind == "group_norm":
            assert groups is not None
            return ConvertedGroupNorm(
                weight, bias, axis=axes["weight"][0], groups=groups, eps=layer.settings["eps"]
            )
        return copy.deepcopy(self.analysis.traced.root.get_submodule(layer.name))

    def body(self, piece: Piece, entry_axis: Axis | None = None) -> fx.GraphModule:
        """Build the graph of a piece: (x, sizes, key, mode) → output.

        Args:
            piece: The piece.
            entry_axis: The channels of its input, if they are to be sliced there.
        """
        return _Translation(self, piece).run(None if entry_axis is None else self.axis(entry_axis))


class _Translation:
    """The translation of a piece of the traced graph to a graph that takes sizes."""

    def __init__(self, builder: Builder, piece: Piece) -> None:
        self.builder, self.analysis, self.piece = builder, builder.analysis, piece
        self.graph, self.modules = fx.Graph(), dict[str, nn.Module]()
        self.env: dict[fx.Node, Any] = {}
        self.x, self.sizes, self.key, self.mode = map(self.graph.placeholder, ("x", "sizes", "key", "mode"))

    def run(self, entry: SlicedAxis | None) -> fx.GraphModule:
        x = self.x
        if entry is not None and entry.sliced:
            self.modules["narrow"] = _Narrow(entry)
            x = self.graph.call_module("narrow", (x, self.sizes))
        self.env[self.piece.entry] = _enter(self.graph, x, self.piece.entry_form)
        for node in self.piece.nodes:
            self.env[node] = self._node(node)
        self.graph.output(_leave(self.graph, self.env[self.piece.exit], self.piece.exit_form))
        module = fx.GraphModule(cast(Any, self.modules), self.graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module

    def value(self, node: fx.Node) -> Any:  # noqa: ANN401
        """Return what stands for a node in the new graph."""
        if node not in self.env:
            assert node.op == "get_attr", node
            name = str(node.target)
            tensor = self.builder.weights.get(name, value_of(node))
            axes = self.analysis.of(node)
            self.modules[name] = SlicedTensor(tensor, list(map(self.builder.axis, axes)))
            self.env[node] = self.graph.call_module(name, (self.sizes,))
        return self.env[node]

    def _node(self, node: fx.Node) -> Any:  # noqa: ANN401
        layer = self.analysis.layers.get(node)
        if layer is not None and layer.kind != "whole":
            self.modules[layer.name] = self.builder.layer(layer)
            data = next(arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node))
            rest = (self.key, self.mode) if layer.kind == "batch_norm" else (self.sizes,)
            return self.graph.call_module(layer.name, (self.value(data), *rest))
        name = operation(self.analysis, node)
        if name in DROPOUTS:
            return self.value(cast(fx.Node, node.args[0]))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        if node in self.analysis.sizes:
            return self._sized(node, name, args, kwargs)
        if node.op == "call_module":
            target = str(node.target)
            if target not in self.modules:
                self.modules[target] = copy.deepcopy(self.analysis.traced.root.get_submodule(target))
            return self.graph.call_module(target, args, kwargs)
        return self.graph.create_node(node.op, node.target, args, kwargs)

    def _sized(self, node: fx.Node, name: str, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Translate a reshape or a split: sizes that depend on the route are computed from it."""
        axes = list(map(self.builder.axis, self.analysis.sizes[node]))
        if not any(axis.sliced for axis in axes) or name in ("flatten", "Flatten"):
            if node.op == "call_module":
                self.modules[str(node.target)] = copy.deepcopy(
                    self.analysis.traced.root.get_submodule(str(node.target))
                )
            return self.graph.create_node(node.op, node.target, args, kwargs)
        widths = [
            self.graph.call_function(axis_width, (self.sizes, axis.terms)) if axis.sliced else None
            for axis in axes
        ]
        shape = value_of(node)
        if name in ("chunk", "split"):
            sizes = [w if w is not None else axis.full for w, axis in zip(widths, axes, strict=True)]
            whole = value_of(node.all_input_nodes[0]).shape
            dim = next(i for i, (a, b) in enumerate(zip(whole, shape[0].shape, strict=True)) if a != b)
            return self.graph.call_function(torch.split, (args[0], sizes, dim))
        given = list(_flat(args[1:]))
        sources = list(_flat(node.args[1:]))
        if name in ("unflatten", "Unflatten"):
            before = value_of(cast(fx.Node, node.args[0])).ndim
            given_dim: Any = node.args[1] if name == "unflatten" else None
            if name == "Unflatten":
                given_dim = self.analysis.traced.root.get_submodule(str(node.target)).dim
            dim = int(given_dim) % before
            new = slice(dim, dim + 1 + len(axes) - before)
            parts = [a.full if w is None else w for a, w in zip(axes[new], widths[new], strict=True)]
            return self.graph.call_method("unflatten", (args[0], dim, tuple(parts)))
        expected = [
            w if w is not None else axis.full if self._follows(source) else g
            for w, axis, source, g in zip(widths, axes, sources, given, strict=True)
        ]
        method = "expand" if name == "expand" else "reshape"
        return self.graph.call_method(method, (args[0], *expected))

    def _follows(self, size: Any) -> bool:  # noqa: ANN401
        """Tell whether a size is computed from that of a sliced dimension."""
        if not isinstance(size, fx.Node) or isinstance(value_of(size), Tensor):
            return False
        if size.op == "call_method" and size.target == "size" and len(size.args) == 2:
            source, dim = cast(tuple[fx.Node, int], size.args)
            return self.builder.axis(self.analysis.of(source)[dim]).sliced
        return any(map(self._follows, size.all_input_nodes))


class _Narrow(nn.Module):
    """Slice the channels of maps [B, C, H, W] where the sliced part of a network begins."""

    def __init__(self, axis: SlicedAxis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        return self.axis.take(x, 1, sizes)

    def extract(self, sizes: Sizes) -> nn.Module:
        return _Narrowed(self.axis, sizes)


class _Narrowed(nn.Module):
    def __init__(self, axis: SlicedAxis, sizes: Sizes) -> None:
        super().__init__()
        self.axis, self.sizes = axis, sizes

    def forward(self, x: Tensor) -> Tensor:
        return self.axis.take(x, 1, self.sizes)


def _flat(values: Sequence[Any]) -> Sequence[Any]:
    return values[0] if len(values) == 1 and isinstance(values[0], list | tuple) else values


def _enter(graph: fx.Graph, x: fx.Node, form: Form) -> fx.Node:
    """Turn maps [B, C, H, W], as blocks pass them, into the layout that the network computes in."""
    if form == "channels_last":
        return graph.call_method("permute", (x, 0, 2, 3, 1))
    if form == "tokens":
        return graph.call_method("transpose", (graph.call_method("flatten", (x, 2)), 1, 2))
    return x


def _leave(graph: fx.Graph, x: fx.Node, form: Form | None) -> fx.Node:
    """Invert `_enter`: tokens [B, N, C] become maps [B, C, N, 1]."""
    if form == "channels_last":
        return graph.call_method("permute", (x, 0, 3, 1, 2))
    if form == "tokens":
        return graph.call_method("unsqueeze", (graph.call_method("transpose", (x, 1, 2)), 3))
    return x


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
        counted = _count(self.body, shape, _sizes(size))
        return counted.cost, Shape(*counted.shape)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract the graph with torch's layers."""
        return _Extraction(self.body, shape, _sizes(size), key, fold_bn=fold_bn).run()

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

    def cost(self, shape: Shape, size: Slice) -> tuple[Cost, Shape]:
        """Count pooling and classifier."""
        cost = _count(self.body, shape, _sizes(size)).cost
        layer = cast(ConvertedLinear, self.classifier)
        return cost + layer.cost(_sizes(size), 1), Shape(layer.out_features, 1, 1)

    def extract(self, shape: Shape, size: Slice, key: int, *, fold_bn: bool) -> nn.Module:
        """Extract pooling and classifier."""
        body = _Extraction(self.body, shape, _sizes(size), key, fold_bn=fold_bn).run()
        return nn.Sequential(body, cast(ConvertedLinear, self.classifier).extract(_sizes(size)))


# --- counting -------------------------------------------------------------------------------------------
class _Counted(NamedTuple):
    cost: Cost
    shape: tuple[int, ...]  # of the output
    sides: dict[str, int]  # heights and widths of maps that the graph computes with, by the node's name


_COUNTS: weakref.WeakKeyDictionary[fx.GraphModule, dict[tuple[Shape, Sizes], _Counted]]
_COUNTS = weakref.WeakKeyDictionary()
PRODUCTS = {"scaled_dot_product_attention", "matmul", "bmm"}  # counted as attention
AVERAGES = {"mean", "AvgPool2d", "AdaptiveAvgPool2d", "avg_pool2d", "adaptive_avg_pool2d"}


def _count(body: fx.GraphModule, shape: Shape, sizes: Sizes) -> _Counted:
    """Count a graph for one image."""
    known = _COUNTS.setdefault(body, {})
    if (shape, sizes) not in known:
        memo: dict[int, Any] = {}
        for tensor in (*body.parameters(), *body.buffers()):
            memo[id(tensor)] = _on_meta(tensor)
        counter = _Counter(copy.deepcopy(body, memo), sizes)
        dtype = next((p.dtype for p in body.parameters()), torch.float32)
        with torch.no_grad():
            output = counter.run(torch.empty(1, *shape, device="meta", dtype=dtype), sizes, 0, None)
        known[shape, sizes] = _Counted(counter.total, tuple(output.shape[1:]), counter.sides)
    return known[shape, sizes]


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class _Counter(fx.Interpreter):
    """Runs a graph on the meta device and adds up the cost of its nodes."""

    def __init__(self, body: fx.GraphModule, sizes: Sizes) -> None:
        super().__init__(body.eval())
        self.sizes, self.total = sizes, Cost()
        self.sides: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401
        inputs = [self.env[arg] for arg in n.all_input_nodes]
        if (
            n.op == "call_method"
            and n.target == "size"
            and n.args[1:] in ((2,), (3,))
            and inputs[0].ndim == 4
        ):
            self.sides[n.name] = super().run_node(n)
            return self.sides[n.name]
        layer = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        if layer is not None and any(True for _ in layer.parameters()) and not hasattr(layer, "cost"):
            flops = FlopCounterMode(display=False)
            with flops:
                result = super().run_node(n)
            weights = sum(p.numel() for p in layer.parameters())
            self.total += Cost(params=weights, layers=flops.get_total_flops() // 2)
            return result
        flops = FlopCounterMode(display=False)
        with flops:
            result = super().run_node(n)
        if layer is not None:
            name = type(layer).__name__
        else:
            name = str(n.target) if n.op == "call_method" else getattr(n.target, "__name__", "")
            if name not in PRODUCTS:  # an operation that is not sliced, such as einsum
                self.total += Cost(layers=flops.get_total_flops() // 2)
        self.total += self._cost(name, layer, inputs, result)
        return result

    def _cost(self, name: str, layer: nn.Module | None, inputs: Sequence[Any], result: Any) -> Cost:  # noqa: ANN401
        if isinstance(layer, ConvertedConv):
            return layer.cost(self.sizes, result.shape[2] * result.shape[3])
        if isinstance(layer, ConvertedLinear):
            return layer.cost(self.sizes, result.numel() // result.shape[-1])
        if isinstance(layer, ConvertedBatchNorm):
            return layer.cost(result.shape[1])
        if isinstance(layer, ConvertedLayerNorm | ConvertedGroupNorm | SlicedTensor):
            return layer.cost(self.sizes)
        if (name in AVERAGES and inputs[0].ndim == 4) or (name == "mean" and inputs[0].ndim == 3):
            return Cost(pools=inputs[0].numel())
        if name == "scaled_dot_product_attention":
            query, key, value = inputs[:3]
            return Cost(attention=query.numel() * key.shape[-2] + result.numel() * value.shape[-2])
        if name in ("matmul", "bmm"):
            return Cost(attention=inputs[0].numel() * inputs[1].shape[-1])
        return Cost()


# --- extraction -----------------------------------------------------------------------------------------
class _Extraction:
    """The graph of one size for images of one shape, of torch's own layers with copies of the weights."""

    def __init__(self, body: fx.GraphModule, shape: Shape, sizes: Sizes, key: int, *, fold_bn: bool) -> None:
        self.body, self.sizes, self.key = body, sizes, key
        self.sides = _count(body, shape, sizes).sides
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
