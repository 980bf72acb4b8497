"""Map the labels of a dataset to the classes of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from dsnet.data.in_memory import InMemoryDataset
from dsnet.data.lazy import LazyDataset
from dsnet.errors import DsnetError, printable

__all__ = ["map_classes"]

D = TypeVar("D", bound=InMemoryDataset | LazyDataset)


def map_classes(dataset: D, classes: tuple[str, ...], owner: str) -> D:
    """Return the dataset with labels that are indices of ``classes``, matched by name.

    Labels stay as they are if only one of the two has class names and the other plain numbers.

    Args:
        dataset: The dataset to map.
        classes: Names of the classes to map to.
        owner: What these classes belong to, for the error message.

    Raises:
        DsnetError: The dataset has a class that is not in ``classes``.
    """
    if dataset.classes == classes:
        return dataset
    numbered, target_numbered = (all(name.isdigit() for name in c) for c in (dataset.classes, classes))
    if numbered != target_numbered and len(dataset.classes) <= len(classes):
        return replace(dataset, classes=classes)
    unknown = sorted(set(dataset.classes) - set(classes))
    if unknown:
        raise DsnetError(
            f"{dataset.name} has classes that {owner} does not have: {_first(unknown)} "
            f"(it has {_first(classes)})"
        )
    indices = torch.tensor([classes.index(name) for name in dataset.classes], device=dataset.labels.device)
    return replace(dataset, labels=indices[dataset.labels], classes=classes)


def _first(names: Sequence[str]) -> str:
    return ", ".join(printable(name, 60) for name in names[:5]) + ", …" * (len(names) > 5)
