"""A module with fewer kernels and passes over memory on a GPU: the same layers, some of ours between them.

Biases of convolutions are added together with the sum and the activation that follow, attention takes its
means and scales channels in one pass each, sums are made by the layer norms that read them, and patches that
do not overlap are a matrix product.
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
from dsnet.runtime.partition.per_image_norm import Scaled, Tracer, own_modules, take_in

__all__ = ["ends_at_gate", "fused", "reads_rows"]


class _LinearReLU(nn.Module):
    """Both in one kernel."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.ndim == 2:
            return torch._addmm_activation(self.bias, x, self.weight.t())
        return F.relu(F.linear(x, self.weight, self.bias))


class _Entry(nn.Module):
    """A 1 × 1 convolution that also reads features where they lie in a table."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor | FeatureRows) -> Tensor:
        if isinstance(x, FeatureRows):
            return pointwise_conv(x, self.conv.weight, self.conv.stride[0])
        return cast(Tensor, self.conv(x))


class _Patches(nn.Module):
    """A convolution of patches that lie side by side."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.size, self.bias = cast(tuple[int, int], conv.kernel_size), conv.bias
        self.weight = nn.Parameter(conv.weight.detach().permute(0, 2, 3, 1).flatten(1), requires_grad=False)

    def forward(self, x: Tensor | FeatureRows) -> Tensor:
        """[B, C, H, W] → [B, outputs, patches, patches]; pixels that are in no patch are left out."""
        return F.linear(extract_patches(x, self.size), self.weight, self.bias).permute(0, 3, 1, 2)


