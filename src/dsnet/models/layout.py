"""The steps of each segment of a supernet, laid out once so that a pass does not build them again."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dsnet.errors import DsnetError
from dsnet.models.blocks import Step
from dsnet.routes import Slice
from dsnet.slicing import SplitBatchNorm2d

if TYPE_CHECKING:
    from dsnet.models.supernet import Supernet

__all__ = ["BnKey", "SegmentLayout", "SliceTable", "norm_keys", "split_stages"]

BnKey = Literal["stage", "prefix"]

SliceTable = tuple[tuple[tuple[Slice, ...], ...], ...]
"""[gate][choice] → sizes of the stages that this choice decides."""


@dataclass(frozen=True)
class SegmentLayout:
    """Steps, norms and stages of each segment, by the choices made so far; the prefix has no choices."""

    steps: dict[tuple[int, ...], tuple[Step, ...]]
    norms: dict[tuple[int, ...], tuple[tuple[SplitBatchNorm2d, int], ...]]  # with the key of each norm
    stages: dict[tuple[int, ...], tuple[tuple[Step, ...], ...] | None]  # None: sizes do not tell them apart

    @classmethod
    def of(cls, model: Supernet) -> SegmentLayout:
        """Lay out all segments of a network."""
        steps: dict[tuple[int, ...], tuple[Step, ...]] = {(): tuple(model.prefix_steps())}
        for gates in range(1, len(model.gates) + 1):
            for choices in itertools.product(*(range(len(row)) for row in model.slice_table[:gates])):
                steps[choices] = tuple(model.segment_steps(choices))
        blocks = dict.fromkeys(step.block for segment in steps.values() for step in segment)
        norms = {b: [m for m in b.modules() if isinstance(m, SplitBatchNorm2d)] for b in blocks}
        return cls(
            steps=steps,
            norms={
                choices: tuple((norm, step.key) for step in segment for norm in norms[step.block])
                for choices, segment in steps.items()
            },
            stages={
                choices: split_stages(segment, model.slices(choices))
                for choices, segment in steps.items()
                if choices
            },
        )


def norm_keys(choices: Sequence[int], bn_key: BnKey) -> tuple[int, ...]:
    """Return the number of norm keys of each stage, from the number of choices of each gate."""
    if bn_key not in ("stage", "prefix"):
        raise DsnetError(f"unknown bn_key {bn_key!r}; possible: stage, prefix")
    return tuple(choices) if bn_key == "stage" else tuple(itertools.accumulate(choices, operator.mul))


def split_stages(steps: Sequence[Step], sizes: Sequence[Slice]) -> tuple[tuple[Step, ...], ...] | None:
    """Split the steps of a segment into its stages, or return None if their sizes do not say how.

    Steps are in the order of the stages, each with a size equal to its stage's. If two consecutive stages
    have equal sizes, the identity of the size objects tells them apart.
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
