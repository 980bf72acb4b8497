"""The public names of the package and their signatures, as text."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

PACKAGES = (
    "dsnet",
    "dsnet.calibration",
    "dsnet.data",
    "dsnet.detection",
    "dsnet.models",
    "dsnet.models.convert",
    "dsnet.routing",
    "dsnet.runtime",
    "dsnet.slicing",
    "dsnet.training",
)


def public_api() -> str:
    """One line for each public name, and for each public method of the package's own classes."""
    text = "".join(f"{line}\n" for package in PACKAGES for line in _lines(package))
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # of functions that are defaults


def _lines(package: str) -> Iterator[str]:
    module = importlib.import_module(package)
    for name in sorted(module.__all__):
        value = getattr(module, name)
        path = f"{package}.{name}"
        if not inspect.isclass(value):
            yield path + (str(inspect.signature(value)) if inspect.isfunction(value) else "")
            continue
        yield f"class {path}{_signature(value)}"
        for attribute, member in sorted(vars(value).items()):
            if not attribute.startswith("_"):
                yield f"    {attribute}{_signature(member)}"


def _signature(value: object) -> str:
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not inspect.isclass(function) and not inspect.isfunction(function):
        return ""
    try:
        return str(inspect.signature(function))
    except ValueError:  # a protocol, an enumeration
        return ""
