"""The one interface of all backends, and the registry that knows them by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError

__all__ = ["Backend", "Executable", "batch_sizes", "get_backend", "list_backends"]

MODULES = {
    "eager": "dsnet.runtime.backends.eager",
    "inductor": "dsnet.runtime.backends.inductor",
    "onnxruntime": "dsnet.runtime.backends.onnx",
    "openvino": "dsnet.runtime.backends.openvino",
}


class Executable(Protocol):
    """A part made ready for a device. Several threads may call it at once."""

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Runs it: one tensor, or features and scores."""


class Backend(Protocol):
    """A way of making parts ready."""

    name: str
    any_batch: bool  # whether one executable takes every batch size

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Why it cannot be used there, with what to do about it; none: it can."""

    def make(self, module: nn.Module, example: Tensor) -> Executable:
        """An executable for inputs like the example."""


def get_backend(name: str) -> Backend:
    """The backend of that name."""
    if name not in MODULES:
        raise DsnetError(f"unknown backend {name!r}; possible: auto, {', '.join(MODULES)}")
    made: Backend = importlib.import_module(MODULES[name]).BACKEND
    return made


def list_backends() -> list[str]:
    """All names."""
    return list(MODULES)


def batch_sizes(images: int, buckets: Sequence[int]) -> list[int]:
    """The fewest batches of the given sizes that hold so many images, none of them filled up; largest first.

    >>> batch_sizes(13, (1, 4, 8))
    [8, 4, 1]
    """
    sizes = []
    for bucket in sorted(buckets, reverse=True):
        count, images = divmod(images, bucket)
        sizes += [bucket] * count
    assert not images, "there is always a bucket of one"
    return sizes