class _Gate(InferenceGate):
    """Its layers and its passes over features as kernels; means, where they are known already.

    One that ends a module leaves it to others to scale features, and gives what to scale them by.
    """

    ends = False

    @classmethod
    def of(cls, gate: InferenceGate, *, ends: bool) -> _Gate:
        """The same layers."""
        made = cls(gate.first, gate.attention, gate.last, gate.separate, routes=gate.routes)
        made.ends = ends
        return made

    def forward(self, x: Tensor, pooled: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        scores, by = self.decide(spatial_means(x, self.first.weight.dtype) if pooled is None else pooled)
        return (x, scores, by) if self.ends else (scale_by_attention(x, by), scores)

    def run(self, layer: nn.Linear, x: Tensor, act: Literal["none", "relu"] = "none") -> Tensor:
        return linear(x, layer, act)


class _Norm(nn.Module):
    """A layer norm, of a sum if there are two."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum and its norm."""
        return add_layer_norm(x, added, self.weight, self.bias, self.eps)


def ends_at_gate(module: fx.GraphModule) -> bool:
    """Whether a `fused` module gives features yet to be scaled, scores, and what to scale them by."""
    return any(isinstance(layer, _Gate) and layer.ends for layer in module.modules())


def fused(module: nn.Module) -> fx.GraphModule:
    """The same function of the same weights; where it ends at a gate others are to scale its features."""
    made = fx.GraphModule(module, Tracer().trace(module))
    own_modules(made)
    for node in list(made.graph.nodes):
        if node.op == "call_function" and node.target is operator.mul:
            _weigh(made, node)
        if node.op != "call_module":
            continue
        layer = made.get_submodule(node.target)
        if isinstance(layer, nn.Conv2d) and _side_by_side(layer):
            made.set_submodule(node.target, _Patches(layer))
        elif isinstance(layer, nn.Conv2d) and layer.bias is not None:
            _part_from_bias(made, node, layer)
        elif isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.running_var is not None:
            made.set_submodule(node.target, Scaled.of_norms([layer]))
            node.args = (*node.args, None)
            take_in(made, node)
        elif isinstance(layer, nn.AdaptiveAvgPool2d) and layer.output_size in (1, (1, 1)):
            _mean(made, node)
        elif isinstance(layer, nn.Linear) and layer.bias is not None:
            _rectify(made, node, layer)
        elif isinstance(layer, InferenceGate):
            made.set_submodule(node.target, _Gate.of(layer, ends=made.graph.output_node().args[0] is node))
            pooled = _by_the_way(made, node.args[0], layer.first.weight.dtype)
            node.args = (*node.args, *([] if pooled is None else [pooled]))
        elif isinstance(layer, nn.LayerNorm) and _of_rows(layer) and len(node.args) == 1:
            _norm_the_sum(made, node, layer)
    _read_rows(made)
    made.graph.lint()
    made.recompile()
    return made.eval()


def reads_rows(module: fx.GraphModule) -> bool:
    """Whether a `fused` module takes features as `dsnet.kernels.gather.FeatureRows`, too."""
    x = _input(module)
    layers = [module.get_submodule(str(n.target)) if n.op == "call_module" else None for n in x.users]
    return bool(layers) and all(isinstance(layer, _Entry | _Patches) for layer in layers)


def _input(module: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(node for node in module.graph.nodes if node.op == "placeholder")
    return found


def _read_rows(made: fx.GraphModule) -> None:
    """Convolutions that read the input."""
    for node in _input(made).users:
        layer = made.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, nn.Conv2d) and _one_by_one(layer):
            made.set_submodule(str(node.target), _Entry(layer))


def _one_by_one(conv: nn.Conv2d) -> bool:
    plain = conv.bias is None and conv.groups == 1 and conv.padding == (0, 0)
    return plain and conv.kernel_size == (1, 1) and conv.stride[0] == conv.stride[1]


def _side_by_side(conv: nn.Conv2d) -> bool:
    """Whether it reads patches that do not overlap."""
    plain = conv.groups == 1 and conv.padding == (0, 0) and conv.dilation == (1, 1)
    return plain and conv.kernel_size == conv.stride and conv.kernel_size != (1, 1)


def _weigh(made: fx.GraphModule, node: fx.Node) -> None:
    """Channels times 1 + tanh of what attention says, as `dsnet.gate.Gate.extract` does it."""
    x, by = node.args
    if not isinstance(x, fx.Node):
        return
    chain = [node]
    for wanted in ("unsqueeze", "unsqueeze", operator.add, torch.tanh):
        if not isinstance(by, fx.Node) or by.target != wanted or len(by.users) > 1:
            return
        constant = {"unsqueeze": by.args[-1] == -1, operator.add: by.args[0] == 1}
        if not constant.get(wanted, True):
            return
        chain.append(by)
        by = by.args[1 if wanted is operator.add else 0]
    with made.graph.inserting_before(node):
        node.replace_all_uses_with(made.graph.call_function(scale_by_attention, (x, by)))
    for old in chain:
        made.graph.erase_node(old)


def _mean(made: fx.GraphModule, node: fx.Node) -> None:
    """Means that are then flattened."""
    follower, layer = _only_reader(made, node)
    if follower is None or not isinstance(layer, nn.Flatten) or (layer.start_dim, layer.end_dim) != (1, -1):
        return
    mean = _by_the_way(made, node.args[0], None)
    if mean is None:
        with made.graph.inserting_before(node):
            mean = made.graph.call_function(spatial_means, node.args)
    follower.replace_all_uses_with(mean)
    made.graph.erase_node(follower)
    made.graph.erase_node(node)


def _by_the_way(made: fx.GraphModule, node: object, dtype: torch.dtype | None) -> fx.Node | None:
    """Means over positions of what a `Scaled` gives, made when it is written; of its own type by default."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    layer = made.get_submodule(str(node.target))
    if not isinstance(layer, Scaled) or layer.means is not None or _changed_in_place(made, node):
        return None
    own = copy.copy(layer)  # the module that is made anew is left as it is
    own.means = dtype or "own"
    made.set_submodule(str(node.target), own)
    with made.graph.inserting_after(node):
        features, mean = (made.graph.call_function(operator.getitem, (node, at)) for at in (0, 1))
    node.replace_all_uses_with(features, delete_user_cb=lambda user: user not in (features, mean))
    return mean


def _rectify(made: fx.GraphModule, node: fx.Node, layer: nn.Linear) -> None:
    """A linear layer that only a ReLU reads."""
    follower, act = _only_reader(made, node)
    if follower is None or not isinstance(act, nn.ReLU):
        return
    made.set_submodule(str(node.target), _LinearReLU(layer))
    follower.replace_all_uses_with(node)
    made.graph.erase_node(follower)


def _only_reader(made: fx.GraphModule, node: fx.Node) -> tuple[fx.Node | None, nn.Module | None]:
    """The module that alone reads what a node gives."""
    if len(node.users) != 1:
        return None, None
    (reader,) = node.users
    return (reader, made.get_submodule(str(reader.target))) if reader.op == "call_module" else (None, None)


def _changed_in_place(made: fx.GraphModule, node: fx.Node) -> bool:
    """Whether some reader changes what it reads."""
    layers = [made.get_submodule(str(user.target)) for user in node.users if user.op == "call_module"]
    return any(getattr(layer, "inplace", False) for layer in layers)


def _part_from_bias(made: fx.GraphModule, node: fx.Node, conv: nn.Conv2d) -> None:
    """A convolution without bias, which is then added with what follows."""
    assert conv.bias is not None
    name, bare = str(node.target), copy.copy(conv)
    bare._parameters = {**conv._parameters, "bias": None}  # the weight is the same one
    made.set_submodule(name, nn.Sequential(bare, Scaled.of_bias(conv.bias)))
    node.target = f"{name}.0"
    with made.graph.inserting_after(node):
        biased = made.graph.call_module(f"{name}.1")
    node.replace_all_uses_with(biased)
    biased.args = (node, None)
    take_in(made, biased)


def _of_rows(norm: nn.LayerNorm) -> bool:
    return len(norm.normalized_shape) == 1 and norm.bias is not None


def _norm_the_sum(made: fx.GraphModule, node: fx.Node, norm: nn.LayerNorm) -> None:
    """A norm that makes the sum which it reads; others then read that one."""
    made.set_submodule(str(node.target), _Norm(norm))
    (read,) = node.args
    assert isinstance(read, fx.Node)
    a_sum = read.op == "call_function" and read.target is operator.add and not _changed_in_place(made, read)
    parts = read.args if a_sum and all(isinstance(arg, fx.Node) for arg in read.args) else (read,)
    with made.graph.inserting_before(read if len(parts) > 1 else node):
        both = made.graph.call_module(str(node.target), parts)
        total, normed = (made.graph.call_function(operator.getitem, (both, at)) for at in (0, 1))
    node.replace_all_uses_with(normed)
    made.graph.erase_node(node)
    if len(parts) > 1:
        read.replace_all_uses_with(total)
        made.graph.erase_node(read)
