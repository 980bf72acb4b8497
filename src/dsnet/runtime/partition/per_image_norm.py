"""Norms that scale every image by the statistics of its own routing history; all other layers are shared."""

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

__all__ = ["ACTIVATIONS", "Affine", "Tracer", "absorb_followers", "by_history", "unshare_modules"]

# Activations inside kernels, by name.
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hard_swish"}


class Affine(nn.Module):
    """Multiplies channels by scales and adds shifts, in float32, with an optional residual and activation.

    Attributes:
        table: Rows [n, 2 · C] of C scales, then C shifts.
        act: An activation behind it.
        means: The dtype in which means over positions are returned too ("own": that of the features), or
            None.
    """

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.act: nn.Module | None = None
        self.means: torch.dtype | Literal["own"] | None = None

    @classmethod
    def of_norms(cls, norms: Sequence[nn.BatchNorm2d]) -> Affine:
        """Fold batch norms, one for each row."""
        rows = []
        for norm in norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            precise = at_least_float32(norm.weight.dtype)
            scale = norm.weight.to(precise) * torch.rsqrt(norm.running_var.to(precise) + norm.eps)
            rows.append(torch.cat([scale, norm.bias - norm.running_mean * scale]))
        return cls(torch.stack(rows).detach())

    @classmethod
    def of_bias(cls, bias: Tensor) -> Affine:
        """Add a bias to all images."""
        shift = bias.detach().to(at_least_float32(bias.dtype))
        return cls(torch.cat([torch.ones_like(shift), shift])[None])

    def forward(
        self, x: Tensor, rows: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scale and shift images [B, C, H, W], each by its row [B] (default: all by the first)."""
        act = "none" if self.act is None else ACTIVATIONS[type(self.act)]
        if self.means is not None:
            return affine_means(x, self.table, rows, added, act, None if self.means == "own" else self.means)
        return affine(x, self.table, rows, added, act)


class Tracer(fx.Tracer):
    """Traces modules, but not into gates, which keep their own precision, and not into `Affine`."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is a single node of the graph."""
        return isinstance(m, InferenceGate | Affine) or super().is_leaf_module(m, module_qualified_name)


def by_history(modules: Sequence[nn.Module]) -> fx.GraphModule:
    """Merge modules that differ in their batch norms only into one of (x, index [B] of the module)."""
    traced = fx.GraphModule(modules[0], Tracer().trace(modules[0]))
    unshare_modules(traced)
    (x,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    with traced.graph.inserting_after(x):
        index = traced.graph.placeholder("index")
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(traced.get_submodule(node.target), nn.BatchNorm2d):
            continue
        name = re.sub(r"_again\d+$", "", node.target)
        norms = [module.get_submodule(name) for module in modules]
        traced.set_submodule(node.target, Affine.of_norms(norms))  # type: ignore[arg-type]
        node.args = (*node.args, index)
        absorb_followers(traced, node)
    traced.graph.lint()
    traced.recompile()
    return traced.eval()


def unshare_modules(traced: fx.GraphModule) -> None:
    """Give every call of a module its own submodule with the same weights, so that each can be replaced."""
    seen = set[str]()
    for number, node in enumerate(traced.graph.nodes):
        if node.op == "call_module":
            if node.target in seen:
                name = f"{node.target}_again{number}"
                traced.set_submodule(name, copy.copy(traced.get_submodule(node.target)))
                node.target = name
            seen.add(node.target)


def absorb_followers(traced: fx.GraphModule, affine: fx.Node) -> None:
    """Move the sum and the activation that follow an `Affine` into it, if nothing else reads its output."""
    module = traced.get_submodule(str(affine.target))
    assert isinstance(module, Affine)
    absorbed: list[fx.Node] = [affine]
    residual: tuple[fx.Node, ...] = ()
    follower = _only_user(affine)
    if follower is not None and follower.op == "call_function" and follower.target is operator.add:
        others = [arg for arg in follower.args if arg is not affine]
        if len(others) == 1 and isinstance(others[0], fx.Node):
            absorbed.append(follower)
            residual = (others[0],)
            follower = _only_user(follower)
    if follower is not None and follower.op == "call_module":
        act = traced.get_submodule(str(follower.target))
        if type(act) in ACTIVATIONS:
            module.act = act
            absorbed.append(follower)
    if len(absorbed) == 1:
        return
    with traced.graph.inserting_before(absorbed[-1]):
        merged = traced.graph.call_module(str(affine.target), (*affine.args, *residual))
    absorbed[-1].replace_all_uses_with(merged)
    for node in reversed(absorbed):
        traced.graph.erase_node(node)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
