"""Errors of readers of untrusted files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dsnet.errors import DsnetError, printable

__all__ = ["read_errors"]


@contextmanager
def read_errors(problem: str) -> Iterator[None]:
    """Turn any exception about a damaged file into a `DsnetError` that begins with ``problem``.

    For damaged files gzip, zlib, struct, pickle, NumPy and pyarrow each raise their own exceptions.
    """
    try:
        yield
    except DsnetError:
        raise
    except Exception as error:
        reason = "it takes more memory than there is" if isinstance(error, MemoryError) else str(error)
        raise DsnetError(f"{problem}: {printable(reason, 300) or type(error).__name__}") from error
