"""Cut a traced network into a chain of blocks, each of which passes one tensor on to the next.

A cut is a place that one tensor crosses alone. Consecutive pieces that belong to one module of the network,
such as a residual block, become one block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, fx, nn

from dsnet.errors import DsnetError
from dsnet.models.convert._axes import groups_of, resolve
from dsnet.models.convert._axis_map import Analysis
from dsnet.models.convert._tracing import value_of

__all__ = ["Form", "Piece", "cut"]

Form = Literal["maps", "channels_last", "tokens"]
"""The layout of a tensor between blocks: [B, C, H, W], [B, H, W, C] or [B, N, C]."""

ATTACHED = {  # operations that belong to what precedes them
    "batch_norm", "BatchNorm2d", "relu", "relu_", "ReLU", "relu6", "ReLU6", "silu", "SiLU", "gelu", "GELU",
    "GELUTanh", "hardswish", "Hardswish", "Hardsigmoid", "sigmoid", "Sigmoid", "leaky_relu", "LeakyReLU",
    "ELU", "Mish", "tanh", "Tanh", "Hardtanh", "PReLU", "Softplus", "Identity", "Dropout", "contiguous",
}  # fmt: skip
NORMS = {"batch_norm", "BatchNorm2d"}
POOLS = {
    "AdaptiveAvgPool2d",
    "AdaptiveMaxPool2d",
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "mean",
    "amax",
}


@dataclass(eq=False)
class Piece:
    """A part of the network between two cuts.

    Attributes:
        name: Name of its module in the network, or of its first layer.
        entry: The node whose value it reads.
        exit: The node whose value it passes on.
        nodes: Its nodes, without `entry`.
        entry_form: Layout of the value that it reads.
        exit_form: Layout of the value that it passes on.
        residual: Whether it adds something to its input, so that it can be left out.
    """

    name: str
    entry: fx.Node
    exit: fx.Node
    nodes: list[fx.Node]
    entry_form: Form
    exit_form: Form | None
    residual: bool = False

    @property
    def stride(self) -> int:
        """Factor by which the resolution shrinks; 1 where tokens are made or passed on."""
        if self.exit_form is None or "tokens" in (self.entry_form, self.exit_form):
            return 1
        before, after = (_height(node, form) for node, form in self._ends())
        return max(1, round(before / after))

    def _ends(self) -> list[tuple[fx.Node, Form]]:
        assert self.exit_form is not None
        return [(self.entry, self.entry_form), (self.exit, self.exit_form)]


def _height(node: fx.Node, form: Form) -> int:
    return int(value_of(node).shape[2 if form == "maps" else 1])


def operation(analysis: Analysis, node: fx.Node) -> str:
    """Return the name of a node's operation or of its module's class."""
    if node.op == "call_module":
        return type(analysis.traced.root.get_submodule(str(node.target))).__name__
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def cut(analysis: Analysis) -> tuple[list[Piece], Piece]:
    """Cut a network into blocks and a head.

    Returns:
        The blocks in order, and the head: from the last feature maps or tokens to the logits.

    Raises:
        DsnetError: The network cannot be cut at all, or does not end with a linear layer.
    """
    output = _last_layer(analysis)
    if output not in analysis.layers or analysis.layers[output].kind != "linear":
        raise DsnetError(
            f"the network ends with {operation(analysis, output) or output.name}, not with a linear layer "
            "from features to logits; wrap it so that its classifier is an nn.Linear at the end"
        )
    nodes = [n for n in analysis.traced.graph.nodes if n.op not in ("get_attr", "output")]
    cuts = _cuts(analysis, nodes)
    position = {node: number for number, node in enumerate(nodes)}
    pools = [position[n] for n in nodes if operation(analysis, n) in POOLS and n.args[0] in cuts]
    if pools:
        cuts = [node for node in cuts if position[node] < pools[-1]]
    if len(cuts) < 3:
        raise DsnetError(
            "the network cannot be split into blocks: no tensor leads alone from one part of it to the next "
            "(its branches stay separate to the end)"
        )
    pieces = [_piece(analysis, nodes, position, a, b) for a, b in itertools.pairwise(cuts)]
    head = _piece(analysis, nodes, position, cuts[-1], output)
    return _merged(analysis, pieces), head


def _last_layer(analysis: Analysis) -> fx.Node:
    """Return the node of the logits, without dropout and placeholders behind the last layer."""
    node = analysis.traced.output
    while operation(analysis, node) in ("Identity", "Dropout", "dropout"):
        (node,) = node.all_input_nodes
    return node


def _cuts(analysis: Analysis, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the image and the nodes whose value alone crosses to what follows."""
    position = {node: number for number, node in enumerate(nodes)}
    last_use = {
        node: max((position.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes
    }
    live: set[fx.Node] = set()
    cuts = []
    for number, node in enumerate(nodes):
        live = {other for other in live if last_use[other] > number}
        if last_use[node] > number:
            live.add(node)
        if live == {node} and _form(analysis, node) is not None and not _continues(analysis, node):
            cuts.append(node)
    return cuts


def _continues(analysis: Analysis, node: fx.Node) -> bool:
    """Tell whether a norm or an activation follows, which belongs to the layer before it."""
    users = list(node.users)
    return len(users) == 1 and operation(analysis, users[0]) in ATTACHED and node.op != "placeholder"


def _form(analysis: Analysis, node: fx.Node) -> Form | None:
    """Return the layout of a node's value, or None if blocks cannot pass it on."""
    if not isinstance(value_of(node), Tensor):
        return None
    axes = analysis.of(node)
    if len(axes) not in (3, 4):
        return None
    has_groups = [any(True for _ in groups_of(axis)) for axis in axes]
    if len(axes) == 4:
        return "channels_last" if has_groups[3] and not has_groups[1] else "maps"
    return "tokens" if has_groups[2] and not has_groups[1] else None


def _piece(
    analysis: Analysis, nodes: Sequence[fx.Node], position: dict[fx.Node, int], entry: fx.Node, end: fx.Node
) -> Piece:
    between = list(nodes[position[entry] + 1 : position[end] + 1])
    form = _form(analysis, entry)
    assert form is not None
    layers = [analysis.layers[node].name for node in between if node in analysis.layers]
    return Piece(
        name=_container(analysis, layers) or (layers[0] if layers else between[0].name),
        entry=entry,
        exit=end,
        nodes=between,
        entry_form=form,
        exit_form=_form(analysis, end),
        residual=_is_residual(analysis, entry, end),
    )


def _container(analysis: Analysis, layers: Iterable[str]) -> str:
    """Return the innermost element of a list of modules that holds all these layers, and more than one."""
    common: str | None = None
    for name in layers:
        parts = name.split(".")
        inner = ""
        for depth in range(1, len(parts)):
            path, parent = ".".join(parts[:depth]), ".".join(parts[: depth - 1])
            listed = isinstance(analysis.traced.root.get_submodule(parent), nn.Sequential | nn.ModuleList)
            if listed and _num_layers(analysis.traced.root.get_submodule(path)) > 1:
                inner = path
        if common is not None and inner != common:
            return ""
        common = inner
    return common or ""


def _num_layers(module: nn.Module) -> int:
    return sum(isinstance(m, nn.Conv2d | nn.Linear) for m in module.modules())


def _is_residual(analysis: Analysis, entry: fx.Node, end: fx.Node) -> bool:
    """Tell whether the last node's value is the input plus something, up to activations."""
    if [resolve(a) for a in analysis.of(entry)] != [resolve(a) for a in analysis.of(end)]:
        return False
    seen, stack, added = set[fx.Node](), [(end, False)], False
    while stack:
        node, added = stack.pop()
        if node is entry:
            return added
        if node in seen:
            continue
        seen.add(node)
        name = operation(analysis, node)
        if name in ("add", "iadd", "add_"):
            stack += [(arg, True) for arg in node.args if isinstance(arg, fx.Node)]
        elif name in ATTACHED - NORMS:
            stack += [(arg, added) for arg in node.args[:1] if isinstance(arg, fx.Node)]
    return False


def _merged(analysis: Analysis, pieces: Sequence[Piece]) -> list[Piece]:
    """Join consecutive pieces of the same module, and steps without weights with a neighbour."""
    pieces = _without_steps(analysis, pieces)
    merged: list[Piece] = []
    for piece in pieces:
        layers = [analysis.layers[node].name for node in piece.nodes if node in analysis.layers]
        if merged and merged[-1].name == piece.name and _container(analysis, layers):
            merged.append(_joined(merged.pop(), piece))
        else:
            merged.append(piece)
    return merged


def _without_steps(analysis: Analysis, pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that only change layouts with the next piece, or the one before, that is not residual."""
    result: list[Piece] = []
    waiting: Piece | None = None
    for number, piece in enumerate(pieces):
        if waiting is not None:
            piece, waiting = _joined(waiting, piece), None
        is_step = piece.stride == 1 and not any(node in analysis.layers for node in piece.nodes)
        following = pieces[number + 1] if number + 1 < len(pieces) else None
        if is_step and following is not None and not following.residual:
            waiting = piece
        elif is_step and result and not result[-1].residual:
            result.append(_joined(result.pop(), piece))
        else:
            result.append(piece)
    return result


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(
        name=first.name if first.name in second.name or "." in first.name else second.name,
        entry=first.entry,
        exit=second.exit,
        nodes=[*first.nodes, *second.nodes],
        entry_form=first.entry_form,
        exit_form=second.exit_form,
        residual=first.residual and second.residual,
    )
