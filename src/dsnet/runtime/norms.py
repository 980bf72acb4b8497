"""A part for images of several histories: norms take each image's own, everything else is the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from dsnet.gate import DecidingGate

__all__ = ["NormByHistory", "by_history"]


class NormByHistory(nn.Module):
    """Batch norms of one place in a network, one for each history, folded into scale and shift."""

    table: Tensor  # [histories, 2 · C]

    def __init__(self, norms: Sequence[nn.BatchNorm2d]) -> None:
        super().__init__()
        rows = []
        for norm in norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
            rows.append(torch.cat([scale, norm.bias - norm.running_mean * scale]))
        self.register_buffer("table", torch.stack(rows).detach())

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        """Images [B, C, H, W], each by the number of its history [B]."""
        scale, shift = self.table.index_select(0, which)[:, :, None, None].chunk(2, 1)
        return torch.addcmul(shift, x, scale)


class _Tracer(fx.Tracer):
    """Leaves gates whole: they keep a precision of their own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, DecidingGate) or super().is_leaf_module(m, module_qualified_name)


def by_history(modules: Sequence[nn.Module]) -> fx.GraphModule:
    """One module of (x, which history [B]) out of several that differ in their batch norms alone."""
    traced = fx.GraphModule(modules[0], _Tracer().trace(modules[0]))
    (x,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    with traced.graph.inserting_after(x):
        which = traced.graph.placeholder("which")
    for node in traced.graph.nodes:
        if node.op != "call_module" or not isinstance(modules[0].get_submodule(node.target), nn.BatchNorm2d):
            continue
        norms = [module.get_submodule(node.target) for module in modules]
        traced.set_submodule(node.target, NormByHistory(norms))  # type: ignore[arg-type]
        node.args = (*node.args, which)
    traced.recompile()
    return traced.eval()
