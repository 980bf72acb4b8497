"""Routed networks made ready for a device, so that fewer multiply-adds are less time."""

from __future__ import annotations

from dsnet.runtime.plan import Plan, compile  # noqa: A004  (as torch.compile)

__all__ = ["Plan", "compile"]
