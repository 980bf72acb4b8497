"""Fusion: rewrite a segment so that it runs with fewer kernels and passes over memory on a GPU.

The bias of a convolution is added together with the residual and the activation behind it. Attention averages
and scales features in one pass each. A layer norm also computes the sum that it reads. A convolution of
patches that do not overlap becomes a matrix product.
"""

from __future__ import annotations

import copy
import operator
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dsnet.gate import InferenceGate
from dsnet.kernels.elementwise import scale_by_attention, spatial_means
from dsnet.kernels.gather import FeatureRows, extract_patches, pointwise_conv
from dsnet.kernels.rows import add_layer_norm, linear
from dsnet.runtime.partition.per_image_norm import Affine, Tracer, absorb_followers, unshare_modules

__all__ = ["fuse", "leaves_scaling", "reads_rows"]


class _LinearReLU(nn.Module):
    """A linear layer with ReLU in one kernel."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.ndim == 2:
            return torch._addmm_activation(self.bias, x, self.weight.t())
        return F.relu(F.linear(x, self.weight, self.bias))


class _RowsConv(nn.Module):
    """A 1 × 1 convolution that also reads `FeatureRows`."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor | FeatureRows) -> Tensor:
        if isinstance(x, FeatureRows):
            return pointwise_conv(x, self.conv.weight, self.conv.stride[0])
        return cast(Tensor, self.conv(x))


class _PatchConv(nn.Module):
    """A convolution of patches that do not overlap, as a matrix product."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.size, self.bias = cast(tuple[int, int], conv.kernel_size), conv.bias
        self.weight = nn.Parameter(conv.weight.detach().permute(0, 2, 3, 1).flatten(1), requires_grad=False)

    def forward(self, x: Tensor | FeatureRows) -> Tensor:
        """Features [B, C, H, W] → [B, outputs, patches, patches]; pixels outside of patches are not read."""
        return F.linear(extract_patches(x, self.size), self.weight, self.bias).permute(0, 3, 1, 2)


class _FusedGate(InferenceGate):
    """A gate with its layers and its passes over features as kernels.

    If ``leaves_scaling`` is true it returns features, scores and the attention to scale the features by.
    """

    leaves_scaling = False

    @classmethod
    def of(cls, gate: InferenceGate, *, leaves_scaling: bool) -> _FusedGate:
        """Convert a gate."""
        fused_gate = cls(gate.first, gate.attention, gate.last, gate.separate, routes=gate.routes)
        fused_gate.leaves_scaling = leaves_scaling
        return fused_gate

    def forward(self, x: Tensor, pooled: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        pooled = spatial_means(x, self.first.weight.dtype) if pooled is None else pooled
        scores, attention = self.decide(pooled)
        if self.leaves_scaling:
            return x, scores, attention
        return scale_by_attention(x, attention), scores

    def run(self, layer: nn.Linear, x: Tensor, act: Literal["none", "relu"] = "none") -> Tensor:
        return linear(x, layer, act)


class _AddNorm(nn.Module):
    """A layer norm of one input or of the sum of two."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum and its norm."""
        return add_layer_norm(x, added, self.weight, self.bias, self.eps)


def leaves_scaling(module: fx.GraphModule) -> bool:
    """Return whether a `fuse` result returns features, scores and the attention to scale the features by."""
    return any(isinstance(layer, _FusedGate) and layer.leaves_scaling for layer in module.modules())


