"""Kinds of values that JSON files may contain, checked with errors that name the file and the key.

`read_json` limits size and depth before it parses.

>>> check(record({"step": whole(1)}), {"step": 3}, "example.json")
>>> check(record({"step": whole(1)}), {"step": "x"}, "example.json")
Traceback (most recent call last):
    ...
dsnet.errors.DsnetError: example.json: step is 'x', expected a whole number of at least 1
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsnet.core.files import open_regular
from dsnet.errors import DsnetError, printable, shorten

__all__ = [
    "ANY",
    "FLAG",
    "Kind",
    "check",
    "if_object",
    "items",
    "maybe",
    "number",
    "one_of",
    "parse_json",
    "read_json",
    "record",
    "row",
    "table",
    "text",
    "whole",
]

LARGEST = 64 * 2**20  # bytes of a JSON file
DEEPEST = 64  # objects and arrays inside each other
WHOLE = 2**53  # largest whole number that every JSON reader keeps exactly


class _WrongError(Exception):
    """A value that is not allowed, and the path of its key."""

    def __init__(self, at: str, text: str) -> None:
        super().__init__(text)
        self.at, self.text = at, text


@dataclass(frozen=True, slots=True)
class Kind:
    """What is allowed at one place of a file.

    Args:
        expected: Describes it in errors.
        allows: Whether a value is allowed, apart from what is inside.
        inside: Maps a value and its key path to the kinds, values and key paths inside.
    """

    expected: str
    allows: Callable[[Any], bool] = lambda value: True
    inside: Callable[[Any, str], Iterable[tuple[Kind, Any, str]]] = lambda value, at: ()


ANY = Kind("any value")
FLAG = Kind("true or false", lambda value: isinstance(value, bool))


def whole(minimum: int = 0, maximum: int = WHOLE) -> Kind:
    """Return the kind of whole numbers within limits."""
    limits = f"of at least {minimum}" if maximum == WHOLE else f"from {minimum} to {maximum}"
    return Kind(
        f"a whole number {limits}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum,
    )


def number(minimum: float = -math.inf, maximum: float = math.inf, *, infinite: bool = False) -> Kind:
    """Return the kind of numbers within limits: finite unless ``infinite``, never NaN."""

    def allows(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(value, int) and abs(value) >= 2**1023:  # no float holds it
            return False
        return (infinite or math.isfinite(value)) and minimum <= value <= maximum

    expected = "a number" if infinite else "a finite number"
    if math.isfinite(maximum):
        expected += f" from {minimum:g} to {maximum:g}"
    elif math.isfinite(minimum):
        expected += f" of at least {minimum:g}"
    return Kind(expected, allows)


def text(maximum: int = 4096, pattern: str = ".*", form: str = "text") -> Kind:
    """Return the kind of texts of limited length that match a pattern; ``form`` describes the pattern."""
    matcher = re.compile(pattern, re.ASCII | re.DOTALL)
    return Kind(
        f"{form} of at most {maximum} characters",
        lambda value: isinstance(value, str) and len(value) <= maximum and bool(matcher.fullmatch(value)),
    )


def one_of(*values: str) -> Kind:
    """Return the kind of one of several texts."""
    return Kind(" or ".join(map(repr, values)), lambda value: isinstance(value, str) and value in values)


def maybe(kind: Kind) -> Kind:
    """Return the kind of null or another kind."""
    return Kind(
        f"{kind.expected}, or null",
        inside=lambda value, at: () if value is None else ((kind, value, at),),
    )


def if_object(kind: Kind) -> Kind:
    """Return the kind of any value, in which an object must be of another kind."""
    return Kind(
        f"{kind.expected}, or no object",
        inside=lambda value, at: ((kind, value, at),) if isinstance(value, Mapping) else (),
    )


def items(kind: Kind, minimum: int = 0, maximum: int = 2**24) -> Kind:
    """Return the kind of lists of limited length with items of one kind."""
    length = f"at least {minimum}" if minimum else "any number"
    return Kind(
        f"a list of {minimum if minimum == maximum else length}, each {kind.expected}",
        lambda value: isinstance(value, list | tuple) and minimum <= len(value) <= maximum,
        lambda value, at: ((kind, item, f"{at}[{position}]") for position, item in enumerate(value)),
    )


def row(*kinds: Kind) -> Kind:
    """Return the kind of lists with a kind for every position."""
    return Kind(
        f"a list of {len(kinds)}: {', '.join(kind.expected for kind in kinds)}",
        lambda value: isinstance(value, list | tuple) and len(value) == len(kinds),
        lambda value, at: ((kind, value[i], f"{at}[{i}]") for i, kind in enumerate(kinds)),
    )


def table(kind: Kind, key: Kind | None = None, minimum: int = 0) -> Kind:
    """Return the kind of objects whose keys are data: keys of one kind (default: text), values of another."""
    key = key or text()

    def inside(value: Mapping[str, Any], at: str) -> Iterator[tuple[Kind, Any, str]]:
        for name, item in value.items():
            if not key.allows(name):
                raise _WrongError(at, f"has the key {shorten(name)}, expected {key.expected}")
            yield kind, item, _join(at, name)

    entries = f" with at least {minimum} entries" if minimum else ""
    return Kind(
        f"an object{entries}, each value {kind.expected}",
        lambda value: isinstance(value, Mapping) and minimum <= len(value) <= 2**20,
        inside,
    )


def record(kinds: Mapping[str, Kind] = MappingProxyType({}), *, more: bool = False) -> Kind:
    """Return the kind of objects with known keys.

    Args:
        kinds: Kinds by key. A key that ends with a question mark may be missing.
        more: Whether other keys may be there, with any value.
    """
    known = {key.rstrip("?"): kind for key, kind in kinds.items()}
    required = [key for key in kinds if not key.endswith("?")]

    def inside(value: Mapping[str, Any], at: str) -> Iterator[tuple[Kind, Any, str]]:
        for key in required:
            if key not in value:
                raise _WrongError(_join(at, key), f"is missing, expected {known[key].expected}")
        for key, item in value.items():
            if key in known:
                yield known[key], item, _join(at, key)
            elif not more:
                raise _WrongError(_join(at, key), f"is unknown; possible: {', '.join(known)}")

    expected = f"an object with {', '.join(required)}" if required else "an object"
    return Kind(expected, lambda value: isinstance(value, Mapping), inside)


def _join(at: str, key: object) -> str:
    name = printable(str(key), 60)
    return f"{at}.{name}" if at else name


def _check(kind: Kind, value: object, at: str) -> None:
    if not kind.allows(value):
        raise _WrongError(at, f"is {shorten(value)}, expected {kind.expected}")
    for inner, item, place in kind.inside(value, at):
        _check(inner, item, place)


def check(kind: Kind, value: object, where: str | Path) -> None:
    """Raise a `DsnetError` that names the file, the key, the value and what is allowed there."""
    try:
        _check(kind, value, "")
    except _WrongError as error:
        raise DsnetError(f"{where}: {error.at or 'the content'} {error.text}") from None


def read_json(path: Path, kind: Kind | None = None, *, missing: str | None = None) -> Any:  # noqa: ANN401
    """Return the content of a JSON file.

    Args:
        path: The file.
        kind: What the file may contain (default: anything).
        missing: The error message if there is no such file.

    Raises:
        DsnetError: If the file cannot be read, or its content is not allowed.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise DsnetError(missing or f"there is no file {path}") from None
    except OSError as error:
        raise DsnetError(f"{path} cannot be read: {error.strerror or error}") from error
    data = parse_json(raw, path)
    if kind is not None:
        check(kind, data, path)
    return data


def parse_json(raw: bytes, where: str | Path) -> Any:  # noqa: ANN401
    """Parse JSON of limited size and depth; errors name the file ``where``."""
    if len(raw) > LARGEST:
        raise DsnetError(f"{where} has more than {LARGEST} bytes, expected at most that many")
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DsnetError(f"{where} is not JSON: {error.reason} at byte {error.start}") from error
    if (deep := _depth(content)) > DEEPEST:
        raise DsnetError(f"{where} is nested {deep} levels deep, expected at most {DEEPEST}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DsnetError(f"{where} is not JSON: {printable(str(error), 200)}") from error


def _depth(content: str) -> int:
    """Return how deep objects and arrays are nested, without parsing."""
    depth = deepest = 0
    for bracket in re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"|[^\[\]{}"]+', "", content, flags=re.DOTALL):
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest
