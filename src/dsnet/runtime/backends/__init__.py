"""What runs the parts of a plan: torch itself, its compiler, our own kernels, ONNX Runtime or OpenVINO."""

from __future__ import annotations

from dsnet.runtime.backends.base import (
    Apart,
    Backend,
    Casting,
    Executable,
    Joining,
    Reading,
    Rounding,
    Writing,
    get_backend,
    list_backends,
)

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
