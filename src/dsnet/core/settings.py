"""Settings as nested frozen dataclasses: from plain data and ``key=value``, with errors that name the key.

Unknown keys and values of the wrong kind are errors that say what is possible. A key is a path
(``optim.lr``); where only one group has a field of that name the path may be left out (``lr``).
"""

from __future__ import annotations

import ast
import difflib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dsnet.errors import DsnetError, shorten

__all__ = ["check_kind", "from_plain", "keys_of", "override", "parse_assignments", "to_plain"]

T = TypeVar("T")


def to_plain(settings: Any) -> dict[str, Any]:  # noqa: ANN401  (a dataclass)
    """Settings as JSON types."""
    plain: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            plain[field.name] = to_plain(value)
        elif isinstance(value, Mapping):
            plain[field.name] = dict(value)
        else:
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def from_plain(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Settings from what `to_plain` gave; fields left out keep their defaults."""
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


def check_kind(data: Mapping[str, Any], own: type[Any], other: type[Any], told: str) -> None:
    """Raises, with what is ``told``, where plain data has keys that only settings of class ``other`` have."""
    strange = set(data) - set(_types(own))
    if strange and strange <= set(_types(other)):
        raise DsnetError(told)


def keys_of(cls: type[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """All keys with their types, groups taken apart."""
    for name, kind in _types(cls).items():
        if is_dataclass(kind):
            yield from keys_of(kind, f"{path}{name}.")  # type: ignore[arg-type]
        else:
            yield path + name, kind


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """``["optim.lr=0.1", "model=ds_mbnet"]`` → keys and values."""
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
    """The settings with some keys changed."""
    known = dict(keys_of(type(settings)))
    resolved = {_resolve(key, known): value for key, value in changes.items()}
    data = to_plain(settings)
    for key, value in resolved.items():
        *groups, name = key.split(".")
        place = data
        for group in groups:
            place = place[group]
        place[name] = value
    return from_plain(type(settings), data)


def _resolve(key: str, known: Mapping[str, Any]) -> str:
    """The full path of a key; keys of a mapping (``options.norm``) pass."""
    if key in known:
        return key
    group = key.rpartition(".")[0]
    if group in known and _is_mapping(known[group]):
        return key
    found = [path for path in known if path.rpartition(".")[2] == key]
    if len(found) == 1:
        return found[0]
    if found:
        raise DsnetError(f"{key} is not clear: {' or '.join(found)}?")
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
    if tuple[str, ...] in _members(kind):
        value = _texts(value)
    if _fits(kind, value):
        return _tuples(value)
    if _fits_float(kind, value):
        return float(value)
    raise DsnetError(f"{path} must be {_describe(kind)}, not {shorten(value)}")


def _check_numbers(value: Any, path: str) -> None:  # noqa: ANN401
    """Raises where a number, or one in a list, is not finite or beyond what tensors hold."""
    if isinstance(value, list | tuple):
        for item in value:
            _check_numbers(item, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise DsnetError(f"{path} must be a finite number, not {value}")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise DsnetError(f"{path} must be below 2**63, not {shorten(value)}")


def _tuples(value: Any) -> Any:  # noqa: ANN401
    """Lists, as JSON has them, and lists in them as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _texts(value: Any) -> Any:  # noqa: ANN401
    """A list of texts as people write one: with commas, and some may look like numbers."""
    if isinstance(value, str):
        return tuple(text.strip() for text in value.split(",") if text.strip())
    some = value if isinstance(value, list | tuple) else (value,)
    if all(isinstance(one, str | int) and not isinstance(one, bool) for one in some):
        return tuple(map(str, some))
    return value


def _members(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401  (a type)
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(kind: Any, value: Any) -> bool:  # noqa: ANN401
    for member in _members(kind):
        origin = get_origin(member)
        if origin is Literal:
            if value in get_args(member) and not isinstance(value, bool):
                return True
        elif origin is tuple:
            if not isinstance(value, list | tuple):
                continue
            inner = get_args(member)
            if inner[-1] is Ellipsis:
                inner = inner[:1] * len(value)
            fits = len(value) == len(inner)
            if fits and all(_fits(k, v) or _fits_float(k, v) for k, v in zip(inner, value, strict=True)):
                return True
        elif _is_mapping(member):
            if isinstance(value, Mapping):
                return True
        elif member is type(None):
            if value is None:
                return True
        elif isinstance(value, member) and (member is bool or not isinstance(value, bool)):
            return True
    return False


def _fits_float(kind: Any, value: Any) -> bool:  # noqa: ANN401
    return float in _members(kind) and isinstance(value, int) and not isinstance(value, bool)


def _describe(kind: Any) -> str:  # noqa: ANN401
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
    }
    described = []
    for member in _members(kind):
        if get_origin(member) is Literal:
            described += [str(option) for option in get_args(member)]
        elif get_origin(member) is tuple:
            inner = ["…" if kind is Ellipsis else _describe(kind) for kind in get_args(member)]
            described.append(f"({', '.join(inner)})")
        else:
            described.append(names.get(member, "a mapping of keys to values"))
    return " or ".join(described)
