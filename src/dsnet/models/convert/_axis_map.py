"""What is known about a traced network: the axes of its tensors and weights, and its layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, fx

from dsnet.models.convert._axes import (
    Axis,
    Group,
    axis_of,
    unify,
)
from dsnet.models.convert._tracing import TracedGraph, value_of

__all__ = ["Analysis", "Axes", "Call", "Layer", "whole_axes"]

Axes = list[Axis]  # of a tensor, one for each dimension


class Layer(NamedTuple):
    """A layer with weights.

    Attributes:
        kind: ``conv``, ``linear``, ``batch_norm``, ``layer_norm``, ``group_norm`` or ``whole``.
        name: Name of the module that owns the weights.
        tensors: Names of its weights in the network by role (``weight``, ``bias``, ``mean``, ``var``).
        settings: Arguments that are no tensors.
        groups: The axis of the number of groups of a grouped convolution or group norm, or of the features
            of a layer norm.
    """

    kind: str
    name: str
    tensors: dict[str, str]
    settings: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    groups: Axis | None = None


@dataclass
class Analysis:
    """What is known about a traced network.

    Attributes:
        traced: The network.
        axes: Axes of each node with a tensor; a list of them for nodes with several tensors.
        weights: Axes of each weight, by name.
        layers: The layer of each node that has one.
        sizes: Axes that an argument of a node must follow, by node: where a reshape has an axis with groups,
            its size depends on the route.
    """

    traced: TracedGraph
    axes: dict[fx.Node, Any] = field(default_factory=dict)
    weights: dict[str, Axes] = field(default_factory=dict)
    layers: dict[fx.Node, Layer] = field(default_factory=dict)
    sizes: dict[fx.Node, list[Axis]] = field(default_factory=dict)

    def weight(self, name: str, axes: Axes) -> None:
        """Set the axes of a weight, or unify them with those known."""
        if name in self.weights:
            for known, axis in zip(self.weights[name], axes, strict=True):
                unify(known, axis)
        else:
            self.weights[name] = axes

    def of(self, node: Any) -> Axes:  # noqa: ANN401
        """Return the axes of an argument: of a tensor in the graph, or none for a number."""
        if not isinstance(node, fx.Node):
            return []
        if node not in self.axes:  # a size, or a weight that no rule has read yet
            self.axes[node] = self._initial(node)
        axes: Axes = self.axes[node]
        return axes

    def all_axes(self, node: fx.Node) -> Axes:
        """Return the axes of a node, those of all its tensors if it has several."""
        axes: list[Any] = self.of(node)
        if axes and isinstance(axes[0], list):
            return [axis for tensor in axes for axis in tensor]
        return axes

    def _initial(self, node: fx.Node) -> Axes:
        value = value_of(node)
        if not isinstance(value, Tensor):
            return []
        if node.op == "get_attr" and value.is_floating_point():
            axes = [axis_of(Group(size)) for size in value.shape]
            self.weight(str(node.target), axes)
            return self.weights[str(node.target)]
        return whole_axes(value)  # of indices, masks and other constants


def whole_axes(value: Tensor) -> Axes:
    """Return axes without groups."""
    return [axis_of(size) for size in value.shape]


class Call(NamedTuple):
    """An operation with its arguments by name."""

    analysis: Analysis
    node: fx.Node
    args: dict[str, Any]
    module: str | None  # name of the module that the node calls

    def axes(self, name: str) -> Axes:
        """Return the axes of a tensor argument."""
        return self.analysis.of(self.args[name])

    def layer(self, kind: str, *roles: str, groups: Axis | None = None, **settings: Any) -> None:  # noqa: ANN401
        """Record a layer; ``roles`` are the arguments that are weights."""
        tensors: dict[str, str] = {}
        for role in roles:
            value = self.args.get(role)
            if isinstance(value, fx.Node):
                tensors[role] = str(value.target)
            elif isinstance(value, str):
                tensors[role] = value
        owner = self.module or next(iter(tensors.values()), "").rpartition(".")[0] or self.node.name
        self.analysis.layers[self.node] = Layer(kind, owner, tensors, settings, groups)

    def tensor(self, role: str, axes: Axes) -> None:
        """Set the axes of a weight, which is a node of the graph or a name in the network."""
        value = self.args.get(role)
        if isinstance(value, fx.Node):
            value = str(value.target)
        if isinstance(value, str):
            self.analysis.weight(value, axes)

    def computes(self, *roles: str) -> bool:
        """Tell whether a weight is computed by the network instead of being one of its tensors."""
        values = [self.args.get(role) for role in roles]
        return any(isinstance(value, fx.Node) and value.op != "get_attr" for value in values)

    @property
    def result(self) -> Tensor:
        """The value for the example."""
        value: Tensor = value_of(self.node)
        return value
