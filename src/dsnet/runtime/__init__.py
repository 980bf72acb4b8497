"""Compilation of routed networks for a device, so that fewer multiply-adds take less time."""

from __future__ import annotations

from dsnet.runtime.api import compile  # noqa: A004  (as torch.compile)
from dsnet.runtime.backends.base import Backend, get_backend, list_backends, register_backend
from dsnet.runtime.executors.host import CompiledNetwork, Memory
from dsnet.runtime.plan import Plan
from dsnet.runtime.profile import profile_plan

__all__ = [
    "Backend",
    "CompiledNetwork",
    "Memory",
    "Plan",
    "compile",
    "get_backend",
    "list_backends",
    "profile_plan",
    "register_backend",
]
