"""Images promoted to a larger route, where a group that joins the next one is measured to be faster so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsnet.models.group_by_route import Decide
from dsnet.runtime.executors.batching import promotions
from dsnet.runtime.executors.host import Engine, GateChoices
from dsnet.runtime.partition.segments import part_behind

__all__ = ["promoting"]


def promoting(decide: Decide, engine: Engine, gates: Sequence[GateChoices] | None = None) -> Decide:
    """Decides as ``decide`` does, then promotes; between what the engine's gates have, or others."""

    def promoted(scores: Tensor, gate: int, previous: int | None) -> Tensor:
        taken = decide(scores, gate, previous)
        choices = (engine.gates if gates is None else gates)[gate].choices
        by_size = sorted(range(len(choices)), key=lambda position: choices[position])
        counted = torch.bincount(taken, minlength=len(choices)).tolist()

        def milliseconds(place: int, images: int) -> float:
            part = part_behind(gate, previous or 0, choices[by_size[place]])
            return engine.milliseconds(part, images)

        for small, large in promotions([counted[position] for position in by_size], milliseconds):
            taken = torch.where(taken == by_size[small], by_size[large], taken)
        return taken

    return promoted
