"""A part for images of several histories: norms take each image's own, everything else is the same."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, fx, nn

from dsnet.gate import DecidingGate

__all__ = ["ACTIVATIONS", "NormByHistory", "by_history"]

# That kernels of our own know, by the name they have there.
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hard_swish"}


class NormByHistory(nn.Module):
    """Batch norms of one place in a network, one for each history, folded into scale and shift.

    With what follows them: a branch that is added, an activation.
    """

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
        self.act: nn.Module | None = None

    def forward(self, x: Tensor, which: Tensor, added: Tensor | None = None) -> Tensor:
        """Images [B, C, H, W], each by the number of its history [B]."""
        if x.is_cuda and not torch.compiler.is_compiling() and _alike(x, added):
            from dsnet.runtime.scaling import AVAILABLE, scaled  # imports Triton

            if AVAILABLE:
                act = "none" if self.act is None else ACTIVATIONS[type(self.act)]
                return scaled(x, self.table, which, added, act)
        scale, shift = self.table.index_select(0, which)[:, :, None, None].chunk(2, 1)
        y = torch.addcmul(shift, x, scale)
        y = y if added is None else y + added
        return y if self.act is None else cast(Tensor, self.act(y))


def _alike(x: Tensor, added: Tensor | None) -> bool:
    """Whether numbers lie one behind the other in memory, channels last, in the same way."""
    tensors = (x,) if added is None else (x, added)
    return all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors) and (
        added is None or (added.shape == x.shape and added.dtype == x.dtype)
    )


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
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(modules[0].get_submodule(node.target), nn.BatchNorm2d):
            continue
        norms = [module.get_submodule(node.target) for module in modules]
        traced.set_submodule(node.target, NormByHistory(norms))  # type: ignore[arg-type]
        node.args = (*node.args, which)
        _take_in(traced, node)
    traced.graph.lint()
    traced.recompile()
    return traced.eval()


def _take_in(traced: fx.GraphModule, norm: fx.Node) -> None:
    """What follows a norm and nothing else reads: an activation, or a sum and its activation."""
    module = traced.get_submodule(str(norm.target))
    assert isinstance(module, NormByHistory)
    last: fx.Node = norm
    added: tuple[fx.Node, ...] = ()
    follower = _only_user(norm)
    if follower is not None and follower.op == "call_function" and follower.target is operator.add:
        others = [arg for arg in follower.args if arg is not norm]
        if len(others) == 1 and isinstance(others[0], fx.Node):
            last, added = follower, (others[0],)
            follower = _only_user(follower)
    if follower is not None and follower.op == "call_module":
        act = traced.get_submodule(str(follower.target))
        if type(act) in ACTIVATIONS:
            module.act, last = act, follower
    if last is norm:
        return
    with traced.graph.inserting_before(last):
        whole = traced.graph.call_module(str(norm.target), (*norm.args, *added))
    last.replace_all_uses_with(whole)
    for node in _between(norm, last):
        traced.graph.erase_node(node)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """From the last to the first, by what alone reads each."""
    found = [first]
    while found[-1] is not last:
        follower = _only_user(found[-1])
        assert follower is not None
        found.append(follower)
    return found[::-1]
