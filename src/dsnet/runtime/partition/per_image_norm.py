"""A part for images of several histories: norms take each image's own, everything else is the same."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, fx, nn

from dsnet.gate import InferenceGate
from dsnet.kernels.elementwise import affine, affine_means
from dsnet.slicing.functional import at_least_float32

__all__ = ["ACTIVATIONS", "Scaled", "Tracer", "by_history", "own_modules", "take_in"]

# That kernels of our own know, by the name they have there.
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hard_swish"}


class Scaled(nn.Module):
    """Channels times scales plus shifts, of one row for all images or of each image's own, in float32.

    With what follows: a branch that is added, an activation, means over positions.
    """

    table: Tensor  # [rows, 2 · C]

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.act: nn.Module | None = None
        self.means: torch.dtype | Literal["own"] | None = None  # of this type or its own, if they are wanted

    @classmethod
    def of_norms(cls, norms: Sequence[nn.BatchNorm2d]) -> Scaled:
        """Batch norms of one place in a network, one for each history."""
        rows = []
        for norm in norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            precise = at_least_float32(norm.weight.dtype)
            scale = norm.weight.to(precise) * torch.rsqrt(norm.running_var.to(precise) + norm.eps)
            rows.append(torch.cat([scale, norm.bias - norm.running_mean * scale]))
        return cls(torch.stack(rows).detach())

    @classmethod
    def of_bias(cls, bias: Tensor) -> Scaled:
        """The same shifts for all images."""
        shift = bias.detach().to(at_least_float32(bias.dtype))
        return cls(torch.cat([torch.ones_like(shift), shift])[None])

    def forward(
        self, x: Tensor, which: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Images [B, C, H, W], each by the number of its row [B]; none: all by the first."""
        act = "none" if self.act is None else ACTIVATIONS[type(self.act)]
        if self.means is not None:
            return affine_means(x, self.table, which, added, act, None if self.means == "own" else self.means)
        return affine(x, self.table, which, added, act)


class Tracer(fx.Tracer):
    """Leaves gates whole, which keep a precision of their own, and what is scaled already."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether it is looked into."""
        return isinstance(m, InferenceGate | Scaled) or super().is_leaf_module(m, module_qualified_name)


def by_history(modules: Sequence[nn.Module]) -> fx.GraphModule:
    """One module of (x, which history [B]) out of several that differ in their batch norms alone."""
    traced = fx.GraphModule(modules[0], Tracer().trace(modules[0]))
    own_modules(traced)
    (x,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    with traced.graph.inserting_after(x):
        which = traced.graph.placeholder("which")
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(traced.get_submodule(node.target), nn.BatchNorm2d):
            continue
        name = re.sub(r"_again\d+$", "", node.target)
        norms = [module.get_submodule(name) for module in modules]
        traced.set_submodule(node.target, Scaled.of_norms(norms))  # type: ignore[arg-type]
        node.args = (*node.args, which)
        take_in(traced, node)
    traced.graph.lint()
    traced.recompile()
    return traced.eval()


def own_modules(traced: fx.GraphModule) -> None:
    """Gives every call of a module one of its own, with the same weights: each may be changed alone."""
    seen = set[str]()
    for number, node in enumerate(traced.graph.nodes):
        if node.op == "call_module":
            if node.target in seen:
                name = f"{node.target}_again{number}"
                traced.set_submodule(name, copy.copy(traced.get_submodule(node.target)))
                node.target = name
            seen.add(node.target)


def take_in(traced: fx.GraphModule, norm: fx.Node) -> None:
    """What follows a `Scaled` and nothing else reads: an activation, or a sum and its activation."""
    module = traced.get_submodule(str(norm.target))
    assert isinstance(module, Scaled)
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
