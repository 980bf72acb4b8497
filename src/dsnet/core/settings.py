"""Settings as nested frozen dataclasses: from plain data and ``key=value``, with errors that name the key.

Unknown keys and values of a wrong type are errors that list what is possible. A key is a path (``optim.lr``);
where only one group has a field of that name the path may be left out (``lr``).
"""

from __future__ import annotations

import ast
import difflib
import functools
import math
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dsnet.errors import DsnetError, shorten

__all__ = ["check_kind", "from_plain", "keys_of", "override", "parse_assignments", "to_plain"]

T = TypeVar("T")

UNIONS = (Union, types.UnionType)
DESCRIPTIONS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "none",
}


def to_plain(settings: Any) -> dict[str, Any]:  # noqa: ANN401  (a dataclass)
    """Return settings as plain data (JSON types)."""
    return {field.name: _plain(getattr(settings, field.name)) for field in fields(settings)}


def _plain(value: Any) -> Any:  # noqa: ANN401  (any setting)
    if is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def from_plain(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Return the settings that `to_plain` wrote; missing fields get their defaults."""
    known = _types(cls)
    for key in data:
        if key not in known:
            raise DsnetError(_unknown(path + key, [path + name for name in known]))
    values = {key: _convert(known[key], value, path + key) for key, value in data.items()}
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    missing = [path + name for name in needed if name not in values]
    if missing:
        raise DsnetError(f"the settings lack {', '.join(missing)}")
    return cls(**values)


def check_kind(data: Mapping[str, Any], expected: type[Any], other: type[Any], message: str) -> None:
    """Raise a `DsnetError` if plain data has keys that settings of class ``other`` have, not ``expected``."""
    unknown = set(data) - set(_types(expected))
    if unknown and unknown <= set(_types(other)):
        raise DsnetError(message)


def keys_of(cls: type[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of all settings with their types."""
    for name, kind in _types(cls).items():
        if is_dataclass(kind):
            yield from keys_of(kind, f"{path}{name}.")  # type: ignore[arg-type]
        else:
            yield path + name, kind


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse assignments.

    >>> parse_assignments(["optim.lr=0.1", "model=ds_mbnet", "start=none"])
    {'optim.lr': 0.1, 'model': 'ds_mbnet', 'start': None}
    """
    parsed: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise DsnetError(f"--set takes key=value, not {shorten(text)}")
        try:
            parsed[key] = {"true": True, "false": False, "none": None}[value.lower()]
        except KeyError:
            try:
                parsed[key] = ast.literal_eval(value)
            except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: nested deeply
                parsed[key] = value
    return parsed


def override(settings: T, changes: Mapping[str, Any]) -> T:
    """Return the settings with some keys changed."""
    known = dict(keys_of(type(settings)))
    data = to_plain(settings)
    for key, value in changes.items():
        *groups, name = _resolve(key, known).split(".")
        functools.reduce(operator.getitem, groups, data)[name] = value
    return from_plain(type(settings), data)


def _resolve(key: str, known: Mapping[str, Any]) -> str:
    """Return the full path of a key; keys of a mapping (``options.norm``) are not checked."""
    if key in known:
        return key
    group = key.rpartition(".")[0]
    if group in known and _is_mapping(known[group]):
        return key
    paths = [path for path in known if path.rpartition(".")[2] == key]
    if len(paths) == 1:
        return paths[0]
    if paths:
        raise DsnetError(f"{key} is ambiguous: {' or '.join(paths)}?")
    raise DsnetError(_unknown(key, list(known)))


def _unknown(key: str, possible: list[str]) -> str:
    short = key[:100]  # comparing long texts takes long
    last = short.rpartition(".")[2]
    close = difflib.get_close_matches(short, possible, n=3, cutoff=0.8) or [
        path
        for path in possible
        if difflib.SequenceMatcher(None, last, path.rpartition(".")[2]).ratio() > 0.7
    ]
    hint = f"did you mean {' or '.join(close[:3])}?" if close else f"possible: {', '.join(possible)}"
    return f"there is no setting {shorten(key)}; {hint}"


def _types(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _is_mapping(kind: Any) -> bool:  # noqa: ANN401  (a type)
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _convert(kind: Any, value: Any, path: str) -> Any:  # noqa: ANN401  (types and values of settings)
    if is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise DsnetError(
                f"{path} is a group of settings, not {shorten(value)}; its keys: {', '.join(_types(kind))}"
            )
        return from_plain(kind, value, f"{path}.")
    _check_numbers(value, path)
    members = get_args(kind) if get_origin(kind) in UNIONS else (kind,)
    if tuple[str, ...] in members:
        value = _texts(value)
    if not _fits(kind, value):
        raise DsnetError(f"{path} must be {_describe(kind)}, not {shorten(value)}")
    others = [member for member in members if member is not float]
    if float in members and isinstance(value, int) and not any(_fits(member, value) for member in others):
        return float(value)
    return _tuples(value)


def _check_numbers(value: Any, path: str) -> None:  # noqa: ANN401
    """Raise if a number, or one in a list, is not finite or too large for a tensor."""
    if isinstance(value, list | tuple):
        for item in value:
            _check_numbers(item, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise DsnetError(f"{path} must be a finite number, not {value}")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise DsnetError(f"{path} must be below 2**63, not {shorten(value)}")


def _tuples(value: Any) -> Any:  # noqa: ANN401
    """Return nested lists as tuples, those in mappings too."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _texts(value: Any) -> Any:  # noqa: ANN401
    """Return a list of texts from one text with commas, or from a list in which some look like numbers."""
    if isinstance(value, str):
        return tuple(text.strip() for text in value.split(",") if text.strip())
    some = value if isinstance(value, list | tuple) else (value,)
    if all(isinstance(one, str | int) and not isinstance(one, bool) for one in some):
        return tuple(map(str, some))
    return value


def _fits(kind: Any, value: Any) -> bool:  # noqa: ANN401
    """Return whether a value has a type; lists count as tuples, whole numbers as floats."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in UNIONS:
        return any(_fits(member, value) for member in args)
    if origin is Literal:
        return value in args and not isinstance(value, bool)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        items = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(value) == len(items) and all(map(_fits, items, value))
    if _is_mapping(kind):
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _describe(kind: Any) -> str:  # noqa: ANN401
    origin, args = get_origin(kind), get_args(kind)
    if origin in UNIONS:
        return " or ".join(map(_describe, args))
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin is tuple:
        return f"({', '.join('…' if item is Ellipsis else _describe(item) for item in args)})"
    return DESCRIPTIONS.get(kind, "a mapping of keys to values")
