"""Limits of settings."""

from __future__ import annotations

import operator

from dsnet.errors import DsnetError

__all__ = ["check_range"]

_LIMITS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "most": ("at most", operator.le),
}


def check_range(settings: object, *names: str, **limits: float) -> None:
    """Raise if a setting is out of range; None passes.

    Args:
        settings: Group of settings.
        *names: Names of settings in the group.
        **limits: ``least`` and ``most`` (inclusive), ``above`` and ``below`` (exclusive).
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not all(_LIMITS[key][1](value, limit) for key, limit in limits.items()):
            text = " and ".join(f"{_LIMITS[key][0]} {limit}" for key, limit in limits.items())
            raise DsnetError(f"{name} must be {text}, not {value}")
