"""The one exception class that callers of this package need to know."""

__all__ = ["DsnetError"]


class DsnetError(ValueError):
    """Something was asked for that cannot be done; the message says what was given and what is possible."""
