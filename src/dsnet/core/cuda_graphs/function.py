"""A function of tensors that runs as a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dsnet.core.cuda_graphs.capture import CapturedGraph, capture

__all__ = ["GraphedFunction"]

P = ParamSpec("P")
T = TypeVar("T")
Signature = tuple[TreeSpec, list[tuple[Any, ...]]]


class GraphedFunction(Generic[P, T]):
    """Capture a function at its first call and replay the graph at later calls.

    Arguments and results are tensors, or tuples and dicts of tensors. The graph is for arguments with the
    shapes, strides and types of the first call; the function runs without a graph for all others and for
    tensors that are not on a GPU. Other tensors that the function reads must keep their addresses; their
    values may change.

    Args:
        function: The function to capture.
        generators: Random generators that the function draws from.

    Examples:
        >>> double = GraphedFunction(lambda x: 2 * x)
        >>> double(torch.ones(2))  # on the CPU the function runs without a graph
        tensor([2., 2.])
    """

    def __init__(self, function: Callable[P, T], *, generators: Sequence[torch.Generator] = ()) -> None:
        self.function, self.generators = function, generators
        self._signature: Signature | None = None
        self._inputs: list[Tensor] = []
        self._captured: CapturedGraph[T] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result in newly allocated tensors."""
        inputs, structure = tree_flatten((args, kwargs))
        if inputs[0].device.type != "cuda":
            return self.function(*args, **kwargs)
        signature: Signature = structure, [(x.shape, x.stride(), x.dtype, x.device) for x in inputs]
        if self._captured is None:
            self._signature = signature
            self._captured = self._capture(inputs, structure)
        elif signature != self._signature:
            return self.function(*args, **kwargs)
        torch._foreach_copy_(self._inputs, inputs)
        outputs, structure = tree_flatten(self._captured.replay())
        return cast(T, tree_unflatten([output.clone() for output in outputs], structure))

    def _capture(self, inputs: Sequence[Tensor], structure: TreeSpec) -> CapturedGraph[T]:
        self._inputs = [x.clone() for x in inputs]
        args, kwargs = cast("tuple[Any, Any]", tree_unflatten(self._inputs, structure))
        stream = torch.cuda.Stream(inputs[0].device)  # type: ignore[no-untyped-call]
        return capture(functools.partial(self.function, *args, **kwargs), stream, generators=self.generators)
