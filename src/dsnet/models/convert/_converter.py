"""The steps of a conversion: where the gate is, what is sliced, how wide, and the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.errors import DsnetError, printable, shorten
from dsnet.models.blocks import count_steps
from dsnet.models.convert._axes import Axis, Group, groups_of, resolve
from dsnet.models.convert._axis_map import Analysis
from dsnet.models.convert._blocks import GraphBlock, GraphHead
from dsnet.models.convert._builder import Builder
from dsnet.models.convert._chain import Piece, cut
from dsnet.models.convert._importance import activation_scales, channel_order, sorted_weights
from dsnet.models.convert._tracing import value_of
from dsnet.models.convert.network import ConvertedNetwork, Parts
from dsnet.models.convert.options import ConvertOptions
from dsnet.models.convert.report import Conversion, GroupReport
from dsnet.models.input_spec import InputSpec
from dsnet.routes import Slice
from dsnet.slicing import Factory

__all__ = ["Converter"]

GATE_SHARE = 0.25  # of the cost of the largest route, spent in front of the gate


class Converter:
    """The steps of a conversion, which need each other's results."""

    def __init__(self, analysis: Analysis, network: nn.Module, options: ConvertOptions) -> None:
        self.analysis, self.network, self.options = analysis, network, options
        self.blocks, self.head = cut(analysis)
        self.weights = dict(network.state_dict(keep_vars=True)) | _constants(analysis)
        self.madds = self._madds()
        self.gate = self._gate()
        self.stages = self._stages()
        self.names = self._names()
        self.groups = self._sliceable()
        self.widths = self._widths()
        self.kept = self._kept()

    # --- where the gate is -----------------------------------------------------------------------------
    def _madds(self) -> list[int]:
        """Return the multiply-adds of each block and of the head, by the shapes of the example."""
        return [sum(map(self._node_madds, piece.nodes)) for piece in (*self.blocks, self.head)]

    def _node_madds(self, node: Any) -> int:  # noqa: ANN401
        layer = self.analysis.layers.get(node)
        if layer is None or layer.kind not in ("conv", "linear"):
            return 0
        weight, result = self.weights[layer.tensors["weight"]], value_of(node)
        channels = result.shape[1] if layer.kind == "conv" else result.shape[-1]
        return int(weight.numel() * (result[0].numel() // channels))

    def _gate(self) -> int:
        """Return the number of blocks in front of the gate."""
        last = len(self.blocks) - 1  # the last position with a block behind it
        if last < 1:
            raise DsnetError("the network has too few blocks for a gate between them")
        if self.options.gate is None:
            total, spent, costs = sum(self.madds), 0, []
            for madds in self.madds[:last]:
                spent += madds
                costs.append(abs(spent - GATE_SHARE * total))
            return costs.index(min(costs)) + 1
        name = self.options.gate
        matching = [
            i + 1 for i, b in enumerate(self.blocks) if b.name == name or b.name.startswith(f"{name}.")
        ]
        possible = ", ".join(block.name for block in self.blocks[:last])
        if not matching or matching[-1] > last:
            raise DsnetError(f"there is no place for a gate behind {shorten(name)}; possible: {possible}")
        return matching[-1]

    def _stages(self) -> list[list[Piece]]:
        """Return the blocks behind the gate, split where the resolution changes."""
        stages: list[list[Piece]] = [[]]
        for piece in self.blocks[self.gate :]:
            if piece.stride > 1 and stages[-1]:
                stages.append([])
            stages[-1].append(piece)
        return stages

    # --- what is sliced --------------------------------------------------------------------------------
    def _names(self) -> dict[Group, tuple[str, list[str]]]:
        """Return the name of each group that weights have, and its layers."""
        layers: dict[Group, list[str]] = {}
        written: dict[Group, str] = {}
        for name, axes in self.analysis.weights.items():
            owner = name.rpartition(".")[0] or name
            for dim, axis in enumerate(axes):
                for group in _reported(axis):
                    if owner not in layers.setdefault(group, []):
                        layers[group].append(owner)
                    if dim == 0:
                        written.setdefault(group, owner)
        used: dict[str, int] = {}
        result = {}
        for group, owners in layers.items():
            name = written.get(group, owners[0])
            used[name] = used.get(name, 0) + 1
            result[group] = (name if used[name] == 1 else f"{name}#{used[name]}", owners)
        return result

    def _sliceable(self) -> list[Group]:
        """Decide which groups are sliced; the others get a reason."""
        behind = self._groups_in([piece for stage in self.stages for piece in stage] + [self.head])
        front = self._groups_in(self.blocks[: self.gate])
        explicit = set[str]().union(*(self.options.table or ()))
        unknown = sorted(explicit - {name for name, _ in self.names.values()})
        for group, (name, _) in self.names.items():
            if group.reason is not None:
                pass
            elif group not in behind:
                group.reason = "in front of the gate"
            elif group in front and not group.summed:
                group.reason = "crosses the gate"
            elif group.summed and self.options.residual is None and name not in explicit:
                group.reason = "residual stream"
            if name in explicit and group.reason is not None:
                raise DsnetError(f"table: {name} cannot be sliced: {group.reason}")
        sliced = [group for group in self.names if group.reason is None]
        if unknown:
            possible = printable(", ".join(self.names[group][0] for group in sliced), 600)
            raise DsnetError(f"table: no channel group {', '.join(unknown)}; possible: {possible}")
        return sliced

    def _groups_in(self, pieces: Sequence[Piece]) -> set[Group]:
        groups: set[Group] = set()
        for piece in pieces:
            for node in piece.nodes:
                layer = self.analysis.layers.get(node)
                names = [] if layer is None else list(layer.tensors.values())
                names += [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
                for name in names:
                    for axis in self.analysis.weights.get(name, []):
                        groups.update(groups_of(axis))
        return groups

    def _widths(self) -> dict[Group, tuple[int, ...]]:
        """Return the width of each sliced group on every route."""
        hidden, residual = self.options.shares("widths"), self.options.shares("residual")
        table: Sequence[Mapping[str, int]] = self.options.table or [{}] * self.options.routes
        widths = {}
        for group in self.groups:
            shares = residual if group.summed else hidden
            name, _ = self.names[group]
            row = [entry.get(name, _width(group.size, s)) for s, entry in zip(shares, table, strict=True)]
            if max(row) > group.size:
                raise DsnetError(
                    f"table: {name} has {group.size} channels, a width of {max(row)} is not possible"
                )
            widths[group] = tuple(row)
        return widths

    def _kept(self) -> list[list[list[int]]]:
        """Return the blocks of each stage that every route runs."""
        return [
            [_blocks_kept(stage, share) for stage in self.stages] for share in self.options.shares("depths")
        ]

    # --- the network -----------------------------------------------------------------------------------
    def build(self, example: Tensor, batches: Iterable[Tensor] | None, *, sort: bool) -> ConvertedNetwork:
        """Sort the channels, build the blocks, and assemble the supernet."""
        weights: Mapping[str, Tensor] = self.weights
        if sort and self.groups and not example.is_meta:
            scales = None if batches is None else activation_scales(self.analysis, batches)
            order = channel_order(self.analysis, weights, self.groups, scales)
            weights = sorted_weights(self.analysis, weights, order)
        weights = {name: _copied(tensor) for name, tensor in weights.items()}
        rows = self._rows(weights)
        options, name = self.options, self.options.name or type(self.network).__name__.lower()
        parts, sizes, kept = rows
        parts = parts._replace(kept=kept)
        depths = tuple(len(parts.prefix) + sum(map(len, row)) for row in kept)
        factory = Factory(device=example.device, dtype=example.dtype)
        model = ConvertedNetwork(
            parts,
            sizes,
            name=name,
            input_spec=self._input_spec(example),
            options=replace(options, in_channels=example.shape[1]),
            factory=factory,
            conversion=self._report(depths),
        )
        return model.eval()

    def _rows(self, weights: Mapping[str, Tensor]) -> tuple[Parts, list[list[Slice]], list[list[list[int]]]]:
        """Build the blocks; return them with the sizes and the blocks of each route, cheapest first."""
        routes = self.options.routes
        prefix_builder = Builder(self.analysis, weights, {}, 1)
        prefix = [_block(prefix_builder, piece) for piece in self.blocks[: self.gate]]
        stages, groups = [], []
        for number, stage in enumerate(self.stages):
            members = [*stage, self.head] if number == len(self.stages) - 1 else stage
            used = self._groups_in(members)
            entry = self.analysis.of(stage[0].entry)
            if number == 0:
                used |= set(groups_of(entry[_channel_dim(stage[0])]))
            stage_groups = [group for group in self.groups if group in used]
            groups.append(stage_groups)
            builder = Builder(self.analysis, weights, {g: i for i, g in enumerate(stage_groups)}, routes)
            blocks = [_block(builder, p, narrow=number == i == 0) for i, p in enumerate(stage)]
            stages.append(blocks)
        head = self._head(builder)
        sizes = [
            [
                Slice(
                    width=self._stage_width(stage, route),
                    depth=len(kept),
                    groups=tuple(self.widths[group][route] for group in stage_groups) or None,
                )
                for stage, stage_groups, kept in zip(self.stages, groups, self.kept[route], strict=True)
            ]
            for route in range(routes)
        ]
        entry_node = self.stages[0][0].entry
        gate_width = value_of(entry_node).shape[_channel_dim(self.stages[0][0])]
        parts = Parts(prefix, stages, head, gate_width, self.kept)
        order = self._by_cost(parts, sizes)
        for group, widths in self.widths.items():
            self.widths[group] = tuple(widths[route] for route in order)
        return parts, [sizes[route] for route in order], [self.kept[route] for route in order]

    def _by_cost(self, parts: Parts, sizes: Sequence[Sequence[Slice]]) -> list[int]:
        """Return the routes from the cheapest to the whole network, without repetitions."""
        shape = Shape(*self._gate_shape())
        costs = {}
        seen = set()
        for route, row in enumerate(sizes):
            key = (tuple(row), tuple(map(tuple, self.kept[route])))
            if key in seen:
                continue
            seen.add(key)
            steps = [
                (stage[position], size, 0)
                for stage, size, kept in zip(parts.stages, row, self.kept[route], strict=True)
                for position in kept
            ]
            cost, _ = count_steps([*steps, (parts.head, row[-1], 0)], shape)  # type: ignore[list-item]
            costs[route] = cost.madds("all")
        order = sorted(costs, key=lambda route: (costs[route], route))
        whole = all(self.widths[g][order[-1]] == g.size for g in self.groups)
        if not whole or any(len(k) != len(s) for k, s in zip(self.kept[order[-1]], self.stages, strict=True)):
            raise DsnetError("table: the largest route must be the whole network: give it the full widths")
        return order

    def _gate_shape(self) -> tuple[int, int, int]:
        """Return the shape of one image's features at the gate, as blocks pass them on."""
        piece = self.stages[0][0]
        shape = value_of(piece.entry).shape
        if piece.entry_form == "maps":
            return tuple(shape[1:])
        if piece.entry_form == "channels_last":
            return shape[3], shape[1], shape[2]
        return shape[2], shape[1], 1

    def _stage_width(self, stage: Sequence[Piece], route: int) -> int:
        """Return the channels of a stage's output on a route."""
        piece = stage[-1]
        axis = self.analysis.of(piece.exit)[_channel_dim(piece, at_exit=True)]
        total = 0
        for term in resolve(axis):
            sizes = [
                f if isinstance(f, int) else self.widths.get(f, (f.size,) * (route + 1))[route] for f in term
            ]
            total += math.prod(sizes)
        return total

    def _head(self, builder: Builder) -> GraphHead:
        """Build the head: its graph up to the classifier, and the classifier."""
        (*nodes, last) = self.head.nodes
        layer = self.analysis.layers[last]
        source = last.all_input_nodes[0]
        body = Piece(
            name=self.head.name,
            entry=self.head.entry,
            exit=source,
            nodes=list(nodes),
            entry_form=self.head.entry_form,
            exit_form=None,
        )
        classifier: Any = builder.layer(layer)
        return GraphHead(builder.body(body), classifier)

    def _input_spec(self, example: Tensor) -> InputSpec:
        """Return the images that the converted network takes."""
        stride = math.prod(piece.stride for piece in self.blocks)
        height, width = example.shape[2:]
        if height != width:
            raise DsnetError(f"the example must be square, not {height} × {width}")
        if self._is_fixed(stride, height):
            return InputSpec(image_size=height, stride=height, smallest=height, fixed=True)
        return InputSpec(image_size=height, stride=stride)

    def _is_fixed(self, stride: int, side: int) -> bool:
        """Tell whether the network runs at the example's size only, by running it at another one."""
        if side % stride or any(piece.entry_form == "tokens" for piece in self.blocks):
            return True
        graph = torch.fx.GraphModule(self.network, self.analysis.traced.graph)
        example = value_of(next(iter(self.analysis.traced.graph.nodes)))
        other = example.new_zeros(1, example.shape[1], side + stride, side + stride)
        if not other.is_meta:
            other.normal_(generator=torch.Generator(other.device).manual_seed(0))
        try:
            with torch.no_grad():
                ours, theirs = graph.forward(other), self.network(other)
        except Exception:
            return True
        return not (ours.is_meta or torch.equal(ours, theirs))

    def _report(self, depths: tuple[int, ...]) -> Conversion:
        groups = tuple(
            GroupReport(
                name=name,
                layers=tuple(layers),
                channels=group.size,
                widths=self.widths.get(group, (group.size,) * self.options.routes),
                reason=group.reason,
            )
            for group, (name, layers) in self.names.items()
            if group.reason != ""
        )
        return Conversion(groups=groups, gate=self.blocks[self.gate - 1].name, depths=depths)


def _reported(axis: Axis) -> Iterator[Group]:
    """Yield the groups of an axis, and those that an operation turned into a number for a reason."""
    known = list(groups_of(axis))
    yield from known
    for group in (factor for term in axis for factor in term if isinstance(factor, Group)):
        if group.reason and group.resolved is not None and not any(True for _ in groups_of(((group,),))):
            yield group


def _channel_dim(piece: Piece, *, at_exit: bool = False) -> int:
    form = piece.exit_form if at_exit else piece.entry_form
    return {"maps": 1, "channels_last": 3, "tokens": 2}[form or "maps"]


def _block(builder: Builder, piece: Piece, *, narrow: bool = False) -> GraphBlock:
    axis = builder.analysis.of(piece.entry)[_channel_dim(piece)] if narrow else None
    return GraphBlock(builder.body(piece, axis), name=piece.name, stride=piece.stride)


def _width(size: int, share: float) -> int:
    """Return a share of channels, in steps of 8 where there are many."""
    step = 8 if size % 8 == 0 and size >= 32 else 1
    return min(size, max(step, round(size * share / step) * step))


def _blocks_kept(stage: Sequence[Piece], share: float) -> list[int]:
    """Return the blocks of a stage that run: the last residual blocks are left out first."""
    residual = [number for number, piece in enumerate(stage) if piece.residual]
    dropped = set(residual[len(residual) - round(len(residual) * (1 - share)) :] if share < 1 else [])
    if len(dropped) == len(stage):
        dropped.discard(0)
    return [number for number in range(len(stage)) if number not in dropped]


def _constants(analysis: Analysis) -> dict[str, Tensor]:
    """Return tensors that the traced code made, which are not in the state of the network."""
    return {
        str(node.target): value_of(node)
        for node in analysis.traced.graph.nodes
        if node.op == "get_attr" and isinstance(value_of(node), Tensor)
    }


def _copied(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
