"""Count graphs of converted networks by running them on the meta device."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from dsnet.counts import Cost, Shape
from dsnet.models.convert._layers import (
    ConvertedBatchNorm,
    ConvertedConv,
    ConvertedGroupNorm,
    ConvertedLayerNorm,
    ConvertedLinear,
    Sizes,
    SlicedTensor,
)

__all__ = ["Counted", "count"]


class Counted(NamedTuple):
    cost: Cost
    shape: tuple[int, ...]  # of the output
    sides: dict[str, int]  # heights and widths of maps that the graph computes with, by the node's name


_COUNTS: weakref.WeakKeyDictionary[fx.GraphModule, dict[tuple[Shape, Sizes], Counted]]
_COUNTS = weakref.WeakKeyDictionary()
PRODUCTS = {"scaled_dot_product_attention", "matmul", "bmm"}  # counted as attention
AVERAGES = {"mean", "AvgPool2d", "AdaptiveAvgPool2d", "avg_pool2d", "adaptive_avg_pool2d"}


def count(body: fx.GraphModule, shape: Shape, sizes: Sizes) -> Counted:
    """Count a graph for one image."""
    known = _COUNTS.setdefault(body, {})
    if (shape, sizes) not in known:
        memo: dict[int, Any] = {}
        for tensor in (*body.parameters(), *body.buffers()):
            memo[id(tensor)] = _on_meta(tensor)
        counter = _Counter(copy.deepcopy(body, memo), sizes)
        dtype = next((p.dtype for p in body.parameters()), torch.float32)
        with torch.no_grad():
            output = counter.run(torch.empty(1, *shape, device="meta", dtype=dtype), sizes, 0, None)
        known[shape, sizes] = Counted(counter.total, tuple(output.shape[1:]), counter.sides)
    return known[shape, sizes]


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class _Counter(fx.Interpreter):
    """Runs a graph on the meta device and adds up the cost of its nodes."""

    def __init__(self, body: fx.GraphModule, sizes: Sizes) -> None:
        super().__init__(body.eval())
        self.sizes, self.total = sizes, Cost()
        self.sides: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401
        inputs = [self.env[arg] for arg in n.all_input_nodes]
        if (
            n.op == "call_method"
            and n.target == "size"
            and n.args[1:] in ((2,), (3,))
            and inputs[0].ndim == 4
        ):
            self.sides[n.name] = super().run_node(n)
            return self.sides[n.name]
        layer = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        if layer is not None and any(True for _ in layer.parameters()) and not hasattr(layer, "cost"):
            flops = FlopCounterMode(display=False)
            with flops:
                result = super().run_node(n)
            weights = sum(p.numel() for p in layer.parameters())
            self.total += Cost(params=weights, layers=flops.get_total_flops() // 2)
            return result
        flops = FlopCounterMode(display=False)
        with flops:
            result = super().run_node(n)
        if layer is not None:
            name = type(layer).__name__
        else:
            name = str(n.target) if n.op == "call_method" else getattr(n.target, "__name__", "")
            if name not in PRODUCTS:  # an operation that is not sliced, such as einsum
                self.total += Cost(layers=flops.get_total_flops() // 2)
        self.total += self._cost(name, layer, inputs, result)
        return result

    def _cost(self, name: str, layer: nn.Module | None, inputs: Sequence[Any], result: Any) -> Cost:  # noqa: ANN401
        if isinstance(layer, ConvertedConv):
            return layer.cost(self.sizes, result.shape[2] * result.shape[3])
        if isinstance(layer, ConvertedLinear):
            return layer.cost(self.sizes, result.numel() // result.shape[-1])
        if isinstance(layer, ConvertedBatchNorm):
            return layer.cost(result.shape[1])
        if isinstance(layer, ConvertedLayerNorm | ConvertedGroupNorm | SlicedTensor):
            return layer.cost(self.sizes)
        if (name in AVERAGES and inputs[0].ndim == 4) or (name == "mean" and inputs[0].ndim == 3):
            return Cost(pools=inputs[0].numel())
        if name == "scaled_dot_product_attention":
            query, key, value = inputs[:3]
            return Cost(attention=query.numel() * key.shape[-2] + result.numel() * value.shape[-2])
        if name in ("matmul", "bmm"):
            return Cost(attention=inputs[0].numel() * inputs[1].shape[-1])
        return Cost()
