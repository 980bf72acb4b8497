"""The exception and the warning of this package, and helpers for messages that are safe to print."""

from __future__ import annotations

import reprlib

__all__ = ["DISTRIBUTION", "DsnetError", "DsnetWarning", "install_hint", "printable", "shorten"]

DISTRIBUTION = "dsnet-pytorch"  # the name that pip knows; the import and the command are dsnet

LIMIT = 4000  # characters of a message


class DsnetError(ValueError):
    """An invalid argument, file or request. The message says what was given and what is possible.

    Messages are truncated and free of control characters, since they may quote the contents of files.
    """

    exit_status = 2  # of a command that fails with it

    def __init__(self, *args: object) -> None:
        # Twice, because escapes are longer than the characters they replace.
        bounded = (printable(printable(a, LIMIT), LIMIT) if isinstance(a, str) else a for a in args)
        super().__init__(*bounded)


class DsnetWarning(UserWarning):
    """An unexpected condition that does not stop the work."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this package.

    >>> install_hint("train")
    "pip install 'dsnet-pytorch[train]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def printable(text: str, limit: int | None = None) -> str:
    r"""Return text that a terminal can show: control characters and lone surrogates become escapes.

    Line breaks and tabs are kept. With a ``limit``, the middle of longer text is cut out.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if limit is not None and len(text) > limit:
        half = max(0, limit - 3) // 2
        text = f"{text[:half]}...{text[len(text) - half :]}"
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class _Bounded(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return f"a number of {x.bit_length()} bits" if x.bit_length() > 10_000 else super().repr_int(x, level)


def shorten(value: object, limit: int = 120) -> str:
    """Return the ``repr`` of a value for a message, cut to at most ``limit`` characters.

    Large containers and strings are cut before they are formatted, so that a message costs little.

    >>> shorten("x" * 1000, 20)
    "'xxxxxxx...xxxxxxxx'"
    """
    bounded = _Bounded()
    bounded.maxstring = bounded.maxother = bounded.maxlong = limit
    return printable(bounded.repr(value), limit)
