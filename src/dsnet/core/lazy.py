"""Imports on first use, so that `import dsnet` and command-line help load no torch."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["lazy_imports"]


def lazy_imports(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its public names on first use.

    The names are those that the package imports under ``if TYPE_CHECKING:``, so each is listed once
    and type checkers know it.

    Args:
        package: ``__name__`` of the package.

    Examples:
        >>> if TYPE_CHECKING:  # doctest: +SKIP
        ...     from dsnet.routes import Route
        ... else:
        ...     __getattr__, __dir__ = lazy_imports(__name__)
    """
    module = sys.modules[package]
    assert module.__file__ is not None
    origins: dict[str, str] = {}
    for block in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom)
                assert line.module is not None
                origins |= {alias.name: line.module for alias in line.names}

    def get(name: str) -> object:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if origins[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(origins[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *origins})
