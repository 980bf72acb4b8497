"""How the axes of an operation's output follow from those of its inputs.

A rule also says which sizes in the arguments depend on axes. An operation without a rule keeps the channels
that it reads whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from dsnet.models.convert._axes import (
    Axis,
    Group,
    axis_of,
    axis_size,
    keep_whole,
    reshape_axes,
    resolve,
    split_axis,
    unify,
)
from dsnet.models.convert._axis_map import Axes, Call, Layer, whole_axes
from dsnet.models.convert._operations import module_of, operation_call
from dsnet.models.convert._tracing import value_of

__all__ = ["RULES", "unknown"]

Rule = Callable[[Call], Any]
RULES: dict[str, tuple[Rule, inspect.Signature]] = {}


def rule(*names: str, arguments: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, with the names of their arguments (``name=default`` where optional)."""
    signature = inspect.signature(eval(f"lambda {arguments}, **_: None"))

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, (function, signature)))
        return function

    return register


# --- layers ---------------------------------------------------------------------------------------------
@rule("conv2d", arguments="input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, mode='zeros'")
def _conv(call: Call) -> Axes:
    if call.computes("weight", "bias"):
        return unknown(call)
    axes, groups = call.axes("input"), int(call.args["groups"])
    out, _, *window = _shape(call, "weight")
    channels = axis_size(axes[1])
    settings = {key: call.args[key] for key in ("stride", "padding", "dilation", "mode")}
    fixed = [axis_of(size) for size in window]
    if groups == 1:
        output, inner, number = axis_of(Group(out)), axes[1], None
    elif groups == channels == out:  # depthwise
        output, inner, number = axes[1], axis_of(1), axes[1]
    else:
        outer, inner = _groups(axes[1], groups)
        number = outer
        (terms,) = outer if len(outer) == 1 else (None,)
        if terms is None:
            keep_whole(outer, "several groups of channels are grouped by one convolution")
            terms = (groups,)
            number = axis_of(groups)
        keep_whole(inner, "")
        output = ((*terms, out // groups),)
    call.tensor("weight", [output, inner, *fixed])
    call.tensor("bias", [output])
    call.layer("conv", "weight", "bias", groups=number, **settings)
    return [axes[0], output, *whole_axes(call.result)[2:]]


def _groups(axis: Axis, groups: int) -> tuple[Axis, Axis]:
    """Split the channels of a grouped operation into the number of groups and the channels of each."""
    outer, inner = reshape_axes([axis], [groups, axis_size(axis) // groups])
    return outer, inner


def _shape(call: Call, role: str) -> tuple[int, ...]:
    value = call.args[role]
    if isinstance(value, str):
        tensor: Any = call.analysis.traced.root
        for part in value.split("."):
            tensor = getattr(tensor, part)
        return tuple(tensor.shape)
    return tuple(value_of(value).shape)


@rule("linear", arguments="input, weight, bias=None")
def _linear(call: Call) -> Axes:
    if call.computes("weight", "bias"):
        return unknown(call)
    axes = call.axes("input")
    output = axis_of(Group(_shape(call, "weight")[0]))
    call.tensor("weight", [output, axes[-1]])
    call.tensor("bias", [output])
    call.layer("linear", "weight", "bias")
    return [*axes[:-1], output]


@rule(
    "batch_norm",
    arguments="input, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5",
)
def _batch_norm(call: Call) -> Axes:
    axes = call.axes("input")
    if call.computes("weight", "bias", "mean", "var"):
        return unknown(call)
    if len(axes) != 4 or any(call.args[role] is None for role in ("mean", "var", "weight", "bias")):
        return unknown(call)  # of vectors, or without statistics
    for role in ("weight", "bias", "mean", "var"):
        call.tensor(role, [axes[1]])
    call.layer(
        "batch_norm", "weight", "bias", "mean", "var", eps=call.args["eps"], momentum=call.args["momentum"]
    )
    return axes


@rule("layer_norm", arguments="input, normalized_shape, weight=None, bias=None, eps=1e-5")
def _layer_norm(call: Call) -> Axes:
    if call.computes("weight", "bias"):
        return unknown(call)
    axes = call.axes("input")
    shape = call.args["normalized_shape"]
    if not isinstance(shape, int) and len(shape) > 1:
        for axis in axes[-len(shape) :]:
            keep_whole(axis, "a layer norm covers several dimensions")
    for role in ("weight", "bias"):
        call.tensor(role, axes[-1 if isinstance(shape, int) else -len(shape) :])
    dims = [shape] if isinstance(shape, int) else list(map(int, shape))
    features = axes[-1] if len(dims) == 1 else None
    call.layer("layer_norm", "weight", "bias", groups=features, shape=dims, eps=call.args["eps"])
    return axes


@rule("group_norm", arguments="input, num_groups, weight=None, bias=None, eps=1e-5")
def _group_norm(call: Call) -> Axes:
    axes, groups = call.axes("input"), int(call.args["num_groups"])
    if call.args["weight"] is None or call.args["bias"] is None or call.computes("weight", "bias"):
        return unknown(call)
    if groups == 1:
        number = axis_of(1)
    else:
        number, inner = _groups(axes[1], groups)
        keep_whole(inner, "")
    for role in ("weight", "bias"):
        call.tensor(role, [axes[1]])
    call.layer("group_norm", "weight", "bias", groups=number, eps=call.args["eps"])
    return axes


# --- element by element ---------------------------------------------------------------------------------
UNARY = (
    "relu relu6 silu gelu gelu_tanh sigmoid hardswish hardsigmoid tanh hardtanh elu leaky_relu mish softplus "
    "dropout dropout1d dropout2d alpha_dropout identity contiguous clone float half to type_as clamp "
    "clamp_min clamp_max exp log sqrt rsqrt abs neg pow detach quick_gelu selu celu logsigmoid softsign "
    "hardshrink tanhshrink relu_ relu6_ silu_ sigmoid_ hardswish_ hardsigmoid_ tanh_ elu_ leaky_relu_ mish_ "
    "clamp_ stochastic_depth drop_path"
)


@rule(*UNARY.split(), arguments="input, *rest")
def _unary(call: Call) -> Axes:
    axes = call.axes("input")
    if len(call.result.shape) != len(axes) or tuple(call.result.shape) != tuple(map(axis_size, axes)):
        return unknown(call)
    return axes


@rule("roll", arguments="input, shifts, dims=None")
def _roll(call: Call) -> Axes:
    axes, dims = call.axes("input"), call.args["dims"]
    if dims is None:
        return unknown(call)
    for dim in [dims] if isinstance(dims, int) else dims:
        keep_whole(axes[int(dim)], "its channels are shifted")
    return axes


@rule("prelu", arguments="input, weight")
def _prelu(call: Call) -> Axes:
    axes = call.axes("input")
    if axis_size(call.axes("weight")[0]) > 1:
        unify(call.axes("weight")[0], axes[1])
    return axes


@rule("softmax", "log_softmax", "normalize", arguments="input, dim=-1, *rest")
def _softmax(call: Call) -> Axes:
    axes = call.axes("input")
    keep_whole(axes[int(call.args["dim"])], "it is normalised as a whole")
    return axes


BINARY = (
    "add sub mul div truediv add_ sub_ mul_ div_ iadd isub imul itruediv maximum minimum addcmul where "
    "gt ge lt le eq ne"
)


@rule(*BINARY.split(), arguments="input, other=None, third=None")
def _binary(call: Call) -> Axes:
    operands = [call.args[name] for name in ("input", "other", "third")]
    return _broadcast(call, [node for node in operands if isinstance(node, fx.Node)])


def _broadcast(call: Call, nodes: Sequence[fx.Node]) -> Axes:
    tensors = [node for node in nodes if isinstance(value_of(node), Tensor)]
    shape = call.result.shape
    activations = [n for n in tensors if n.op != "get_attr" and value_of(n).shape == shape]
    adds = operation_call(call.analysis, call.node)[0].strip("_") in ("add", "iadd") and len(activations) > 1
    result: Axes = []
    for dim in range(-len(shape), 0):
        aligned = [call.analysis.of(n)[dim] for n in tensors if value_of(n).ndim >= -dim]
        wide = [axis for axis in aligned if axis_size(axis) == shape[dim]]
        for other in wide[1:]:
            unify(wide[0], other, summed=adds and shape[dim] > 1)
        result.append(wide[0])
    return result


# --- pooling and resizing of maps -----------------------------------------------------------------------
POOLS = "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d interpolate upsample"


@rule(*POOLS.split(), arguments="input, *rest")
def _pool(call: Call) -> Axes:
    axes = call.axes("input")
    return [*axes[:2], *whole_axes(call.result)[2:]]


@rule("mean", "sum", "amax", "amin", arguments="input, dim=None, keepdim=False, *rest")
def _reduce(call: Call) -> Axes:
    axes, dims = call.axes("input"), call.args["dim"]
    if dims is None:
        dims = range(len(axes))
    dims = {int(dim) % len(axes) for dim in ([dims] if isinstance(dims, int) else dims)}
    for dim in dims:
        keep_whole(axes[dim], "a sum or a mean covers it")
    keep = bool(call.args["keepdim"])
    return [axis_of(1) if i in dims else axis for i, axis in enumerate(axes) if keep or i not in dims]


@rule("pad", arguments="input, pad, *rest")
def _pad(call: Call) -> Axes:
    axes, before = call.axes("input"), value_of(call.args["input"]).shape
    result = []
    for axis, old, new in zip(axes, before, call.result.shape, strict=True):
        if old != new:
            keep_whole(axis, "it is padded")
        result.append(axis if old == new else axis_of(new))
    return result


# --- shapes ---------------------------------------------------------------------------------------------
@rule("reshape", "view", "unflatten", arguments="input, *rest")
@rule("flatten", arguments="input, start_dim=0, end_dim=-1")
def _reshape(call: Call) -> Axes:
    shape = tuple(call.result.shape)
    axes = reshape_axes(call.axes("input"), shape)
    call.analysis.sizes[call.node] = axes
    return axes


@rule("permute", arguments="input, *dims")
def _permute(call: Call) -> Axes:
    dims = call.args["dims"]
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    axes = call.axes("input")
    return [axes[int(dim)] for dim in dims]


@rule("transpose", "swapaxes", arguments="input, dim0, dim1")
def _transpose(call: Call) -> Axes:
    axes = list(call.axes("input"))
    first, second = int(call.args["dim0"]), int(call.args["dim1"])
    axes[first], axes[second] = axes[second], axes[first]
    return axes


@rule("t", arguments="input")
def _t(call: Call) -> Axes:
    return call.axes("input")[::-1]


@rule("squeeze", arguments="input, dim=None")
def _squeeze(call: Call) -> Axes:
    axes, dims = call.axes("input"), call.args["dim"]
    drop = range(len(axes)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {int(dim) % len(axes) for dim in drop}
    return [axis for i, axis in enumerate(axes) if i not in gone or axis_size(axis) != 1]


@rule("unsqueeze", arguments="input, dim")
def _unsqueeze(call: Call) -> Axes:
    axes = list(call.axes("input"))
    axes.insert(int(call.args["dim"]) % (len(axes) + 1), axis_of(1))
    return axes


@rule("expand", "expand_as", arguments="input, *sizes")
def _expand(call: Call) -> Axes:
    axes, shape = call.axes("input"), call.result.shape
    axes = [axis_of(1)] * (len(shape) - len(axes)) + axes
    result = [axis if axis_size(axis) == n else axis_of(n) for axis, n in zip(axes, shape, strict=True)]
    other = call.args["sizes"][0]
    if isinstance(other, fx.Node) and isinstance(value_of(other), Tensor):  # expand_as: the shape follows
        for axis, theirs in zip(axes, call.analysis.of(other), strict=True):
            if axis_size(axis) == axis_size(theirs):
                unify(axis, theirs)
        return list(call.analysis.of(other))
    call.analysis.sizes[call.node] = result
    return result


# --- parts and concatenation ----------------------------------------------------------------------------
@rule("cat", "concat", arguments="tensors, dim=0")
def _cat(call: Call) -> Axes:
    tensors, dim = call.args["tensors"], int(call.args["dim"])
    every: list[Axes]
    if isinstance(tensors, fx.Node):  # the parts of a split
        every = list(call.analysis.axes[tensors])
    else:
        every = [call.analysis.of(node) for node in tensors]
    dim %= len(every[0])
    result = list(every[0])
    for axes in every[1:]:
        for i, axis in enumerate(axes):
            if i != dim:
                unify(result[i], axis)
    result[dim] = tuple(term for axes in every for term in resolve(axes[dim]))
    return result


@rule("chunk", "split", "unbind", arguments="input, size=None, dim=0")
def _split(call: Call) -> Any:  # noqa: ANN401
    axes, parts = call.axes("input"), value_of(call.node)
    name = operation_call(call.analysis, call.node)[0]
    dim = call.args["dim"] if name != "unbind" else (call.args["size"] or call.args["dim"])
    dim = int(dim) % len(axes)
    others = [*axes[:dim], *axes[dim + 1 :]]
    if name == "unbind":
        keep_whole(axes[dim], "")
        return [others] * len(parts)
    divided = split_axis(axes[dim], [part.shape[dim] for part in parts])
    if divided is None:
        keep_whole(axes[dim], "its parts do not fit its groups")
        divided = [axis_of(part.shape[dim]) for part in parts]
    call.analysis.sizes[call.node] = divided
    return [[*axes[:dim], part, *axes[dim + 1 :]] for part in divided]


@rule("getitem", arguments="input, index")
def _getitem(call: Call) -> Any:  # noqa: ANN401
    source, index = call.args["input"], call.args["index"]
    if not isinstance(value_of(source), Tensor):  # one of several tensors
        return call.analysis.axes[source][index] if isinstance(value_of(call.node), Tensor) else []
    axes, result = call.axes("input"), []
    if (
        isinstance(index, fx.Node)
        and isinstance(value_of(index), Tensor)
        and not value_of(index).is_floating_point()
    ):
        keep_whole(axes[0], "")  # a table that is looked up
        return [*whole_axes(value_of(index)), *axes[1:]]
    items = list(index) if isinstance(index, tuple | list) else [index]
    if any(not isinstance(i, int | slice | type(...) | None) or isinstance(i, bool) for i in items):
        return unknown(call)
    if ... in items:
        position = items.index(...)
        used = sum(item is not None for item in items) - 1
        items[position : position + 1] = [slice(None)] * (len(axes) - used)
    items += [slice(None)] * (len(axes) - sum(item is not None for item in items))
    rest = iter(axes)
    shape = iter(call.result.shape)
    for item in items:
        if item is None:
            result.append(axis_of(next(shape)))
            continue
        axis = next(rest)
        if isinstance(item, int):
            keep_whole(axis, "single channels of it are used")
            continue
        size = next(shape)
        if item != slice(None) and size != axis_size(axis):
            keep_whole(axis, "a part of it is used")
            axis = axis_of(size)
        result.append(axis)
    return result


# --- products -------------------------------------------------------------------------------------------
@rule("matmul", "bmm", arguments="input, other")
def _matmul(call: Call) -> Axes:
    first, second = call.axes("input"), call.axes("other")
    if min(len(first), len(second)) < 2:
        return unknown(call)
    unify(first[-1], second[-2])
    keep_whole(first[-1], "features of a head")
    keep_whole(second[-1], "features of a head")
    for dim in range(3, min(len(first), len(second)) + 1):
        if axis_size(first[-dim]) == axis_size(second[-dim]):
            unify(first[-dim], second[-dim])
    longer = first if len(first) >= len(second) else second
    return [*longer[:-2], first[-2], second[-1]]


@rule("scaled_dot_product_attention", arguments="query, key, value, attn_mask=None, *rest")
def _attention(call: Call) -> Axes:
    query, key, value = (call.axes(name) for name in ("query", "key", "value"))
    for other in (key, value):
        for dim in range(len(query) - 2):
            unify(query[dim], other[dim])
    unify(query[-1], key[-1])
    for axes in (query, value):
        keep_whole(axes[-1], "features of a head")
    mask = call.args["attn_mask"]
    if isinstance(mask, fx.Node):
        for dim, axis in enumerate(reversed(call.axes("attn_mask"))):
            if dim >= 2 and axis_size(axis) > 1:
                unify(axis, query[-1 - dim])
    return [*query[:-1], value[-1]]


# --- everything -----------------------------------------------------------------------------------------
def unknown(call: Call) -> list[Any]:
    """Keep whole what an operation without a rule reads; its output has no groups."""
    name, _, _ = operation_call(call.analysis, call.node)
    for node in call.node.all_input_nodes:
        for axis in call.analysis.all_axes(node):
            keep_whole(axis, f"{name} cannot be sliced")
    if call.module is not None and any(True for _ in module_of(call.analysis, call.node).parameters()):
        call.analysis.layers[call.node] = Layer("whole", call.module, {})
    value = value_of(call.node)
    if isinstance(value, Tensor):
        return whole_axes(value)
    if isinstance(value, tuple | list):
        return [whole_axes(item) if isinstance(item, Tensor) else [] for item in value]
    return []
