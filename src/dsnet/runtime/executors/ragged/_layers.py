"""Layers in which every image has the widths of its own route, as launches of Triton kernels.

The routes have the same layers, which differ in widths, kernel sizes and padding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.gate import InferenceGate, scalar_scores
from dsnet.kernels import ragged as kernels
from dsnet.kernels.activations import CODES
from dsnet.kernels.dispatch import TILE
from dsnet.kernels.launch import STAGES, fit_depth, power_of_two
from dsnet.runtime.executors.ragged._assignment import RouteAssignment, constant_tensor
from dsnet.runtime.executors.ragged.support import MAX_KERNEL_SIZES
from dsnet.runtime.partition.feature_maps import ToFused
from dsnet.runtime.partition.per_image_norm import ACTIVATIONS

__all__ = [
    "Attention",
    "ClassifierLayer",
    "Depthwise",
    "FusionSource",
    "GateLayer",
    "Gated",
    "Pointwise",
    "SaveFeatures",
    "SingleRouteGateLayer",
    "State",
    "Stem",
    "sums_of",
]

MAX_PARTIAL_SUMS = 4  # that a linear layer adds up itself
SMALL_BATCH = 128  # images: smaller programs, so that all of the GPU is busy

Sizes = tuple[tuple[int, int], ...]  # height and width of features, by route


class State(NamedTuple):
    """Features between two layers.

    Attributes:
        x: Features [images, positions, channels] with room for the largest route; those of smaller routes
            are at the beginning of an image's memory. In front of a stem: the address [1] of the images.
        sizes: Height and width, by route.
        scale: Factors [images, channels] that are still to be applied.
        sums: Partial sums over positions [images, sums, channels].
    """

    x: Tensor
    sizes: Sizes
    scale: Tensor | None = None
    sums: Tensor | None = None

    @property
    def scaled(self) -> Tensor:
        """The features with the scale applied."""
        return self.x if self.scale is None else self.x * self.scale.to(self.x.dtype)[:, None]


class Gated(NamedTuple):
    """Output of a gate: features, scores [images, choices], and features that were saved before it."""

    state: State
    scores: Tensor
    saved: tuple[State, ...] = ()

    @property
    def features(self) -> Tensor:
        """The scaled features [images, channels, height, width]."""
        ((height, width),) = self.state.sizes
        x = self.state.scaled
        return x.view(len(x), height, width, x.shape[2]).permute(0, 3, 1, 2)

    @property
    def row(self) -> Tensor:
        """All features, scaled, as one row per image [images, numbers, 1, 1]."""
        return torch.cat([x.scaled.flatten(1) for x in (*self.saved, self.state)], 1)[:, :, None, None]


class _Weights(NamedTuple):
    """Weights of all routes, padded with zeros to the largest."""

    w: Tensor  # [routes, outputs, inputs]
    b: Tensor  # [routes, outputs]
    ins: Tensor  # [routes]
    outs: Tensor  # [routes]
    align: int  # a divisor of all widths: kernels read this many numbers at a time
    widths: tuple[int, ...]  # outs

    def widest(self, assignment: RouteAssignment) -> int:
        """Return the number of outputs of the largest route that occurs."""
        return max(self.widths[: assignment.route_limit])

    @classmethod
    def of(
        cls, weights: Sequence[Tensor], biases: Sequence[Tensor], ins: list[int], outs: list[int]
    ) -> _Weights:
        device = weights[0].device
        shape = [max(sizes) for sizes in zip(*(w.shape for w in weights), strict=True)]
        w = weights[0].new_zeros(len(weights), *shape)
        b = biases[0].new_zeros(len(biases), max(len(bias) for bias in biases))
        for route, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            w[route, : weight.shape[0], : weight.shape[1]] = weight
            b[route, : len(bias)] = bias
        sizes = [torch.tensor(n, dtype=torch.int32, device=device) for n in (ins, outs)]
        align = min(16, math.gcd(*(n & -n for n in (*ins, *outs))))
        return cls(w, b, sizes[0], sizes[1], align, tuple(outs))

    @classmethod
    def linear(cls, layers: Sequence[nn.Linear]) -> _Weights:
        return cls.of(
            [layer.weight.detach() for layer in layers],
            [layer.bias.detach() for layer in layers],
            [layer.in_features for layer in layers],
            [layer.out_features for layer in layers],
        )


def pointwise_blocks(
    positions: int, ins: int, outs: int, images: int, *, summed: bool
) -> tuple[int, int, int, int]:
    """Return positions, outputs and inputs of a program's block, and its warps; tuned on an H200.

    With ``summed`` they do not depend on the number of images: sums are bitwise the same in any batch.
    """
    bn, bk = min(128, power_of_two(outs, 16)), min(64, power_of_two(ins, 16))
    small = images <= SMALL_BATCH and not summed
    if positions <= 64:
        return 64, bn, bk, 4
    if positions <= 256:  # in large batches one program takes all positions of an image
        return (64, min(64, bn), bk, 4) if small else (256, min(64, bn), min(32, bk), 8)
    if bn <= 32:
        return 256, bn, bk, 4
    return (64, bn, bk, 4) if bn == 128 and not small else (128, min(64, bn), min(32, bk), 4)


def depthwise_blocks(positions: int, channels: int) -> tuple[int, int, int]:
    """Return positions and channels of a program's block, and its warps; tuned on an H200."""
    bc = 32 if channels % 32 == 0 else min(16, power_of_two(channels, 8))
    return min(256 if bc == 32 and positions <= 256 else 128, power_of_two(positions, 16)), bc, 4


class Pointwise:
    """A 1 × 1 convolution with bias and activation."""

    post: Tensor | None = None  # [routes, 2, outputs]: scale and shift behind the activation

    def __init__(self, modules: Sequence[Sequence[nn.Module]], *, store: bool, summed: bool) -> None:
        convs = [cast(nn.Conv2d, row[0]) for row in modules]
        self.weights = _Weights.of(
            [conv.weight.detach().flatten(1) for conv in convs],
            [cast(Tensor, conv.bias).detach() for conv in convs],
            [conv.in_channels for conv in convs],
            [conv.out_channels for conv in convs],
        )
        self.act, self.store, self.summed = _act(modules[0][1]), store, summed

    def run(self, state: State, assignment: RouteAssignment, out: Tensor | None = None) -> State:
        """Run the layer; write features to ``out`` [images, positions, channels] if it is given."""
        images, positions, row = state.x.shape
        counts = _counts(state.sizes, state.x.device)
        w, rows = self.weights.w, self.weights.widest(assignment)
        # The blocks do not depend on the routes that occur, so that no image's result does.
        bm, bn, bk, warps = pointwise_blocks(positions, w.shape[2], w.shape[1], images, summed=self.summed)
        bk = fit_depth(bm, bn, bk, w.element_size())
        tiles, columns = -(-positions // bm), -(-rows // bn)
        y = state.x.new_empty(images, positions if self.store else 0, rows) if out is None else out
        sums = y.new_empty(images, tiles if self.summed else 0, rows, dtype=torch.float32)
        kernels.pointwise[(images * tiles * columns,)](
            state.x, state.scale if state.scale is not None else state.x, w, self.weights.b,
            w if self.post is None else self.post, y, sums,
            assignment.routes, self.weights.ins, self.weights.outs, counts, positions, tiles, columns, row,
            rows if out is None else y.stride(1), y.stride(0), w.shape[2], w.shape[1],
            state.scale is not None, self.post is not None, out is not None, self.store, self.summed,
            self.act, _precision(w), self.weights.align, bm, bn, bk, num_warps=warps, num_stages=STAGES,
        )  # fmt: skip
        return State(y, state.sizes, None, sums if self.summed else None)


class SaveFeatures:
    """Marks where features are saved for later."""


class FusionSource(Pointwise):
    """Writes its channels of a detector's fused map, which has one size for all routes."""

    def __init__(self, modules: Sequence[Sequence[nn.Module]], start: int, *, early: bool) -> None:
        super().__init__(modules, store=True, summed=False)
        heads = [cast(ToFused, row[2]) for row in modules]
        self.start, self.stop = start, start + self.weights.widths[0]
        self.size, self.early = heads[0].size, early  # early: reads features saved in front of the gate
        self.row = len(heads[0].scale)  # channels of all sources
        self.numbers = self.row * math.prod(self.size)
        own = slice(self.start, self.stop)
        # Scale and shift are linear: they may be applied before the map is resized.
        self.post = torch.stack([torch.stack([head.scale[own], head.shift[own]]) for head in heads])

    def write(self, state: State, assignment: RouteAssignment, fused: Tensor) -> None:
        """Write to the fused maps [images, numbers], resized if necessary."""
        out = fused.view(len(fused), -1, self.row)[:, :, self.start : self.stop]
        if all(size == self.size for size in state.sizes):
            self.run(state, assignment, out)
            return
        x = self.run(state, assignment).x
        images, positions, channels = x.shape
        height, width = self.size
        bc = min(64, power_of_two(channels))
        bp = min(64, power_of_two(height * width))
        tiles, columns = -(-height * width // bp), -(-channels // bc)
        kernels.resize[(images * tiles * columns,)](
            x, out, assignment.routes, constant_tensor(state.sizes, x.device), positions, out.stride(0),
            out.stride(1), channels, height, width, tiles, columns, bp, bc, num_warps=4,
        )  # fmt: skip


class Depthwise:
    """A depthwise convolution with bias and activation."""

    def __init__(self, modules: Sequence[Sequence[nn.Module]], *, summed: bool) -> None:
        convs = [cast(nn.Conv2d, row[0]) for row in modules]
        self.convs = [(conv.kernel_size[0], int(conv.padding[0])) for conv in convs]
        self.kernels = [*sorted({kernel for kernel, _ in self.convs}), 0, 0][:MAX_KERNEL_SIZES]
        self.stride = convs[0].stride[0]
        channels = [conv.in_channels for conv in convs]
        biases = [cast(Tensor, conv.bias).detach() for conv in convs]
        self.weights = _Weights.of(
            [conv.weight.detach().flatten(1).T for conv in convs], biases, channels, channels
        )
        self.act, self.summed = _act(modules[0][1]), summed

    def run(self, state: State, assignment: RouteAssignment) -> State:
        """Launch the kernels."""
        images, before, row = state.x.shape
        sizes = tuple(
            _output_size(size, kernel, self.stride, padding)
            for size, (kernel, padding) in zip(state.sizes, self.convs, strict=True)
        )
        table = [(*a, *b, *c) for a, b, c in zip(state.sizes, sizes, self.convs, strict=True)]
        geometry = constant_tensor(tuple(table), state.x.device)
        positions = max(height * width for height, width in sizes)
        w = self.weights.w
        bp, bc, warps = depthwise_blocks(positions, w.shape[2])
        tiles, columns = -(-positions // bp), -(-row // bc)
        y = state.x.new_empty(images, positions, row)
        sums = y.new_empty(images, tiles if self.summed else 0, row, dtype=torch.float32)
        kernels.depthwise[(images * tiles * columns,)](
            state.x, w, self.weights.b, y, sums, assignment.routes, self.weights.ins, geometry,
            before, positions, w.shape[1], tiles, columns, row, w.shape[2], *self.kernels, self.stride,
            self.summed, self.act, self.weights.align, bp, bc, num_warps=warps,
        )  # fmt: skip
        return State(y, sizes, None, sums if self.summed else None)


class Attention:
    """Channel attention: sets the scale of the features."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.first = _Weights.linear([cast(nn.Linear, module.first) for module in modules])
        self.second = _Weights.linear([cast(nn.Linear, module.attention) for module in modules])

    def run(self, state: State, assignment: RouteAssignment) -> State:
        """Launch the kernels."""
        counts = _counts(state.sizes, state.x.device)
        hidden = _linear(sums_of(state), self.first, assignment, "relu", counts)
        ones = _counts(((1, 1),) * len(state.sizes), state.x.device)
        scale = _linear(hidden, self.second, assignment, "one_plus_tanh", ones)
        return state._replace(scale=scale[:, 0], sums=None)


class ClassifierLayer:
    """Mean over positions, then a linear layer."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weights = _Weights.linear(layers)

    def run(self, state: State, assignment: RouteAssignment, out: Tensor | None) -> Tensor:
        """Launch the kernels."""
        counts = _counts(state.sizes, state.x.device)
        return _linear(sums_of(state), self.weights, assignment, "none", counts, out)[:, 0]


class GateLayer:
    """A gate in float32; its scores are bitwise the same in any batch."""

    def __init__(self, module: InferenceGate) -> None:
        self.first, self.attention = _Weights.linear([module.first]), _Weights.linear([module.attention])
        self.last, self.routes = _Weights.linear([module.last]), module.routes
        self.separate = None if module.separate is None else _Weights.linear([module.separate])

    def run(self, state: State, assignment: RouteAssignment, out: Tensor | None) -> Gated:
        """Launch the kernels."""
        sums, counts = sums_of(state), _counts(state.sizes, state.x.device)
        one = _counts(((1, 1),), state.x.device)
        hidden = _linear(sums, self.first, assignment, "relu", counts)
        scale = _linear(hidden, self.attention, assignment, "one_plus_tanh", one)
        code = hidden if self.separate is None else _linear(sums, self.separate, assignment, "relu", counts)
        scores = _linear(code, self.last, assignment, "none", one)[:, 0]
        if self.routes is not None:
            scores = scalar_scores(scores.sigmoid(), self.routes)
        return Gated(State(state.x, state.sizes, scale[:, 0]), scores)


class SingleRouteGateLayer:
    """A gate with one choice: features pass unchanged."""

    def run(self, state: State, assignment: RouteAssignment, out: Tensor | None) -> Gated:
        """Launch the kernels."""
        return Gated(state, torch.zeros(len(assignment.routes), 1, device=state.x.device))


class Stem:
    """The first convolution, which reads images by their address."""

    def __init__(self, conv: nn.Conv2d, act: nn.Module) -> None:
        channels, kernel = conv.in_channels, conv.kernel_size[0]
        taps = channels * kernel**2
        w = conv.weight.detach().flatten(1).T
        self.w = w.new_zeros(power_of_two(taps, 16), w.shape[1])
        self.w[:taps] = w
        self.b = cast(Tensor, conv.bias).detach()
        self.channels, self.kernel, self.stride = channels, kernel, conv.stride[0]
        self.padding, self.act = int(conv.padding[0]), _act(act)

    def run(self, state: State, assignment: RouteAssignment) -> State:
        """Launch the kernels."""
        begin = state.x
        (size,) = state.sizes
        height, width = _output_size(size, self.kernel, self.stride, self.padding)
        images, row = len(assignment.routes), self.w.shape[1]
        bm = 128
        tiles = -(-height * width // bm)
        y = self.w.new_empty(images, height * width, row)
        kernels.stem[(images * tiles,)](
            begin, self.w, self.b, y, assignment.routes, *size, height, width, self.padding, tiles, row,
            row, self.channels, self.kernel, self.stride, self.act, _precision(self.w), bm,
            power_of_two(row, 16), self.w.shape[0], num_warps=4,
        )  # fmt: skip
        return State(y, ((height, width),))


def _linear(
    x: Tensor,
    weights: _Weights,
    assignment: RouteAssignment,
    act: str,
    counts: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Apply a linear layer to means: sums [images, sums, channels] over counts [routes]."""
    images, sums, row = x.shape
    w, wide = weights.w, weights.widest(assignment)
    y = w.new_empty(images, wide) if out is None else out
    bn, bk = 32, min(128, power_of_two(w.shape[2], 16))
    tiles = -(-images // TILE) if assignment.order is None else len(assignment.order)
    nothing = assignment.routes
    kernels.linear[(-(-wide // bn), tiles)](
        x, w, weights.b, y, nothing if assignment.order is None else assignment.order,
        nothing if assignment.tile_routes is None else assignment.tile_routes, weights.ins, weights.outs,
        counts, images, sums, row, y.stride(0), w.shape[2], w.shape[1], assignment.order is None, CODES[act],
        _precision(w), weights.align, TILE, bn, bk, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y[:, None]


def _output_size(size: tuple[int, int], kernel: int, stride: int, padding: int) -> tuple[int, int]:
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side in size)
    if min(height, width) < 1:
        raise DsnetError(f"a kernel of {kernel} with padding {padding} does not fit a map of {size}")
    return height, width


def _counts(sizes: Sizes, device: torch.device) -> Tensor:
    """Return the number of positions, by route."""
    return constant_tensor(tuple((height * width,) for height, width in sizes), device)


def sums_of(state: State) -> Tensor:
    """Return the sums over positions as few partial sums [images, sums, channels]."""
    sums = state.sums
    assert sums is not None
    images, count, row = sums.shape
    if count <= MAX_PARTIAL_SUMS:
        return sums
    total = sums.new_empty(images, 1, row)
    kernels.add_parts[(images, -(-row // 32))](sums, total, count, row, 32, 32)
    return total


def _act(module: nn.Module) -> int:
    return CODES[ACTIVATIONS.get(type(module), "none")]


def _precision(w: Tensor) -> str:
    return "ieee" if w.dtype == torch.float32 else "tf32"
