"""A supernet taken apart for a device: the front that every image runs, and a part for every choice.

A part is a plain module. The front and the parts that end at a gate give the features that the gate has
scaled and its scores; those that end the network give logits. Together they hold every weight of every route
that the gates can take, packed: contiguous, batch norms folded. A part belongs to a gate's choice and the one
before it, or to a gate's choice alone, for features as wide as any choice before (`find_shared_segments`).
Where norms depend on choices before these, too, it takes the number of each image's history as a second input
and its norms are not folded.
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
from dsnet.gate import InferenceGate
from dsnet.models import Supernet
from dsnet.models.blocks import Step, run_steps
from dsnet.runtime.partition.per_image_norm import Scaled, by_history
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

SegmentKey = tuple[int, ...]  # the choices that lead through a part; none: the front


class Segment(NamedTuple):
    """A module, the shape of what one image gives it, and how many histories its norms tell apart."""

    module: nn.Module
    shape: Shape
    histories: int = 1

    def example(self, images: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Inputs for so many images."""
        x = torch.randn(images, *self.shape, generator=generator)
        return (x, torch.zeros(images, dtype=torch.long)) if self.histories > 1 else (x,)


class SharedHead(NamedTuple):
    """What is behind all parts: of a row of so many numbers an image and the places [B] of their choices."""

    module: nn.Module
    numbers: int


class ToGate(nn.Module):
    """Blocks, then a gate: features → (scaled features, scores)."""

    def __init__(self, body: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.body, self.gate = body, gate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], self.gate(self.body(x)))


class ToLogits(nn.Module):
    """Blocks, then the classifier."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(x)))


class SlicedSegment(nn.Module):
    """A part that runs slices of a supernet's weights."""

    def __init__(self, network: Supernet, history: SegmentKey, histories: Sequence[SegmentKey]) -> None:
        super().__init__()
        self.network, self.history = network, history
        self.training = network.training
        self.keys = torch.tensor([network.key(h) for h in histories if h])  # the prefix has none
        self.choices = None if len(history) == len(network.gates) else network.gate(len(history)).choices

    def forward(self, x: Tensor, which: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        network, gate = self.network, len(self.history)
        if network.training or (self.choices is not None and network.gate(gate).choices != self.choices):
            what = "is in training mode" if network.training else "has other routing heads"
            raise DsnetError(f"the network that this plan shares {what} now; call .eval(), or compile again")
        mode = None if which is None else Mode(images=ImageStatistics(self.keys.to(which.device)[which]))
        y = network.segment_output(x, self.history, mode) if gate else run_steps(network.chain(()), x)
        if gate == len(network.gates):
            return y
        state = network.apply_gate(gate, y)
        return state.x, network.gate_scores(state)


def canonical_key(history: SegmentKey) -> SegmentKey:
    """The history whose part serves this one: the last two choices count."""
    return (0,) * (len(history) - 2) + history[-2:] if len(history) > 2 else history


def segment_key(gate: int, previous: int, choice: int) -> SegmentKey:
    """The history of a part behind a gate's choice and the one before it, whatever came earlier."""
    return (*(0,) * (gate - 1), previous, choice) if gate else (choice,)


def segment_histories(
    model: Supernet,
    options: Sequence[Sequence[int]],
    shared_segments: Mapping[SegmentKey, SegmentKey] | None = None,
) -> dict[SegmentKey, list[SegmentKey]]:
    """Every part that routes with these choices at each gate run through, front first.

    With the histories that its norms tell apart: one of them where all are alike. In place of parts that have
    one of ``shared_segments`` there is that one.
    """
    found: dict[SegmentKey, list[SegmentKey]] = {(): [()]}
    for gates in range(1, len(options) + 1):
        for history in itertools.product(*options[:gates]):
            part = canonical_key(history)
            own = found.setdefault((shared_segments or {}).get(part, part), [])
            if not own or not model.merges:
                own.append(history)
    return found


def find_shared_segments(
    model: Supernet, options: Sequence[Sequence[int]], *, image_size: int | tuple[int, int] | None = None
) -> dict[SegmentKey, SegmentKey]:
    """Parts that another can stand in for, each with that one: the same behind the widest choice before.

    It gives for narrower features, with zeros for the channels that they lack, what their own part gives;
    the widest stands in for itself, too. There are none behind gates where that does not hold.
    """
    found: dict[SegmentKey, SegmentKey] = {}
    if len(options) == 1:
        return found
    shapes = _shapes(model, options, image_size)
    for gates, own in enumerate(options[1:], start=2):
        alike = [[part for part in shapes if len(part) == gates and part[-1] == choice] for choice in own]
        if all(len(parts) > 1 and _differ_in_channels_read(model, parts, shapes) for parts in alike):
            for parts in alike:
                widest = max(parts, key=lambda part: shapes[part].channels)
                found |= dict.fromkeys(parts, widest)
    return found


def _differ_in_channels_read(
    model: Supernet, parts: Sequence[SegmentKey], shapes: Mapping[SegmentKey, Shape]
) -> bool:
    """Whether parts are the same but for norms, and for how many channels their first convolutions read."""
    chains = [[(step.block, step.size) for step in model.chain(part)] for part in parts]
    maps = {(shapes[part].height, shapes[part].width) for part in parts}
    if len(maps) > 1 or not chains[0] or any(chain != chains[0] for chain in chains):
        return False
    block, size, key = model.chain(parts[0])[0]
    made = fx.symbolic_trace(block.extract(shapes[parts[0]], size, key, fold_bn=False))
    (x,) = (node for node in made.graph.nodes if node.op == "placeholder")
    readers = [made.get_submodule(str(node.target)) for node in x.users if node.op == "call_module"]
    return len(readers) == len(x.users) and all(
        isinstance(reader, nn.Conv2d) and reader.groups == 1 for reader in readers
    )


def pack(
    model: Supernet,
    options: Sequence[Sequence[int]],
    *,
    shared_segments: Mapping[SegmentKey, SegmentKey] | None = None,  # for parts that are not to be made
    image_size: int | tuple[int, int] | None = None,
    precision: torch.dtype | None = None,
    device: torch.device | None = None,
) -> dict[SegmentKey, Segment]:
    """All parts, with weights of their own in ``precision``; gates stay in float32 or better."""
    shapes, parts = _shapes(model, options, image_size), dict[SegmentKey, Segment]()
    for history, own in segment_histories(model, options, shared_segments).items():
        module = _packed(model, own[0], shapes[history], fold=len(own) == 1)
        if len(own) > 1:
            others = (_packed(model, h, shapes[history], fold=False) for h in own[1:])
            module = by_history([module, *map(_norms_alone, others)])
        parts[history] = Segment(in_precision(module.to(device), precision), shapes[history], len(own))
    return parts


def _norms_alone(module: nn.Module) -> nn.Module:
    """Without the weights of layers: there may be many histories."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d | nn.Linear):
            child.to("meta")
    return module


def _packed(model: Supernet, history: SegmentKey, shape: Shape, *, fold: bool) -> nn.Module:
    body, behind = _chain(model.chain(history), shape, fold=fold)
    if len(history) < len(model.gates):
        return ToGate(body, model.gate(len(history)).extract_with_routing(behind.channels)).eval()
    block, size, key = model.head_step(history)
    return ToLogits(body, block.extract(behind, size, key, fold_bn=fold)).eval()


def share(
    model: Supernet, options: Sequence[Sequence[int]], *, image_size: int | tuple[int, int] | None = None
) -> dict[SegmentKey, Segment]:
    """All parts as slices of the supernet's own weights."""
    shapes = _shapes(model, options, image_size)
    return {
        history: Segment(SlicedSegment(model, own[0], own), shapes[history], len(own))
        for history, own in segment_histories(model, options).items()
    }


def _shapes(
    model: Supernet, options: Sequence[Sequence[int]], image_size: int | tuple[int, int] | None
) -> dict[SegmentKey, Shape]:
    """Every part, with the shape of an image in front of it."""
    for choices in itertools.product(*options):
        model.require_statistics(model.space.of_choices(choices))
    fronts: dict[SegmentKey, Shape] = {(): model.input_spec.shape(image_size)}
    behind: dict[SegmentKey, Shape] = {}
    for history, own in segment_histories(model, options).items():
        if history:  # `canonical_key` may name choices that are not among the options, `own` does not
            fronts[history] = behind[canonical_key(own[0][:-1])]
        shape = fronts[history]
        for block, size, _ in model.chain(history):
            _, shape = block.cost(shape, size)
        behind[history] = shape
    return fronts


def _chain(steps: Iterable[Step], shape: Shape, *, fold: bool) -> tuple[nn.Sequential, Shape]:
    made: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (block, size, key) in enumerate(steps):
        made[f"block{number}"] = block.extract(shape, size, key, fold_bn=fold)
        _, shape = block.cost(shape, size)
    return nn.Sequential(made), shape


def in_precision(module: nn.Module, precision: torch.dtype | None) -> nn.Module:
    """The module for inference; gates, and scales of channels, stay in float32 or better."""
    module.requires_grad_(False)
    if precision is None:
        return module
    gates = [child for child in module.modules() if isinstance(child, InferenceGate)]
    kept = [next(gate.parameters()).dtype for gate in gates]
    tables = {child: child.table for child in module.modules() if isinstance(child, Scaled)}
    module.to(precision)
    for child, table in tables.items():
        child.table = table if precision != torch.float64 else table.double()
    for gate, dtype in zip(gates, kept, strict=True):
        gate.to(dtype if dtype == torch.float64 else torch.float32)
    return module


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of parameters and buffers, each counted once however many modules share it."""
    seen: dict[int, int] = {}
    for module in modules:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
