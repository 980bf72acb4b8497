"""What runs the parts of a plan: torch itself, its compiler, ONNX Runtime or OpenVINO."""

from __future__ import annotations

from dsnet.runtime.backends.base import Backend, Executable, Writing, get_backend, list_backends

__all__ = ["Backend", "Executable", "Writing", "get_backend", "list_backends"]
