"""Trace a network to a graph by running it once on an example.

`torch.fx` keeps torch's layers as nodes under their names, so that weights keep their names too, and it takes
a fraction of a second; `torch.export` takes seconds, every time a checkpoint is loaded. What plain `torch.fx`
lacks, this tracer adds: each node carries the value it had for the example, and sizes are integers that
remember how they were computed. Python code that looks at shapes therefore runs as usual, and the graph still
takes batches of another size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from dsnet.errors import DsnetError, shorten

__all__ = ["TracedGraph", "trace", "value_of"]

CONCRETE = ("dtype", "device", "layout", "is_cuda", "is_mps", "is_sparse", "is_quantized", "requires_grad")


def value_of(node: fx.Node) -> Any:  # noqa: ANN401  (a tensor, a tuple of tensors, or a number)
    """Return the value that a node had for the example."""
    return node.meta["value"]


class TracedGraph:
    """The graph of a network, its modules, and where each node comes from.

    Attributes:
        graph: The graph. The value of each node for the example is in its ``meta``, see `value_of`.
        root: The network.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph, self.root = graph, root

    @property
    def output(self) -> fx.Node:
        """The node whose value is the logits."""
        (node,) = (node for node in self.graph.nodes if node.op == "output")
        result = node.args[0]
        if not isinstance(result, fx.Node) or not isinstance(value_of(result), Tensor):
            raise DsnetError(
                f"the network returns {shorten(type(result).__name__)}, not one tensor of logits; wrap it "
                "in a module whose forward returns the logits alone"
            )
        return result


class _Size(int):
    """A size of a tensor in the graph: an integer that remembers its node."""

    proxy: fx.Proxy

    @classmethod
    def of(cls, value: int, proxy: fx.Proxy) -> _Size:
        size = cls(value)
        size.proxy = proxy
        return size

    def __reduce__(self) -> Any:  # noqa: ANN401  (constants that are copied lose their node)
        return (int, (int(self),))


def _size_operator(function: Callable[..., Any], *, swap: bool = False) -> Callable[[_Size, Any], Any]:
    def apply(self: _Size, other: Any) -> Any:  # noqa: ANN401
        if not isinstance(other, int) or isinstance(other, bool):
            return NotImplemented
        args = (other, self) if swap else (self, other)
        value = function(*map(int, args))
        return _Size.of(value, self.proxy.tracer.create_proxy("call_function", function, args, {}))

    return apply


class _Ratio(float):
    """The ratio of two sizes, which is rounded to a size again, as by ``math.ceil``."""

    parts: tuple[_Size, int]

    @classmethod
    def of(cls, size: _Size, other: int) -> _Ratio:
        ratio = cls(int(size) / int(other))
        ratio.parts = (size, other)
        return ratio

    def __floor__(self) -> int:
        size, other = self.parts
        return size // other

    def __ceil__(self) -> int:
        size, other = self.parts
        return (size + (other - 1)) // other

    def __reduce__(self) -> Any:  # noqa: ANN401  (a constant that is copied)
        return (float, (float(self),))


def _divide(self: _Size, other: Any) -> Any:  # noqa: ANN401
    is_size = isinstance(other, int) and not isinstance(other, bool)
    return _Ratio.of(self, other) if is_size else int(self) / other


_Size.__truediv__ = _divide  # type: ignore[method-assign, assignment]
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(_Size, f"__{_name}__", _size_operator(getattr(operator, _name)))
    setattr(_Size, f"__r{_name}__", _size_operator(getattr(operator, _name), swap=True))


