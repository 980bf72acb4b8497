"""What is left to do with an error that nobody foresaw: one line, and the traceback in a file."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback

import dsnet
from dsnet.errors import printable

__all__ = ["INTERNAL", "report_internal"]

INTERNAL = 70  # exit status of an error in dsnet itself (EX_SOFTWARE of sysexits.h)


def report_internal(error: Exception) -> int:
    """Prints one line on stderr that names the file with the traceback; the exit status."""
    what = type(error).__name__
    message = " ".join(str(error).split())
    if message:
        what += f": {printable(message, 300)}"
    try:
        where = f"the traceback is in {_save(error)}; please report it with that file"
    except OSError as failed:
        where = f"the traceback could not be saved ({failed.strerror})"
        traceback.print_exception(error)
    print(f"dsnet: unexpected error, {what}; {where}", file=sys.stderr)
    return INTERNAL


def _save(error: Exception) -> str:
    """Writes the traceback into a new file that only this user can read."""
    handle, path = tempfile.mkstemp(prefix="dsnet-traceback-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"dsnet {dsnet.__version__}, Python {platform.python_version()}, {platform.platform()}\n")
        torch = sys.modules.get("torch")
        file.write(f"torch {getattr(torch, '__version__', 'not imported')}\n")
        file.write(f"command: {sys.argv!r}\n\n")
        traceback.print_exception(error, file=file)
    return path
