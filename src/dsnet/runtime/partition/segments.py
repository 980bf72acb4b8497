"""Segments: a supernet split into a prefix that every image runs, and a segment behind every choice.

A segment is a plain module. The prefix and the segments that end at a gate return the features that the gate
has scaled, and its scores; the others end the network and return logits. Packed segments hold the weights of
all routes, contiguous and with batch norms folded.

There is a segment for each pair of a gate's choice and the choice before it, or one that choices before
share, for features as wide as the widest of them (`find_shared_segments`). If norms depend on earlier choices
too, they are not folded, and a segment takes the index [B] of each image's routing history as its second
input.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.gate import InferenceGate, RoutingInferenceGate
from dsnet.models import Supernet
from dsnet.models.blocks import Step, run_steps
from dsnet.runtime.partition.per_image_norm import Affine, by_history
from dsnet.slicing import ImageStatistics, Mode

__all__ = [
    "SharedHead",
    "SegmentKey",
    "Segment",
    "canonical_key",
    "find_shared_segments",
    "in_precision",
    "pack",
    "segment_key",
    "segment_histories",
    "share",
    "weight_bytes",
]

SegmentKey = tuple[int, ...]  # the choices that lead through a segment; () is the prefix


class Segment(NamedTuple):
    """A segment.

    Attributes:
        module: Its module.
        shape: The shape of the features, or image, that it reads.
        histories: How many routing histories its norms tell apart.
    """

    module: nn.Module
    shape: Shape
    histories: int = 1

    def example(self, images: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return random inputs."""
        x = torch.randn(images, *self.shape, generator=generator)
        return (x, torch.zeros(images, dtype=torch.long)) if self.histories > 1 else (x,)


class SharedHead(NamedTuple):
    """A module behind all segments. It reads rows [B, numbers] and the index [B] of each image's choice."""

    module: nn.Module
    numbers: int


class ToGate(nn.Module):
    """Blocks and a gate: features → (scaled features, scores)."""

    def __init__(self, body: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.body, self.gate = body, gate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], self.gate(self.body(x)))


class ToLogits(nn.Module):
    """Blocks and the classifier."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(x)))


class SlicedSegment(nn.Module):
    """A segment that runs slices of a supernet's weights."""

    def __init__(self, network: Supernet, history: SegmentKey, histories: Sequence[SegmentKey]) -> None:
        super().__init__()
        self.network, self.history = network, history
        self.training = network.training
        self.keys = torch.tensor([network.key(h) for h in histories if h])  # the prefix has none
        self.choices = None if len(history) == len(network.gates) else network.gate(len(history)).choices

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        network, gate = self.network, len(self.history)
        if network.training or (self.choices is not None and network.gate(gate).choices != self.choices):
            change = "is in training mode" if network.training else "has other routing heads"
            raise DsnetError(
                f"the network that this plan shares {change} now; call .eval(), or compile again"
            )
        mode = None if index is None else Mode(images=ImageStatistics(self.keys.to(index.device)[index]))
        y = network.segment_output(x, self.history, mode) if gate else run_steps(network.chain(()), x)
        if gate == len(network.gates):
            return y
        state = network.apply_gate(gate, y)
        return state.x, network.gate_scores(state)


def canonical_key(history: SegmentKey) -> SegmentKey:
    """Return the key of the segment for a routing history: its last two choices matter."""
    return (0,) * (len(history) - 2) + history[-2:] if len(history) > 2 else history


def segment_key(gate: int, previous: int, choice: int) -> SegmentKey:
    """Return the key of the segment behind a gate's choice and the choice before it."""
    return (*(0,) * (gate - 1), previous, choice) if gate else (choice,)


def segment_histories(
    model: Supernet,
    options: Sequence[Sequence[int]],
    shared_segments: Mapping[SegmentKey, SegmentKey] | None = None,
) -> dict[SegmentKey, list[SegmentKey]]:
    """Return the segments of all routes with these choices, prefix first.

    Args:
        model: The network.
        options: Choices by gate.
        shared_segments: See `find_shared_segments`.

    Returns:
        The routing histories that each segment's norms tell apart; one history if they are all alike.
    """
    histories: dict[SegmentKey, list[SegmentKey]] = {(): [()]}
    for gates in range(1, len(options) + 1):
        for history in itertools.product(*options[:gates]):
            key = canonical_key(history)
            members = histories.setdefault((shared_segments or {}).get(key, key), [])
            if not members or not model.merges:
                members.append(history)
    return histories


def find_shared_segments(
    model: Supernet, options: Sequence[Sequence[int]], *, image_size: int | tuple[int, int] | None = None
) -> dict[SegmentKey, SegmentKey]:
    """Return segments that choices before can share.

    Behind some gates, segments of one choice differ only in norms and in how many channels they read. Then
    the segment behind the widest choice before serves all of them: padded with zeros, narrower features give
    the same result.

    Returns:
        The segment that serves each segment, itself included. Gates where segments cannot be shared have
        none.
    """
    shared: dict[SegmentKey, SegmentKey] = {}
    if len(options) == 1:
        return shared
    shapes = _input_shapes(model, options, image_size)
    for gates, choices in enumerate(options[1:], start=2):
        groups = [[key for key in shapes if len(key) == gates and key[-1] == choice] for choice in choices]
        if all(len(keys) > 1 and _differ_in_channels_read(model, keys, shapes) for keys in groups):
            for keys in groups:
                widest = max(keys, key=lambda key: shapes[key].channels)
                shared |= dict.fromkeys(keys, widest)
    return shared


def _differ_in_channels_read(
    model: Supernet, keys: Sequence[SegmentKey], shapes: Mapping[SegmentKey, Shape]
) -> bool:
    """Return whether segments differ only in norms and in the channels that their first convolutions read."""
    chains = [[(step.block, step.size) for step in model.chain(key)] for key in keys]
    maps = {(shapes[key].height, shapes[key].width) for key in keys}
    if len(maps) > 1 or not chains[0] or any(chain != chains[0] for chain in chains):
        return False
    block, size, norm_key = model.chain(keys[0])[0]
    traced = fx.symbolic_trace(block.extract(shapes[keys[0]], size, norm_key, fold_bn=False))
    (x,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    readers = [traced.get_submodule(str(node.target)) for node in x.users if node.op == "call_module"]
    return len(readers) == len(x.users) and all(
        isinstance(reader, nn.Conv2d) and reader.groups == 1 for reader in readers
    )


def pack(
    model: Supernet,
    options: Sequence[Sequence[int]],
    *,
    shared_segments: Mapping[SegmentKey, SegmentKey] | None = None,
    image_size: int | tuple[int, int] | None = None,
    precision: torch.dtype | None = None,
    device: torch.device | None = None,
) -> dict[SegmentKey, Segment]:
    """Copy the weights of all segments.

    Args:
        model: The network.
        options: Choices by gate.
        shared_segments: See `find_shared_segments`.
        image_size: Height and width, or one number for both (default: the network's).
        precision: The precision of weights (default: the network's); gates stay in float32 or better.
        device: The device of the copies (default: the network's).
    """
    shapes, segments = _input_shapes(model, options, image_size), dict[SegmentKey, Segment]()
    for key, histories in segment_histories(model, options, shared_segments).items():
        modules = [_packed(model, histories[0], shapes[key], fold=len(histories) == 1)]
        for history in histories[1:]:  # only their norms are used: do not keep many copies of the weights
            modules.append(_without_weights(_packed(model, history, shapes[key], fold=False)))
        module = modules[0] if len(modules) == 1 else by_history(modules)
        segments[key] = Segment(in_precision(module.to(device), precision), shapes[key], len(histories))
    return segments


def _without_weights(module: nn.Module) -> nn.Module:
    for child in module.modules():
        if isinstance(child, nn.Conv2d | nn.Linear):
            child.to("meta")
    return module


def _packed(model: Supernet, history: SegmentKey, shape: Shape, *, fold: bool) -> nn.Module:
    body, output = _extract(model.chain(history), shape, fold=fold)
    if len(history) < len(model.gates):
        return ToGate(body, model.gate(len(history)).extract_with_routing(output.channels)).eval()
    block, size, key = model.head_step(history)
    return ToLogits(body, block.extract(output, size, key, fold_bn=fold)).eval()


def share(
    model: Supernet, options: Sequence[Sequence[int]], *, image_size: int | tuple[int, int] | None = None
) -> dict[SegmentKey, Segment]:
    """Return all segments as slices of the supernet's own weights."""
    shapes = _input_shapes(model, options, image_size)
    return {
        key: Segment(SlicedSegment(model, histories[0], histories), shapes[key], len(histories))
        for key, histories in segment_histories(model, options).items()
    }


def _input_shapes(
    model: Supernet, options: Sequence[Sequence[int]], image_size: int | tuple[int, int] | None
) -> dict[SegmentKey, Shape]:
    """Return the shape of the features that each segment reads."""
    for choices in itertools.product(*options):
        model.require_statistics(model.space.of_choices(choices))
    inputs: dict[SegmentKey, Shape] = {(): model.input_spec.shape(image_size)}
    outputs: dict[SegmentKey, Shape] = {}
    for key, histories in segment_histories(model, options).items():
        if key:  # a key may contain choices that are not among the options, its histories do not
            inputs[key] = outputs[canonical_key(histories[0][:-1])]
        shape = inputs[key]
        for block, size, _ in model.chain(key):
            _, shape = block.cost(shape, size)
        outputs[key] = shape
    return inputs


def _extract(steps: Iterable[Step], shape: Shape, *, fold: bool) -> tuple[nn.Sequential, Shape]:
    """Extract blocks and return them with the shape of their output."""
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (block, size, key) in enumerate(steps):
        blocks[f"block{number}"] = block.extract(shape, size, key, fold_bn=fold)
        _, shape = block.cost(shape, size)
    return nn.Sequential(blocks), shape


def in_precision(module: nn.Module, precision: torch.dtype | None) -> nn.Module:
    """Convert a module for inference; gates, and scales of channels, stay in float32 or better."""
    module.requires_grad_(False)
    if precision is None:
        return module
    gates = [child for child in module.modules() if isinstance(child, InferenceGate | RoutingInferenceGate)]
    kept = [next(gate.parameters()).dtype for gate in gates]
    tables = {child: child.table for child in module.modules() if isinstance(child, Affine)}
    module.to(precision)
    for child, table in tables.items():
        child.table = table if precision != torch.float64 else table.double()
    for gate, dtype in zip(gates, kept, strict=True):
        gate.to(dtype if dtype == torch.float64 else torch.float32)
    return module


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Count the bytes of parameters and buffers; those that modules share count once."""
    sizes: dict[int, int] = {}
    for module in modules:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
