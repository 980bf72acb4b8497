"""What JSON files may hold: declared as values, checked in one place, with errors that name the key.

A `Kind` says what is allowed at one place of a file. `read_json` bounds size and depth before it parses.

>>> check(Fields({"step": Whole(1)}), {"step": 3}, "example.json")
>>> check(Fields({"step": Whole(1)}), {"step": "x"}, "example.json")
Traceback (most recent call last):
    ...
dsnet.errors.DsnetError: example.json: step is 'x', expected a whole number of at least 1
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dsnet.core.files import open_regular
from dsnet.errors import DsnetError, printable, shorten

__all__ = [
    "Fields",
    "Flag",
    "IfObject",
    "Items",
    "Kind",
    "Maybe",
    "Number",
    "OneOf",
    "Plain",
    "Row",
    "Table",
    "Text",
    "Whole",
    "check",
    "parse_json",
    "read_json",
]

LARGEST = 64 * 2**20  # bytes of a JSON file
DEEPEST = 64  # objects and arrays inside each other
WHOLE = 2**53  # largest whole number that every JSON reader keeps exactly


class _WrongError(Exception):
    """A value that is not allowed, and where it is."""

    def __init__(self, at: str, text: str) -> None:
        super().__init__(text)
        self.at, self.text = at, text


class Kind(Protocol):
    """What is allowed at one place."""

    def check(self, value: object, at: str) -> None:
        """Raise where the value at this key path is not allowed."""

    def __str__(self) -> str: ...


def _refuse(kind: Kind, value: object, at: str) -> None:
    raise _WrongError(at, f"is {shorten(value)}, expected {kind}")


@dataclass(frozen=True, slots=True)
class Plain:
    """Any JSON value is allowed here."""

    def check(self, value: object, at: str) -> None:
        """Accept every value without a check."""

    def __str__(self) -> str:
        return "any value"


@dataclass(frozen=True, slots=True)
class Flag:
    """Only true and false are allowed here."""

    def check(self, value: object, at: str) -> None:
        """Raise where it is no Boolean."""
        if not isinstance(value, bool):
            _refuse(self, value, at)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number within limits."""

    least: int = 0
    most: int = WHOLE

    def check(self, value: object, at: str) -> None:
        """Raise where it is no whole number or beyond the limits."""
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            _refuse(self, value, at)

    def __str__(self) -> str:
        if self.most == WHOLE:
            return f"a whole number of at least {self.least}"
        return f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Number:
    """A number within limits, finite unless ``infinite``; never NaN."""

    least: float = -math.inf
    most: float = math.inf
    infinite: bool = False

    def check(self, value: object, at: str) -> None:
        """Raise where it is no number or beyond the limits."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(self, value, at)
            return
        large = isinstance(value, int) and abs(value) >= 2**1023  # no float holds it
        finite = not large and math.isfinite(value)
        if large or (not finite and not self.infinite) or not self.least <= value <= self.most:
            _refuse(self, value, at)

    def __str__(self) -> str:
        kind = "a number" if self.infinite else "a finite number"
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"{kind} from {self.least:g} to {self.most:g}"
        return f"{kind} of at least {self.least:g}" if math.isfinite(self.least) else kind


@dataclass(frozen=True, slots=True)
class Text:
    """Text of limited length, of a form where ``pattern`` gives one."""

    most: int = 4096
    pattern: str | None = None
    form: str = "text"  # the pattern in words

    def check(self, value: object, at: str) -> None:
        """Raise where it is no text, too long, or of another form."""
        fits = isinstance(value, str) and len(value) <= self.most
        if not fits or (self.pattern and re.fullmatch(self.pattern, str(value), re.ASCII) is None):
            _refuse(self, value, at)

    def __str__(self) -> str:
        return f"{self.form} of at most {self.most} characters"


class OneOf:
    """One of several texts or numbers."""

    def __init__(self, *values: str | int) -> None:
        self.values = values

    def check(self, value: object, at: str) -> None:
        """Raise where it is none of them."""
        if not any(type(value) is type(known) and value == known for known in self.values):
            _refuse(self, value, at)

    def __str__(self) -> str:
        return " or ".join(map(repr, self.values))


@dataclass(frozen=True, slots=True)
class Maybe:
    """Null, or what another kind allows."""

    kind: Kind

    def check(self, value: object, at: str) -> None:
        """Raise where it is neither."""
        if value is not None:
            self.kind.check(value, at)

    def __str__(self) -> str:
        return f"{self.kind}, or null"


@dataclass(frozen=True, slots=True)
class IfObject:
    """Any value; an object must be as another kind says."""

    kind: Kind

    def check(self, value: object, at: str) -> None:
        """Raise where it is an object that the kind does not allow."""
        if isinstance(value, Mapping):
            self.kind.check(value, at)

    def __str__(self) -> str:
        return f"{self.kind}, or no object"


@dataclass(frozen=True, slots=True)
class Items:
    """A list of limited length."""

    kind: Kind
    least: int = 0
    most: int = 2**24

    def check(self, value: object, at: str) -> None:
        """Raise where it is no list, of another length, or holds what is not allowed."""
        if not isinstance(value, list | tuple) or not self.least <= len(value) <= self.most:
            _refuse(self, value, at)
            return
        for position, item in enumerate(value):
            self.kind.check(item, f"{at}[{position}]")

    def __str__(self) -> str:
        if self.least == self.most:
            return f"a list of {self.least}, each {self.kind}"
        least = f"at least {self.least}" if self.least else "any number"
        return f"a list of {least}, each {self.kind}"


class Row:
    """A list with a kind of its own at every position."""

    def __init__(self, *kinds: Kind) -> None:
        self.kinds = kinds

    def check(self, value: object, at: str) -> None:
        """Raise where it is no list, of another length, or holds what is not allowed."""
        if not isinstance(value, list | tuple) or len(value) != len(self.kinds):
            _refuse(self, value, at)
            return
        for position, (kind, item) in enumerate(zip(self.kinds, value, strict=True)):
            kind.check(item, f"{at}[{position}]")

    def __str__(self) -> str:
        return f"a list of {len(self.kinds)}: {', '.join(map(str, self.kinds))}"


@dataclass(frozen=True, slots=True)
class Table:
    """An object whose keys are data: every key of one form, every value of one kind."""

    kind: Kind
    key: Text = field(default_factory=Text)
    least: int = 0
    most: int = 2**20

    def check(self, value: object, at: str) -> None:
        """Raise where it is no object, or holds what is not allowed."""
        if not isinstance(value, Mapping) or not self.least <= len(value) <= self.most:
            _refuse(self, value, at)
            return
        for key, item in value.items():
            try:
                self.key.check(key, at)
            except _WrongError as error:
                raise _WrongError(at, f"has the key {shorten(key)}, expected {self.key}") from error
            self.kind.check(item, _join(at, key))

    def __str__(self) -> str:
        least = f" with at least {self.least} entries" if self.least else ""
        return f"an object{least}, each value {self.kind}"


@dataclass(frozen=True, slots=True)
class Fields:
    """An object with known keys; ``more`` lets others pass unchecked."""

    required: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)
    more: bool = False

    def check(self, value: object, at: str) -> None:
        """Raise where a key is missing or unknown, or a value is not allowed."""
        if not isinstance(value, Mapping):
            _refuse(self, value, at)
            return
        for key, kind in self.required.items():
            if key not in value:
                raise _WrongError(_join(at, key), f"is missing, expected {kind}")
        known = {**self.required, **self.optional}
        for key, item in value.items():
            if key in known:
                known[key].check(item, _join(at, key))
            elif not self.more:
                raise _WrongError(_join(at, key), f"is unknown; possible: {', '.join(known)}")

    def __str__(self) -> str:
        return f"an object with {', '.join(self.required)}" if self.required else "an object"


def _join(at: str, key: object) -> str:
    text = printable(str(key), 60)
    return f"{at}.{text}" if at else text


def check(kind: Kind, value: object, where: str | Path) -> None:
    """Raise a `DsnetError` that names the file, the key, the value and what is allowed there."""
    try:
        kind.check(value, "")
    except _WrongError as error:
        raise DsnetError(f"{where}: {error.at or 'the content'} {error.text}") from None


def read_json(path: Path, kind: Kind | None = None, *, missing: str | None = None) -> Any:  # noqa: ANN401
    """The content of a JSON file, checked; ``missing`` is what to say where there is none."""
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
    """Parse JSON of limited size and depth; ``where`` is its file."""
    if len(raw) > LARGEST:
        raise DsnetError(f"{where} has more than {LARGEST} bytes, expected at most that many")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DsnetError(f"{where} is no JSON: {error.reason} at byte {error.start}") from error
    if (deep := _depth(text)) > DEEPEST:
        raise DsnetError(f"{where} is nested {deep} levels deep, expected at most {DEEPEST}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DsnetError(f"{where} is no JSON: {printable(str(error), 200)}") from error


def _depth(text: str) -> int:
    """How deep objects and arrays are inside each other, without parsing."""
    depth = deepest = 0
    for bracket in re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"|[^\[\]{}"]+', "", text, flags=re.DOTALL):
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest
