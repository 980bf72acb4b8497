"""What others do with a batch of several routes, for comparison: masking and indexing.

*Masking* computes everything at full width for everyone and zeroes the channels that are not in an image's
route. *Indexing* groups the images by route and gathers every group's filters by channel number at every
call, as dynamic pruning with arbitrary channels must.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dsnet.gate import Gate
from dsnet.models import Supernet
from dsnet.routes import Route
from dsnet.slicing import (
    ImageStatistics,
    Mode,
    SlicedConv2d,
    SlicedGroupNorm,
    SlicedLinear,
    SlicedPatchEmbed,
    SplitBatchNorm2d,
)
from dsnet.slicing import functional as SF

__all__ = ["IndexedConv2d", "IndexedLinear", "indexing", "masking"]

MASKED = (SplitBatchNorm2d, SlicedGroupNorm, SlicedLinear, SlicedPatchEmbed)


def masking(model: Supernet, routes: Sequence[Route]) -> Callable[[Tensor, Tensor], Tensor]:
    """Images [B, C, H, W] and the place [B] of each one's route in ``routes`` → logits [B, classes].

    Every image gets its own route's answer where routes differ in the width of convolutions, or in the number
    of residual blocks. Kernels, paddings and layer norms stay those of the largest route, since no mask of
    channels makes them smaller: what comes out then differs, what it costs does not.
    """
    network = _on_same_weights(model)
    largest = network.space.largest
    layers = _masked_layers(network)
    weight = network.head.classifier.weight
    full = _output_widths(network, layers, largest)
    widths = [_output_widths(network, layers, route) for route in routes]
    tables: dict[nn.Module, Tensor] = {}
    for layer in layers:
        kept = torch.tensor([found.get(layer, 0) for found in widths], device=weight.device)
        if bool((kept < full[layer]).any()):  # elsewhere there is nothing to zero
            channels = torch.arange(full[layer], device=weight.device)
            tables[layer] = (channels < kept[:, None]).to(weight.dtype)
    masks: dict[nn.Module, Tensor] = {}

    def mask(layer: nn.Module, _: object, out: Tensor) -> Tensor:
        channels = masks[layer]
        return out * (channels[:, :, None, None] if out.ndim == 4 else channels[:, None])

    for layer in tables:
        layer.register_forward_hook(mask)
    choices = torch.tensor([route.choices for route in routes], device=weight.device)
    keys = [network.image_keys(choices[:, :gates]) for gates in range(1, choices.shape[1] + 1)]
    statistics = ImageStatistics(keys[0])

    def run(x: Tensor, at: Tensor) -> Tensor:
        masks.update((layer, table[at]) for layer, table in tables.items())
        state = network.run_prefix(x)
        for gates, own in enumerate(keys, start=1):
            network.gate_scores(state)  # the gates are asked, as elsewhere
            mode = Mode(images=statistics.of(own[at]))
            y = network.segment_output(state.x, largest.choices[:gates], mode)
            if gates < len(keys):
                state = network.apply_gate(gates, y)
        return y

    return run


def indexing(model: Supernet) -> Supernet:
    """The network, on the same weights, with its filters gathered by channel number at every call."""
    network = _on_same_weights(model)
    for layer in network.modules():
        if isinstance(layer, SlicedConv2d):
            layer.__class__ = IndexedConv2d
        elif isinstance(layer, SlicedLinear):
            layer.__class__ = IndexedLinear
        if isinstance(layer, IndexedConv2d | IndexedLinear):
            layer.numbers = torch.arange(max(layer.weight.shape[:2]), device=layer.weight.device)
    return network


class IndexedConv2d(SlicedConv2d):
    """A convolution that copies the filters it runs with."""

    numbers: Tensor  # of all channels: those to gather are its first

    def forward(
        self,
        x: Tensor,
        out: int | None = None,
        *,
        kernel: int | None = None,
        padding: int | None = None,
        dilation: int = 1,
    ) -> Tensor:
        """Runs with ``out`` filters and the centred ``kernel``."""
        filters, group_in = self.weight.shape[:2]
        out, channels_in, used = SF.filter_sizes(
            filters, group_in, x.shape[1], out, groups=self.groups, per_group=self.per_group
        )
        rows = self.numbers[:out]
        if self.per_group:
            rows = torch.unflatten(self.numbers[:filters], 0, (self.groups, -1))
            rows = rows[:, : out // self.groups].flatten()
        weight = self.weight.index_select(0, rows)
        if channels_in < group_in or self.groups == 1:
            weight = weight.index_select(1, self.numbers[:channels_in])
        return SF.conv2d(
            x,
            weight,
            None if self.bias is None else self.bias.index_select(0, rows),
            kernel=kernel,
            stride=self.stride,
            padding=self.padding(kernel, padding),
            dilation=dilation,
            groups=used,
            per_group=self.per_group,
        )


class IndexedLinear(SlicedLinear):
    """A linear layer that copies the rows and columns it runs with."""

    numbers: Tensor

    def forward(self, x: Tensor, out: int | None = None) -> Tensor:
        """Runs with ``out`` output features; all of them by default."""
        out = self.out_features if out is None else out
        rows, columns = self.numbers[:out], self.numbers[: x.shape[-1]]
        weight = self.weight.index_select(0, rows).index_select(1, columns)
        return SF.linear(x, weight, None if self.bias is None else self.bias.index_select(0, rows), out)


def _on_same_weights(model: Supernet) -> Supernet:
    """Layers of its own, so that the network itself stays as it is; parameters and buffers are shared."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _masked_layers(network: Supernet) -> list[nn.Module]:
    """Whatever gives channels behind which zeros stay zeros up to the next one; gates only scale them."""
    gates = (module for module in network.modules() if isinstance(module, Gate))
    left = {part for gate in gates for part in gate.modules()}
    return [m for m in network.modules() if isinstance(m, MASKED) and m not in left]


@torch.no_grad()
def _output_widths(network: Supernet, layers: Sequence[nn.Module], route: Route) -> dict[nn.Module, int]:
    """Channels that every layer gives at a route; those that it leaves out give none."""
    widths: dict[nn.Module, int] = {}

    def note(layer: nn.Module, _: object, out: Tensor) -> None:
        widths[layer] = out.shape[1] if out.ndim == 4 else out.shape[-1]

    handles = [layer.register_forward_hook(note) for layer in layers]
    weight = network.head.classifier.weight
    network.run_route(weight.new_zeros(1, *network.input_spec.shape()), route)
    for handle in handles:
        handle.remove()
    return widths
