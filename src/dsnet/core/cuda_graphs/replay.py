"""A function of tensors as a CUDA graph: a GPU that does not wait for the host between its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Replay"]

P = ParamSpec("P")
T = TypeVar("T")
Form = tuple[TreeSpec, list[tuple[object, ...]]]


class Replay(Generic[P, T]):
    """The function itself, captured when it is first called and replayed from then on.

    Arguments and results are tensors, or tuples and dicts of tensors. The first call says which sizes the
    graph is made for: others, and those that are not on a GPU, run the function as it is. What else the
    function reads may change its values, not its place. Draws come from ``generators`` alone.
    """

    def __init__(self, function: Callable[P, T], *, generators: Sequence[torch.Generator] = ()) -> None:
        self.function, self.generators = function, generators
        self._graph: torch.cuda.CUDAGraph | None = None
        self._form: Form | None = None
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._shape: TreeSpec | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function gives, in memory of its own."""
        inputs, shape = tree_flatten((args, kwargs))
        if inputs[0].device.type != "cuda":
            return self.function(*args, **kwargs)
        if self._graph is None:
            self._record(inputs, shape)
        elif _form(inputs, shape) != self._form:
            return self.function(*args, **kwargs)
        assert self._graph is not None
        assert self._shape is not None
        torch._foreach_copy_(self._inputs, inputs)
        self._graph.replay()
        return cast(T, tree_unflatten([output.clone() for output in self._outputs], self._shape))

    def _record(self, inputs: Sequence[Tensor], shape: TreeSpec) -> None:
        self._form = _form(inputs, shape)
        self._inputs = [x.clone() for x in inputs]
        args, kwargs = cast("tuple[Any, Any]", tree_unflatten(self._inputs, shape))
        device = inputs[0].device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        states = [generator.get_state() for generator in self.generators]
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                self.function(*args, **kwargs)  # libraries choose their kernels and take their memory
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            for generator in self.generators:
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                found = self.function(*args, **kwargs)
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
        self._outputs, self._shape = tree_flatten(found)
        self._graph = graph


def _form(tensors: Sequence[Tensor], shape: TreeSpec) -> Form:
    return shape, [(x.shape, x.stride(), x.dtype, x.device) for x in tensors]