class _Proxy(fx.Proxy):
    """A proxy that knows its value: shapes and types are concrete."""

    @property
    def _value(self) -> Any:  # noqa: ANN401
        return value_of(self.node)

    @property
    def shape(self) -> _Shape:
        return _Shape(map(self._size, range(self._value.ndim)))

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401  (as a tensor's)
        return self.shape if dim is None else self._size(int(dim) % self._value.ndim)

    def _size(self, dim: int) -> int:
        if self.node.op == "get_attr":  # weights have the same size for all images
            return int(self._value.shape[dim])
        key = f"size {dim}"
        if key not in self.node.meta:
            proxy = self.tracer.create_proxy("call_method", "size", (self, dim), {})
            self.node.meta[key] = _Size.of(self._value.shape[dim], proxy)
        size: int = self.node.meta[key]
        return size

    @property
    def ndim(self) -> int:
        return int(self._value.ndim)

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return int(self._value.numel())

    def is_floating_point(self) -> bool:
        return bool(self._value.is_floating_point())

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401
        return bool(self._value.is_contiguous(*args, **kwargs))

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[fx.Proxy]:
        items: Any = self  # a proxy records the indexing
        return iter([items[i] for i in range(len(self._value))])

    def __bool__(self) -> bool:
        raise _control_flow("a decision depends on the values of a tensor")

    def __int__(self) -> int:
        raise _control_flow("a tensor is converted to a Python number")

    __float__ = __index__ = __int__

    def item(self) -> Any:  # noqa: ANN401
        raise _control_flow("a tensor is converted to a Python number")

    tolist = item

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in CONCRETE:
            return getattr(self._value, name)
        return super().__getattr__(name)


class _Shape(tuple[int, ...]):
    """A shape whose sizes remember their nodes."""

    __slots__ = ()

    def numel(self) -> int:
        total = 1
        for size in self:
            total = size * total
        return total


class _ControlFlowError(Exception):
    pass


def _control_flow(what: str) -> _ControlFlowError:
    return _ControlFlowError(what)


class _Tracer(fx.Tracer):
    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self.example = example
        self._runs = False  # whether a node is being run, not traced
        self.failed: nn.Module | None = None  # the innermost module that raised an error

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        if self._runs:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or m
            raise

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:  # noqa: ANN401
        return root_fn, [self.root, self.create_proxy("placeholder", "images", (), {})]  # others: defaults

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:  # noqa: ANN401
        return attr_val if self._runs else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)

    def create_arg(self, a: Any) -> Any:  # noqa: ANN401
        if isinstance(a, _Size):
            return a.proxy.node
        if isinstance(a, _Shape):
            return tuple(self.create_arg(size) for size in a)
        if isinstance(a, list | tuple) and not hasattr(a, "_fields"):
            return type(a)(self.create_arg(item) for item in a)
        if isinstance(a, slice):
            return slice(*map(self.create_arg, (a.start, a.stop, a.step)))
        return super().create_arg(a)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401
        node = super().create_node(kind, target, *args, **kwargs)
        if kind != "output":
            self._runs = True
            try:
                node.meta["value"] = self._run(node)
            finally:
                self._runs = False
        return node

    def _run(self, node: fx.Node) -> Any:  # noqa: ANN401
        if node.op == "placeholder":
            return self.example
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        with torch.no_grad():
            if node.op == "call_module":
                return self.root.get_submodule(node.target)(*args, **kwargs)  # type: ignore[arg-type]
            if node.op == "call_method":
                return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]
            if node.op == "call_function":
                return node.target(*args, **kwargs)  # type: ignore[operator]
        return _attribute(self.root, node.target)  # type: ignore[arg-type]


def _attribute(root: nn.Module, name: str) -> Any:  # noqa: ANN401
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    return value


def trace(network: nn.Module, example: Tensor) -> TracedGraph:
    """Trace a network in eval mode.

    Args:
        network: The network, images [B, C, H, W] → logits [B, classes].
        example: Images of the size that the network takes.

    Returns:
        The graph without nodes that nothing uses.

    Raises:
        DsnetError: The network decides by the values of tensors, or its code cannot run on proxies. The
            message names the module and the line.
    """
    tracer = _Tracer(example)
    try:
        graph = tracer.trace(network)
    except DsnetError:
        raise
    except Exception as error:  # whatever the network's code raises
        raise DsnetError(_reason(error, tracer, network)) from error
    for node in reversed(graph.nodes):
        in_place = node.op == "call_method" and node.target.endswith("_")
        if not node.users and node.op not in ("placeholder", "output") and not in_place:
            graph.erase_node(node)
    return TracedGraph(graph, network)


def _reason(error: Exception, tracer: _Tracer, network: nn.Module) -> str:
    """Say which module and line cannot be traced, and what to do about it."""
    module = tracer.failed or network
    path = next(name for name, other in network.named_modules() if other is module)
    name = f"{path} ({type(module).__name__})" if path else type(module).__name__
    line, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not any(
            part in code.co_filename for part in ("/torch/", "/dsnet/models/convert/", "<eval_with_key>")
        ):
            line = f"{code.co_filename}:{traceback.tb_lineno}, in {code.co_name}"
        traceback = traceback.tb_next
    if isinstance(error, _ControlFlowError | fx.proxy.TraceError):
        what = str(error) if isinstance(error, _ControlFlowError) else "control flow depends on a tensor"
        remedy = (
            "rewrite it with torch.where or a fixed choice, or convert the part of the network that has no "
            "such decision"
        )
    else:
        what = f"{type(error).__name__}: {shorten(str(error), 300)}"
        remedy = "check that the network runs on the example input as it is, in eval mode"
    return f"cannot trace module {name}{f' at {line}' if line else ''}: {what}; {remedy}"
