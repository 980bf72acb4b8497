"""The base class of backends, and the registry that knows them by name."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError, shorten

__all__ = ["Backend", "Executable", "WritingExecutable", "get_backend", "list_backends", "register_backend"]


class Executable(ABC):
    """A compiled segment. Several threads may call it at once."""

    reads_rows = False  # whether the first input may be a `dsnet.kernels.gather.FeatureRows`

    @abstractmethod
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the segment: one tensor, or features and scores."""

    def unscaled(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the segment; it may return a third output if it leaves the scaling of features to the caller.

        Features are then to be multiplied by 1 + tanh of the third output [B, C].
        """
        return self(*inputs)


class WritingExecutable(Executable):
    """An executable that can write its outputs into existing memory."""

    shapes: tuple[tuple[int, ...], ...]  # of the outputs
    dtypes: tuple[torch.dtype, ...]

    @abstractmethod
    def into(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Run the segment and write its outputs into ``outputs``."""


class _FunctionExecutable(Executable):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.function(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)


class Backend(ABC):
    """What compiles the segments of a plan. Derive from it and decorate the class with `register_backend`.

    Only `compile` must be overridden. The other methods and the attributes say what a backend can do.

    Attributes:
        name: The name that it is registered under.
        buckets: Batch sizes to compile for and to time, unless `dsnet.runtime.compile` gets others.
        batch_invariant: Whether the scores of an image are bitwise the same in every batch.
        invariant_logits: The same of logits, by which cascades decide.
        input_dtype: The precision of weights and images that it takes, if it converts them to the plan's
            precision itself.
        ragged: Whether the segments of all choices may run as one by the kernels of the ragged executor.

    Examples:
        >>> @register_backend("channels_last")  # doctest: +SKIP
        ... class ChannelsLast(Backend):
        ...     def compile(self, module, *examples):
        ...         return module.to(memory_format=torch.channels_last)
    """

    name: str
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch_invariant: bool = False
    invariant_logits: bool = False
    input_dtype: torch.dtype | None = None
    ragged: bool = False

    @abstractmethod
    def compile(self, module: Any, *examples: Tensor) -> Callable[..., Tensor | tuple[Tensor, ...]]:  # noqa: ANN401
        """Compile a module, as `prepare` returns it, for inputs like the examples.

        Args:
            module: A plain module in eval mode, on its device and in its precision. Its input is a batch of
                images or features [B, C, H, W]; some segments take a second input [B]. Its output is a
                tensor, or a tuple of features and scores.
            *examples: Inputs of the batch size to compile for, or of any size where `any_batch` is true.

        Returns:
            A function with the inputs and outputs of the module, which several threads may call at once.
        """

    def prepare(self, module: nn.Module, *examples: Tensor) -> Any:  # noqa: ANN401  (what `compile` takes)
        """Do what is done once for all batch sizes (default: nothing)."""
        return module

    def unavailable(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Return why the backend cannot be used there, and what to do about it (default: it can)."""
        return None

    def any_batch(self, device: torch.device) -> bool:
        """Return whether one compiled function takes every batch size (default: it does)."""
        return True

    def captures(self, device: torch.device) -> bool:
        """Return whether compiled functions are to be captured as CUDA graphs (default: no)."""
        return False

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., Executable]:
        """Return a function that compiles the module for the batch size of its example inputs."""
        prepared = self.prepare(module, *examples)
        if not self.any_batch(examples[0].device):
            return lambda *inputs: _as_executable(self.compile(prepared, *inputs))
        compiled = _as_executable(self.compile(prepared, *examples))
        return lambda *inputs: compiled


def _as_executable(function: Callable[..., Any]) -> Executable:
    return function if isinstance(function, Executable) else _FunctionExecutable(function)


_BUILT_IN = {  # imported at first use
    "eager": "dsnet.runtime.backends.eager",
    "cudagraphs": "dsnet.runtime.backends.cudagraphs",
    "inductor": "dsnet.runtime.backends.inductor",
    "triton": "dsnet.runtime.backends.triton",
    "onnxruntime": "dsnet.runtime.backends.onnx",
    "openvino": "dsnet.runtime.backends.openvino",
}
_BACKENDS: dict[str, Backend] = {}
B = TypeVar("B", bound=type[Backend])


def register_backend(name: str) -> Callable[[B], B]:
    """Register a class of `Backend` under the name that `dsnet.runtime.compile` and ``--backend`` take.

    ``backend="auto"`` times it with the others wherever its `Backend.unavailable` returns None.

    Raises:
        DsnetError: If the name is taken, or the class does not derive from `Backend`.
    """

    def add(cls: B) -> B:
        if not (isinstance(cls, type) and issubclass(cls, Backend)):
            raise DsnetError(f"register_backend takes a class derived from Backend, not {shorten(cls)}")
        taken = name in _BACKENDS or _BUILT_IN.get(name, cls.__module__) != cls.__module__
        if taken or name == "auto" or not name.isidentifier():
            reason = "registered already" if taken else "not a possible name"
            raise DsnetError(f"backend {shorten(name)} is {reason}; registered: {', '.join(list_backends())}")
        cls.name = name
        _BACKENDS[name] = cls()
        return cls

    return add


def get_backend(name: str) -> Backend:
    """Return the backend that is registered under a name.

    Raises:
        DsnetError: If there is none; the message lists those that are registered.
    """
    if name in _BUILT_IN and name not in _BACKENDS:
        importlib.import_module(_BUILT_IN[name])
    if name not in _BACKENDS:
        raise DsnetError(
            f"unknown backend {shorten(name)}; possible: auto, {', '.join(list_backends())} (a backend of "
            "your own is registered by the module that defines it: --import MODULE)"
        )
    return _BACKENDS[name]


def list_backends() -> list[str]:
    """Return the names of all registered backends."""
    return [*_BUILT_IN, *(name for name in _BACKENDS if name not in _BUILT_IN)]
