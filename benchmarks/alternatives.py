"""The other ways to run a smaller network out of a larger one's weights, for comparison with slicing.

Both start from the same supernet and give the smallest route's widths. *Masking* computes everything at
full width and zeroes the channels that are not in the route. *Indexing* gathers the route's filters by
channel number at every call, as dynamic pruning with arbitrary channels must.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet import Route, Supernet
from dsnet.slicing import SlicedConv2d, SlicedLinear
from dsnet.slicing import functional as SF


def masking(model: Supernet, route: Route, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The largest route with the outputs of every layer masked to what ``route`` uses of them."""
    layers = [m for m in model.modules() if isinstance(m, SlicedConv2d | SlicedLinear)]
    widths = _output_widths(model, route, x, layers)
    classifier = model.head.classifier
    masks = {}
    for layer in layers:
        if layer is classifier:
            continue
        full = layer.weight.shape[0]
        mask = (torch.arange(full, device=x.device) < widths.get(layer, 0)).to(x.dtype)
        masks[layer] = mask.view(-1, 1, 1) if isinstance(layer, SlicedConv2d) else mask

    def run(images: Tensor) -> Tensor:
        handles = [
            layer.register_forward_hook(lambda _, __, out, mask=mask: out * mask)
            for layer, mask in masks.items()
        ]
        try:
            return model(images, model.space.largest)
        finally:
            for handle in handles:
                handle.remove()

    return run


def _output_widths(model: Supernet, route: Route, x: Tensor, layers: list[nn.Module]) -> dict[nn.Module, int]:
    widths: dict[nn.Module, int] = {}

    def note(layer: nn.Module, _: object, out: Tensor) -> None:
        widths[layer] = out.shape[1] if isinstance(layer, SlicedConv2d) else out.shape[-1]

    handles = [layer.register_forward_hook(note) for layer in layers]
    model(x[:1], route)
    for handle in handles:
        handle.remove()
    return widths


def indexing(model: Supernet, route: Route) -> Callable[[Tensor], Tensor]:
    """The route with its filters gathered by channel number at every call."""
    numbers: dict[tuple[int, torch.device], Tensor] = {}

    def channels(count: int, device: torch.device) -> Tensor:
        if (count, device) not in numbers:
            numbers[count, device] = torch.arange(count, device=device)
        return numbers[count, device]

    def gather(weight: Tensor, *sizes: int) -> Tensor:
        for dim, size in enumerate(sizes):
            weight = weight.index_select(dim, channels(size, weight.device))
        return weight

    def filters(
        weight: Tensor,
        bias: Tensor | None,
        given: int,
        out: int | None,
        *,
        groups: int = 1,
        per_group: bool = False,
    ) -> SF.Filters:
        size = SF.filter_sizes(*weight.shape[:2], given, out, groups=groups, per_group=per_group)
        gathered = gather(weight, size.out, size.group_in) if groups == 1 else gather(weight, size.out)
        return SF.Filters(gathered, None if bias is None else gather(bias, size.out), size.groups)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: int) -> Tensor:
        return F.linear(x, gather(weight, out, x.shape[-1]), None if bias is None else gather(bias, out))

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        with mock.patch.object(SF, "slice_filters", filters), mock.patch.object(SF, "linear", linear):
            yield

    def run(images: Tensor) -> Tensor:
        with replaced():
            return model(images, route)

    return run
