"""Build graphs that run with slices of a network's weights, from pieces of the traced graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from dsnet.models.convert._axes import Axis, Group, resolve
from dsnet.models.convert._axis_map import Analysis, Layer
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

__all__ = ["Builder"]

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
        """Build the sliced form of a layer, with a copy of its weights."""
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
