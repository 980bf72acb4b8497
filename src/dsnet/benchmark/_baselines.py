"""Two other ways to run a batch of several routes, for comparison: masking and indexing.

*Masking* computes everything at full width for all images and zeroes the channels outside an image's route.
*Indexing* groups images by route and gathers the filters of each group by channel index at every call, as
dynamic pruning with arbitrary channels must.
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
    """Return a function that runs a batch at full width and masks the channels outside each image's route.

    The logits are those of the routes where routes differ in the width of convolutions or in the number of
    residual blocks. Kernels, paddings and layer norms stay those of the largest route, since no mask of
    channels makes them smaller; logits then differ from those of the routes, but the time does not.

    Args:
        model: The network; it is not changed.
        routes: Routes that images can be run at.

    Returns:
        A function from images [B, C, H, W] and the index of each image's route in ``routes`` [B] to logits
        [B, classes].
    """
    network = _copy_sharing_weights(model)
    largest = network.space.largest
    layers = _masked_layers(network)
    full, *widths = (_output_widths(network, layers, route) for route in (largest, *routes))
    weight = network.head.classifier.weight
    route_masks: dict[nn.Module, Tensor] = {}  # [routes, channels]
    for layer in layers:
        kept = torch.tensor([by_layer.get(layer, 0) for by_layer in widths], device=weight.device)
        if bool((kept < full[layer]).any()):
            channels = torch.arange(full[layer], device=weight.device)
            route_masks[layer] = (channels < kept[:, None]).to(weight.dtype)
    image_masks: dict[nn.Module, Tensor] = {}

    def mask(layer: nn.Module, _: object, out: Tensor) -> Tensor:
        channels = image_masks[layer]
        return out * (channels[:, :, None, None] if out.ndim == 4 else channels[:, None])

    for layer in route_masks:
        layer.register_forward_hook(mask)
    choices = torch.tensor([route.choices for route in routes], device=weight.device)
    keys = [network.image_keys(choices[:, :gates]) for gates in range(1, choices.shape[1] + 1)]
    statistics = ImageStatistics(keys[0])

    def run(x: Tensor, index: Tensor) -> Tensor:
        image_masks.update((layer, masks[index]) for layer, masks in route_masks.items())
        state = network.run_prefix(x)
        for gates, key in enumerate(keys, start=1):
            network.gate_scores(state)  # not needed, but part of the time of a dynamic network
            mode = Mode(images=statistics.of(key[index]))
            y = network.segment_output(state.x, largest.choices[:gates], mode)
            if gates < len(keys):
                state = network.apply_gate(gates, y)
        return y

    return run


def indexing(model: Supernet) -> Supernet:
    """Return a copy on the same weights that gathers filters by channel index at every call."""
    network = _copy_sharing_weights(model)
    for layer in network.modules():
        if isinstance(layer, SlicedConv2d):
            layer.__class__ = IndexedConv2d
        elif isinstance(layer, SlicedLinear):
            layer.__class__ = IndexedLinear
        if isinstance(layer, IndexedConv2d | IndexedLinear):
            layer.indices = torch.arange(max(layer.weight.shape[:2]), device=layer.weight.device)
    return network


class IndexedConv2d(SlicedConv2d):
    """A convolution that gathers its filters; ``indices`` are 0, 1, … up to its channels."""

    indices: Tensor

    def forward(
        self,
        x: Tensor,
        out: int | None = None,
        *,
        kernel: int | None = None,
        padding: int | None = None,
        dilation: int = 1,
    ) -> Tensor:
        """Convolve ``x`` [B, C, H, W] with ``out`` filters, as `SlicedConv2d`."""
        filters, group_in = self.weight.shape[:2]
        out, channels_in, used = SF.filter_sizes(
            filters, group_in, x.shape[1], out, groups=self.groups, per_group=self.per_group
        )
        rows = self.indices[:out]
        if self.per_group:
            by_group = torch.unflatten(self.indices[:filters], 0, (self.groups, -1))
            rows = by_group[:, : out // self.groups].flatten()
        weight = self.weight.index_select(0, rows)
        if channels_in < group_in or self.groups == 1:
            weight = weight.index_select(1, self.indices[:channels_in])
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
    """A linear layer that gathers its rows and columns; ``indices`` are 0, 1, … up to its features."""

    indices: Tensor

    def forward(self, x: Tensor, out: int | None = None) -> Tensor:
        """Map ``x`` [..., in] to [..., out] (default: all output features)."""
        out = self.out_features if out is None else out
        rows, columns = self.indices[:out], self.indices[: x.shape[-1]]
        weight = self.weight.index_select(0, rows).index_select(1, columns)
        return SF.linear(x, weight, None if self.bias is None else self.bias.index_select(0, rows), out)


def _copy_sharing_weights(model: Supernet) -> Supernet:
    """Copy the layers, so that hooks and classes of the network stay as they are, but not the weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _masked_layers(network: Supernet) -> list[nn.Module]:
    """Return the layers to mask: zeros behind them stay zeros up to the next one. Gates only scale."""
    in_gates = {m for gate in network.modules() if isinstance(gate, Gate) for m in gate.modules()}
    return [m for m in network.modules() if isinstance(m, MASKED) and m not in in_gates]


@torch.no_grad()
def _output_widths(network: Supernet, layers: Sequence[nn.Module], route: Route) -> dict[nn.Module, int]:
    """Return the output channels of each layer that runs at a route."""
    widths: dict[nn.Module, int] = {}

    def record(layer: nn.Module, _: object, out: Tensor) -> None:
        widths[layer] = out.shape[1] if out.ndim == 4 else out.shape[-1]

    handles = [layer.register_forward_hook(record) for layer in layers]
    weight = network.head.classifier.weight
    network.run_route(weight.new_zeros(1, *network.input_spec.shape()), route)
    for handle in handles:
        handle.remove()
    return widths
