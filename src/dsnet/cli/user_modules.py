"""``--import MODULE``: modules of the user, which register models, backends and recipes."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from dsnet.errors import DsnetError, shorten

__all__ = ["import_modules"]


def import_modules(names: Sequence[str]) -> None:
    """Import modules by name; the current folder comes first in the search path."""
    if names and "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in names:
        _import(name)


def _import(name: str) -> None:
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        hint = f": --import {Path(name).stem}" if name.endswith(".py") else ""
        raise DsnetError(
            f"--import takes the name of a module, as `import` does, not {shorten(name)}; a file in the "
            f"current folder is named without .py{hint}"
        )
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise _failed(name, error) from error
        raise DsnetError(
            f"--import {name}: there is no module {missing!r} in the current folder ({Path.cwd()}) or among "
            "the installed packages; run the command where the file is, or set PYTHONPATH"
        ) from None
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> DsnetError:
    """Return an error with the exception that the module raised, and its line if it has one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return DsnetError(f"--import {name}: importing it failed: {type(error).__name__}: {error}{where}")
