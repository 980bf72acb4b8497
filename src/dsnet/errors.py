"""The exception and the warning that callers of this package need to know."""

__all__ = ["DsnetError", "DsnetWarning"]


class DsnetError(ValueError):
    """Something was asked for that cannot be done; the message says what was given and what is possible."""


class DsnetWarning(UserWarning):
    """Something went otherwise than one may expect; the message says all of it."""
