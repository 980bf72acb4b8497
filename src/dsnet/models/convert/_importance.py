"""The order in which channels are sliced: the most important ones first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from dsnet.errors import DsnetError
from dsnet.models.convert._axes import Axis, Group, axis_size, resolve
from dsnet.models.convert._axis_map import Analysis
from dsnet.models.convert._tracing import value_of

__all__ = ["activation_scales", "channel_order", "sorted_weights"]


def activation_scales(analysis: Analysis, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the mean absolute input of each convolution and linear layer, by the name of its weight.

    Args:
        analysis: The analysed network.
        batches: Images [B, C, H, W], normalised as the network expects them.

    Returns:
        For each weight, one value for each channel of its input side.
    """
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise DsnetError(
            f"batches are several batches of images, not one {type(batches).__name__}: use [images]"
        )
    recorder, count = _Recorder(analysis), 0
    for images in batches:
        _check_images(analysis, images)
        recorder.run(images)
        count += len(images)
    if count == 0:
        raise DsnetError("batches are empty: there are no images to sort channels by")
    return recorder.means()


def _check_images(analysis: Analysis, images: object) -> None:
    """Raise unless a batch are images as the example is."""
    example = value_of(next(iter(analysis.traced.graph.nodes)))
    takes = f"batches to sort channels by are images [B, {example.shape[1]}, H, W] of {example.dtype}"
    if not isinstance(images, Tensor):
        hint = "; give the images without labels" if isinstance(images, tuple | list) else ""
        raise DsnetError(f"{takes}, not a {type(images).__name__}{hint}")
    if images.ndim != 4 or images.shape[1] != example.shape[1] or images.dtype != example.dtype:
        raise DsnetError(f"{takes}, not {images.dtype} of shape {list(images.shape)}")
    if not bool(images.isfinite().all()):
        raise DsnetError(f"{takes}; some values are NaN or infinite")


class _Recorder(fx.Interpreter):
    def __init__(self, analysis: Analysis) -> None:
        super().__init__(fx.GraphModule(analysis.traced.root, analysis.traced.graph))
        # the graph of the module is a copy: its nodes have the same names
        self.layers = {node.name: layer for node, layer in analysis.layers.items()}
        self.analysis = analysis
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    @torch.no_grad()
    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401
        layer = self.layers.get(n.name)
        if layer is not None and layer.kind in ("conv", "linear"):
            x = self.env[n.all_input_nodes[0]].abs()
            dim = 1 if layer.kind == "conv" else x.ndim - 1
            total = x.sum([i for i in range(x.ndim) if i != dim])
            name = layer.tensors["weight"]
            self.sums[name] = self.sums.get(name, 0) + total
            self.counts[name] = self.counts.get(name, 0) + x.numel() // x.shape[dim]
        return super().run_node(n)

    def means(self) -> dict[str, Tensor]:
        """Return the means of what was recorded."""
        return {name: total / self.counts[name] for name, total in self.sums.items()}


def channel_order(
    analysis: Analysis,
    weights: Mapping[str, Tensor],
    groups: Iterable[Group],
    scales: Mapping[str, Tensor] | None = None,
) -> dict[Group, Tensor]:
    """Return the channels of groups by falling importance.

    A channel is as important as the sum of the absolute weights that read it; with ``scales``, each is
    multiplied by the mean absolute input. Channels that nothing reads count by the weights that write them.

    Args:
        analysis: The analysed network.
        weights: Weights by name.
        groups: The groups.
        scales: Result of `activation_scales`.
    """
    wanted = set(groups)
    read = {group: torch.zeros(group.size, dtype=torch.float64) for group in wanted}
    written = {group: torch.zeros(group.size, dtype=torch.float64) for group in wanted}
    for layer in analysis.layers.values():
        name = layer.tensors.get("weight")
        if layer.kind not in ("conv", "linear") or name is None:
            continue
        weight = weights[name].detach().to("cpu", torch.float64).abs()
        out, inner = analysis.weights[name][:2]
        _add(written, out, weight.sum(list(range(1, weight.ndim))))
        columns = weight.sum([d for d in range(weight.ndim) if d != 1])
        if scales is not None and name in scales and len(scales[name]) == len(columns):
            columns = columns * scales[name].to("cpu", torch.float64)
        _add(read, inner, columns)
    return {
        group: (scores if scores.any() else written[group]).argsort(descending=True, stable=True)
        for group, scores in read.items()
    }


def _add(scores: Mapping[Group, Tensor], axis: Axis, values: Tensor) -> None:
    """Add one value for each channel of an axis to the scores of its groups."""
    start = 0
    for term in resolve(axis):
        shape = [factor if isinstance(factor, int) else factor.size for factor in term]
        count = axis_size((term,))
        part = values[start : start + count].reshape(shape)
        start += count
        for dim, factor in enumerate(term):
            if isinstance(factor, Group) and factor in scores:
                scores[factor].add_(part.movedim(dim, 0).flatten(1).sum(1) if part.ndim > 1 else part)


def sorted_weights(
    analysis: Analysis, weights: Mapping[str, Tensor], order: Mapping[Group, Tensor]
) -> dict[str, Tensor]:
    """Return all weights with the channels of groups in this order; the network computes the same."""
    result = dict(weights)
    for name, axes in analysis.weights.items():
        tensor = weights[name]
        for dim, axis in enumerate(axes):
            index = _index(axis, order)
            if index is not None:
                tensor = tensor.detach().index_select(dim, index.to(tensor.device))
        if tensor is not weights[name] and isinstance(weights[name], torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, weights[name].requires_grad)
        result[name] = tensor
    return result


def _index(axis: Axis, order: Mapping[Group, Tensor]) -> Tensor | None:
    """Return the positions that an axis takes its channels from, or None if they stay."""
    parts, start, moved = [], 0, False
    for term in resolve(axis):
        shape = [factor if isinstance(factor, int) else factor.size for factor in term]
        part = torch.arange(start, start + axis_size((term,))).reshape(shape)
        start += part.numel()
        for dim, factor in enumerate(term):
            if isinstance(factor, Group) and factor in order:
                part, moved = part.index_select(dim, order[factor]), True
        parts.append(part.flatten())
    return torch.cat(parts) if moved else None