def fuse(module: nn.Module) -> fx.GraphModule:
    """Return a fused copy on the same weights. The caller scales the features in front of a gate."""
    traced = fx.GraphModule(module, Tracer().trace(module))
    unshare_modules(traced)
    for node in list(traced.graph.nodes):
        if node.op == "call_function" and node.target is operator.mul:
            _fuse_attention(traced, node)
        if node.op != "call_module":
            continue
        layer = traced.get_submodule(node.target)
        if isinstance(layer, nn.Conv2d) and _reads_patches(layer):
            traced.set_submodule(node.target, _PatchConv(layer))
        elif isinstance(layer, nn.Conv2d) and layer.bias is not None:
            _split_bias(traced, node, layer)
        elif isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.running_var is not None:
            traced.set_submodule(node.target, Affine.of_norms([layer]))
            node.args = (*node.args, None)
            absorb_followers(traced, node)
        elif isinstance(layer, nn.AdaptiveAvgPool2d) and layer.output_size in (1, (1, 1)):
            _fuse_pooling(traced, node)
        elif isinstance(layer, nn.Linear) and layer.bias is not None:
            _fuse_relu(traced, node, layer)
        elif isinstance(layer, InferenceGate):
            is_output = traced.graph.output_node().args[0] is node
            traced.set_submodule(node.target, _FusedGate.of(layer, leaves_scaling=is_output))
            pooled = _means_of_affine(traced, node.args[0], layer.first.weight.dtype)
            node.args = (*node.args, *([] if pooled is None else [pooled]))
        elif isinstance(layer, nn.LayerNorm) and _normalises_rows(layer) and len(node.args) == 1:
            _fuse_sum_and_norm(traced, node, layer)
    for node in _input(traced).users:
        first = _module_of(traced, node)
        if isinstance(first, nn.Conv2d) and _is_plain_pointwise(first):
            traced.set_submodule(str(node.target), _RowsConv(first))
    traced.graph.lint()
    traced.recompile()
    return traced.eval()


def reads_rows(module: fx.GraphModule) -> bool:
    """Return whether a `fuse` result also reads features as `dsnet.kernels.gather.FeatureRows`."""
    layers = [_module_of(module, node) for node in _input(module).users]
    return bool(layers) and all(isinstance(layer, _RowsConv | _PatchConv) for layer in layers)


def _input(traced: fx.GraphModule) -> fx.Node:
    node: fx.Node = next(node for node in traced.graph.nodes if node.op == "placeholder")
    return node


