"""Sizes, norm keys and stages of the segments of a supernet."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Literal

from dsnet.errors import DsnetError
from dsnet.models.blocks import Step
from dsnet.routes import Slice

__all__ = ["BnKey", "SliceTable", "norm_keys", "split_stages"]

BnKey = Literal["stage", "prefix"]

SliceTable = tuple[tuple[tuple[Slice, ...], ...], ...]
"""[gate][choice] → sizes of the stages that this choice decides."""


def norm_keys(choices: Sequence[int], bn_key: BnKey) -> tuple[int, ...]:
    """Return the number of norm keys of each gate's stages.

    Args:
        choices: Number of choices of each gate.
        bn_key: ``prefix`` keeps statistics for each history of choices, ``stage`` for each choice of the
            stage's own gate.

    Examples:
        >>> norm_keys([4, 4], "prefix"), norm_keys([4, 4], "stage")
        ((4, 16), (4, 4))
    """
    if bn_key not in ("stage", "prefix"):
        raise DsnetError(f"unknown bn_key {bn_key!r}; possible: stage, prefix")
    return tuple(choices) if bn_key == "stage" else tuple(itertools.accumulate(choices, operator.mul))


def split_stages(steps: Sequence[Step], sizes: Sequence[Slice]) -> tuple[tuple[Step, ...], ...] | None:
    """Split the steps of a segment into its stages, or return None if their sizes do not say how.

    Args:
        steps: Steps in the order of the stages, each with a size equal to its stage's. If two consecutive
            stages have equal sizes, the identity of the size objects tells them apart.
        sizes: The sizes of the stages.
    """
    stages: list[list[Step]] = [[] for _ in sizes]
    stage = 0
    for step in steps:
        following = sizes[stage + 1] if stage + 1 < len(sizes) else None
        starts_next = step.size is following and step.size is not sizes[stage]
        if stages[stage] and following is not None and (starts_next or step.size != sizes[stage]):
            stage += 1
        if step.size != sizes[stage]:
            return None
        stages[stage].append(step)
    return tuple(map(tuple, stages)) if all(stages) else None
