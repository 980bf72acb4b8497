"""Sets whose classes are to be those of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from dsnet.data.in_memory import ImageSet
from dsnet.data.lazy import LazySet
from dsnet.errors import DsnetError, printable

__all__ = ["in_classes_of"]

S = TypeVar("S", bound=ImageSet | LazySet)


def in_classes_of(source: S, classes: tuple[str, ...], whose: str) -> S:
    """The set with its labels as numbers of ``classes``, by name.

    Where only one of the two has names, and the other plain numbers, labels stay as they are.
    """
    if source.classes == classes:
        return source
    ours, theirs = (all(name.isdigit() for name in names) for names in (source.classes, classes))
    if ours != theirs and len(source.classes) <= len(classes):
        return replace(source, classes=classes)
    strange = sorted(set(source.classes) - set(classes))
    if strange:
        raise DsnetError(
            f"{source.name} has classes that {whose} does not have: {_some(strange)} "
            f"(it has {_some(classes)})"
        )
    numbers = torch.tensor([classes.index(name) for name in source.classes], device=source.labels.device)
    return replace(source, labels=numbers[source.labels], classes=classes)


def _some(names: Sequence[str]) -> str:
    return ", ".join(printable(name, 60) for name in names[:5]) + ", …" * (len(names) > 5)