def _module_of(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None


def _only_reader(traced: fx.GraphModule, node: fx.Node) -> tuple[fx.Node | None, nn.Module | None]:
    """Return the only node that reads an output, and its module, if there is one such module."""
    if len(node.users) != 1:
        return None, None
    (reader,) = node.users
    module = _module_of(traced, reader)
    return (None, None) if module is None else (reader, module)


def _changed_in_place(traced: fx.GraphModule, node: fx.Node) -> bool:
    return any(getattr(_module_of(traced, user), "inplace", False) for user in node.users)


def _is_plain_pointwise(conv: nn.Conv2d) -> bool:
    plain = conv.bias is None and conv.groups == 1 and conv.padding == (0, 0)
    return plain and conv.kernel_size == (1, 1) and conv.stride[0] == conv.stride[1]


def _reads_patches(conv: nn.Conv2d) -> bool:
    """Return whether a convolution reads patches that do not overlap."""
    plain = conv.groups == 1 and conv.padding == (0, 0) and conv.dilation == (1, 1)
    return plain and conv.kernel_size == conv.stride and conv.kernel_size != (1, 1)


def _normalises_rows(norm: nn.LayerNorm) -> bool:
    return len(norm.normalized_shape) == 1 and norm.bias is not None


def _fuse_attention(traced: fx.GraphModule, node: fx.Node) -> None:
    """Fuse channels times 1 + tanh(attention), as `dsnet.gate.Gate.extract` writes it."""
    x, factor = node.args
    if not isinstance(x, fx.Node):
        return
    chain = [node]
    for target in ("unsqueeze", "unsqueeze", operator.add, torch.tanh):
        if not isinstance(factor, fx.Node) or factor.target != target or len(factor.users) > 1:
            return
        constant = {"unsqueeze": factor.args[-1] == -1, operator.add: factor.args[0] == 1}
        if not constant.get(target, True):
            return
        chain.append(factor)
        factor = factor.args[1 if target is operator.add else 0]
    with traced.graph.inserting_before(node):
        node.replace_all_uses_with(traced.graph.call_function(scale_by_attention, (x, factor)))
    for old in chain:
        traced.graph.erase_node(old)


def _fuse_pooling(traced: fx.GraphModule, node: fx.Node) -> None:
    """Fuse global average pooling with the flattening behind it."""
    reader, layer = _only_reader(traced, node)
    if reader is None or not isinstance(layer, nn.Flatten) or (layer.start_dim, layer.end_dim) != (1, -1):
        return
    mean = _means_of_affine(traced, node.args[0], None)
    if mean is None:
        with traced.graph.inserting_before(node):
            mean = traced.graph.call_function(spatial_means, node.args)
    reader.replace_all_uses_with(mean)
    traced.graph.erase_node(reader)
    traced.graph.erase_node(node)


def _means_of_affine(traced: fx.GraphModule, node: object, dtype: torch.dtype | None) -> fx.Node | None:
    """Let an `Affine` compute means over positions while it writes its output; None if that is not possible.

    Means have the dtype of the features by default.
    """
    layer = _module_of(traced, node) if isinstance(node, fx.Node) else None
    if not isinstance(node, fx.Node) or not isinstance(layer, Affine):
        return None
    if layer.means is not None or _changed_in_place(traced, node):
        return None
    copied = copy.copy(layer)  # the original module is not changed
    copied.means = dtype or "own"
    traced.set_submodule(str(node.target), copied)
    with traced.graph.inserting_after(node):
        features, mean = (traced.graph.call_function(operator.getitem, (node, i)) for i in (0, 1))
    node.replace_all_uses_with(features, delete_user_cb=lambda user: user not in (features, mean))
    return mean


def _fuse_relu(traced: fx.GraphModule, node: fx.Node, layer: nn.Linear) -> None:
    """Fuse a linear layer with the ReLU that alone reads it."""
    reader, act = _only_reader(traced, node)
    if reader is None or not isinstance(act, nn.ReLU):
        return
    traced.set_submodule(str(node.target), _LinearReLU(layer))
    reader.replace_all_uses_with(node)
    traced.graph.erase_node(reader)


def _split_bias(traced: fx.GraphModule, node: fx.Node, conv: nn.Conv2d) -> None:
    """Split a convolution into one without bias and an `Affine`, which absorbs what follows."""
    assert conv.bias is not None
    name, bare = str(node.target), copy.copy(conv)
    bare._parameters = {**conv._parameters, "bias": None}  # shares the weight
    traced.set_submodule(name, nn.Sequential(bare, Affine.of_bias(conv.bias)))
    node.target = f"{name}.0"
    with traced.graph.inserting_after(node):
        biased = traced.graph.call_module(f"{name}.1")
    node.replace_all_uses_with(biased)
    biased.args = (node, None)
    absorb_followers(traced, biased)


def _fuse_sum_and_norm(traced: fx.GraphModule, node: fx.Node, norm: nn.LayerNorm) -> None:
    """Let a layer norm compute the sum that it reads; other readers take the sum from it."""
    traced.set_submodule(str(node.target), _AddNorm(norm))
    (read,) = node.args
    assert isinstance(read, fx.Node)
    is_sum = (
        read.op == "call_function" and read.target is operator.add and not _changed_in_place(traced, read)
    )
    terms = read.args if is_sum and all(isinstance(arg, fx.Node) for arg in read.args) else (read,)
    with traced.graph.inserting_before(read if len(terms) > 1 else node):
        both = traced.graph.call_module(str(node.target), terms)
        total, normed = (traced.graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
    node.replace_all_uses_with(normed)
    traced.graph.erase_node(node)
    if len(terms) > 1:
        read.replace_all_uses_with(total)
        traced.graph.erase_node(read)
