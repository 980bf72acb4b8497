"""A supernet taken apart for a device: the front that every image runs, and a part for every choice.

A part is a plain module. The front and the parts that end at a gate give the features that the gate has
scaled and its scores; those that end the network give logits. Together they hold every weight of every route
that the gates can take, packed: contiguous, batch norms folded. A part belongs to a gate's choice and the one
before it; where norms depend on choices before these, too, it takes the number of each image's history as a
second input and its norms are not folded.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.gate import DecidingGate
from dsnet.models import Supernet
from dsnet.models.blocks import Step, run_steps
from dsnet.runtime.norms import by_history
from dsnet.slicing import ImageStatistics, Mode

__all__ = [
    "History",
    "Part",
    "canonical",
    "in_precision",
    "pack",
    "part_behind",
    "part_histories",
    "share",
    "weight_bytes",
]

History = tuple[int, ...]  # the choices that lead through a part; none: the front


class Part(NamedTuple):
    """A module, the shape of what one image gives it, and how many histories its norms tell apart."""

    module: nn.Module
    shape: Shape
    histories: int = 1

    def example(self, images: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Inputs for so many images."""
        x = torch.randn(images, *self.shape, generator=generator)
        return (x, torch.zeros(images, dtype=torch.long)) if self.histories > 1 else (x,)


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


class SharedPart(nn.Module):
    """A part that runs slices of a supernet's weights."""

    def __init__(self, network: Supernet, history: History, histories: Sequence[History]) -> None:
        super().__init__()
        self.network, self.history = network, history
        self.training = network.training
        self.keys = torch.tensor([network.key(h) for h in histories])
        self.choices = None if len(history) == len(network.gates) else network.gate(len(history)).choices

    def forward(self, x: Tensor, which: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        network, gate = self.network, len(self.history)
        if network.training or (self.choices is not None and network.gate(gate).choices != self.choices):
            what = "is in training mode" if network.training else "has other routing heads"
            raise DsnetError(f"the network that this plan shares {what} now; call .eval(), or compile again")
        mode = None if which is None else Mode(images=ImageStatistics(self.keys.to(which.device)[which]))
        y = network.run_segment(x, self.history, mode) if gate else run_steps(network.chain(()), x)
        if gate == len(network.gates):
            return y
        state = network.stand_at(gate, y)
        return state.x, network.score(state)


def canonical(history: History) -> History:
    """The history whose part serves this one: the last two choices count."""
    return (0,) * (len(history) - 2) + history[-2:] if len(history) > 2 else history


def part_behind(gate: int, previous: int, choice: int) -> History:
    """The history of a part behind a gate's choice and the one before it, whatever came earlier."""
    return (*(0,) * (gate - 1), previous, choice) if gate else (choice,)


def part_histories(model: Supernet, options: Sequence[Sequence[int]]) -> dict[History, list[History]]:
    """Every part that routes with these choices at each gate run through, front first.

    With the histories that its norms tell apart: one of them where all are alike.
    """
    found: dict[History, list[History]] = {(): [()]}
    for gates in range(1, len(options) + 1):
        for history in itertools.product(*options[:gates]):
            own = found.setdefault(canonical(history), [])
            if not own or not model.merges:
                own.append(history)
    return found


def pack(
    model: Supernet,
    options: Sequence[Sequence[int]],
    *,
    image_size: int | tuple[int, int] | None = None,
    precision: torch.dtype | None = None,
    device: torch.device | None = None,
) -> dict[History, Part]:
    """All parts, with weights of their own in ``precision``; gates stay in float32 or better."""
    shapes, parts = _shapes(model, options, image_size), dict[History, Part]()
    for history, own in part_histories(model, options).items():
        made = [_packed(model, h, shapes[history], fold=len(own) == 1) for h in own]
        module = made[0] if len(own) == 1 else by_history(made)
        parts[history] = Part(in_precision(module.to(device), precision), shapes[history], len(own))
    return parts


def _packed(model: Supernet, history: History, shape: Shape, *, fold: bool) -> nn.Module:
    body, behind = _chain(model.chain(history), shape, fold=fold)
    if len(history) < len(model.gates):
        return ToGate(body, model.gate(len(history)).extract_deciding(behind.channels)).eval()
    block, size, key = model.head_step(history)
    return ToLogits(body, block.extract(behind, size, key, fold_bn=fold)).eval()


def share(
    model: Supernet, options: Sequence[Sequence[int]], *, image_size: int | tuple[int, int] | None = None
) -> dict[History, Part]:
    """All parts as slices of the supernet's own weights."""
    shapes = _shapes(model, options, image_size)
    return {
        history: Part(SharedPart(model, own[0], own), shapes[history], len(own))
        for history, own in part_histories(model, options).items()
    }


def _shapes(
    model: Supernet, options: Sequence[Sequence[int]], image_size: int | tuple[int, int] | None
) -> dict[History, Shape]:
    """Every part, with the shape of an image in front of it."""
    for choices in itertools.product(*options):
        model.require_statistics(model.space.of_choices(choices))
    fronts: dict[History, Shape] = {(): model.geometry.shape(image_size)}
    behind: dict[History, Shape] = {}
    for history in part_histories(model, options):
        if history:  # what leads there may itself be one of several that are served alike
            fronts[history] = behind[canonical(history[:-1])]
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
    """The module for inference; gates stay in float32 or better."""
    module.requires_grad_(False)
    if precision is None:
        return module
    gates = [child for child in module.modules() if isinstance(child, DecidingGate)]
    kept = [next(gate.parameters()).dtype for gate in gates]
    module.to(precision)
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
