"""Columns, labels and class names of tables of images (Parquet, Hugging Face ``datasets``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsnet.errors import DsnetError, printable, shorten

__all__ = ["class_numbers", "label_tensor", "pick_columns"]

MAX_CLASSES = 10**6
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels")


def pick_columns(columns: Sequence[str], where: str) -> tuple[str, str]:
    """Return the columns that hold images and labels."""
    picked = []
    for names in (IMAGE_COLUMNS, LABEL_COLUMNS):
        column = next((name for name in names if name in columns), None)
        if column is None:
            has = printable(", ".join(columns), 500)
            raise DsnetError(f"{where} has no column {names[0]}; it has {has} (possible: {', '.join(names)})")
        picked.append(column)
    return picked[0], picked[1]


def label_tensor(labels: Sequence[object], where: str) -> Tensor:
    """Return labels, which must be whole numbers, as a tensor."""
    for row, label in enumerate(labels):
        if not isinstance(label, int) or not -(2**63) <= label < 2**63:
            raise DsnetError(f"{where}, row {row}: a label must be a whole number, not {shorten(label)}")
    return torch.tensor(labels, dtype=torch.long)


def class_numbers(labels: Tensor) -> tuple[str, ...]:
    """Return the numbers 0, 1, … as names of classes that have none."""
    if len(labels) == 0:
        return ()
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= MAX_CLASSES:
        raise DsnetError(f"labels must lie between 0 and {MAX_CLASSES - 1}, not between {low} and {high}")
    return tuple(map(str, range(high + 1)))
