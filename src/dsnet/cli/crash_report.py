"""The report of an unexpected error: one line, and the traceback in a file."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback

import dsnet
from dsnet.errors import printable

__all__ = ["INTERNAL", "report_internal"]

OUT_OF_MEMORY = 2
INTERNAL = 70  # exit status of an error in dsnet itself (EX_SOFTWARE of sysexits.h)


def report_internal(error: Exception) -> int:
    """Print one line on stderr that names the file with the traceback; return the exit status."""
    summary = f"{type(error).__name__}: {printable(' '.join(str(error).split()), 300)}".rstrip(": ")
    if _is_out_of_memory(error):
        print(f"dsnet: {summary}; use smaller batches or images", file=sys.stderr)
        return OUT_OF_MEMORY
    try:
        saved = f"the traceback is in {_save(error)}; please report it with that file"
    except OSError as failed:
        saved = f"the traceback could not be saved ({failed.strerror})"
        traceback.print_exception(error)
    print(f"dsnet: unexpected error, {summary}; {saved}", file=sys.stderr)
    return INTERNAL


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether memory ran out: torch raises a RuntimeError for the CPU, its own exception for a GPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool({"MemoryError", "OutOfMemoryError"} & names) or "can't allocate memory" in str(error)


def _save(error: Exception) -> str:
    """Write the traceback to a new file that only this user can read, and return its path."""
    handle, path = tempfile.mkstemp(prefix="dsnet-traceback-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"dsnet {dsnet.__version__}, Python {platform.python_version()}, {platform.platform()}\n")
        torch = sys.modules.get("torch")
        file.write(f"torch {getattr(torch, '__version__', 'not imported')}\n")
        file.write(f"command: {sys.argv!r}\n\n")
        traceback.print_exception(error, file=file)
    return path
