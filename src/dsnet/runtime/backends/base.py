"""The one interface of all backends, and the registry that knows them by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError

if TYPE_CHECKING:
    from dsnet.runtime.executors.ragged.network import Ragged

__all__ = [
    "Apart",
    "Backend",
    "Casting",
    "Executable",
    "Joining",
    "Reading",
    "Rounding",
    "Writing",
    "get_backend",
    "list_backends",
]

MODULES = {
    "eager": "dsnet.runtime.backends.eager",
    "cudagraphs": "dsnet.runtime.backends.cudagraphs",
    "inductor": "dsnet.runtime.backends.inductor",
    "triton": "dsnet.runtime.backends.triton",
    "onnxruntime": "dsnet.runtime.backends.onnx",
    "openvino": "dsnet.runtime.backends.openvino",
}


class Executable(Protocol):
    """A part made ready for a device. Several threads may call it at once."""

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs it: one tensor, or features and scores."""


@runtime_checkable
class Writing(Executable, Protocol):
    """One that can write into memory that it is given."""

    shapes: tuple[tuple[int, ...], ...]  # of what it gives
    dtypes: tuple[torch.dtype, ...]

    def into(self, inputs: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Runs it and writes what it gives into these."""


@runtime_checkable
class Casting(Executable, Protocol):
    """One that takes numbers of another precision than it computes in."""

    takes: torch.dtype


@runtime_checkable
class Apart(Executable, Protocol):
    """One that ends at a gate and can leave it to others to scale features."""

    def apart(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs it: features, scores, and what features are yet to be multiplied with, as 1 + tanh of it."""


@runtime_checkable
class Reading(Executable, Protocol):
    """One whose first input may be features that lie in a table (`dsnet.kernels.gather.FeatureRows`)."""

    reads_rows: bool  # whether it may


class Backend(Protocol):
    """A way of making parts ready."""

    name: str
    batch_invariant: bool  # whether no image's scores depend on the others of its batch, to the last bit
    invariant_logits: bool  # the same of logits, by which cascades decide
    buckets: tuple[int, ...]  # batch sizes to make executables for, and to time, unless told otherwise

    def any_batch(self, device: torch.device) -> bool:
        """Whether one executable takes every batch size."""

    def recorded(self, device: torch.device) -> bool:
        """Whether what it makes is recorded as CUDA graphs, for mixed batches."""

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Why it cannot be used there, with what to do about it; none: it can."""

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., Executable]:
        """What makes executables of a module for inputs of one image or more, each like what it is given."""


@runtime_checkable
class Rounding(Backend, Protocol):
    """A backend that rounds weights itself."""

    weights: torch.dtype  # as it takes them


@runtime_checkable
class Joining(Backend, Protocol):
    """A backend that can run several modules as one, every image through its own."""

    def join(self, modules: Sequence[nn.Module]) -> Ragged | None:
        """These as one; none: it cannot."""


def get_backend(name: str) -> Backend:
    """The backend of that name."""
    if name not in MODULES:
        raise DsnetError(f"unknown backend {name!r}; possible: auto, {', '.join(MODULES)}")
    made: Backend = importlib.import_module(MODULES[name]).BACKEND
    return made


def list_backends() -> list[str]:
    """All names."""
    return list(MODULES)
