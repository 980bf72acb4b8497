"""Opening files that others name: nothing that could block or that is not a file is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_regular"]

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading bytes; raise OSError for everything else.

    Opening a FIFO waits for a writer, opening a device can have effects, and reading from either may never
    end. So the kind is looked at before the file is opened, and once more on what was opened.
    """
    _check(os.stat(path).st_mode)
    return open(path, "rb", opener=_without_waiting)


def _without_waiting(path: str, flags: int) -> int:
    number = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has neither the flag nor FIFOs
    try:
        _check(os.fstat(number).st_mode)
    except OSError:
        os.close(number)
        raise
    return number


def _check(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(f"expected a regular file, but it is {KINDS.get(stat.S_IFMT(mode), 'none')}")
