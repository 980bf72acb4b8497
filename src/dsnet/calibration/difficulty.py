"""Whether a gate decides at all: what it chose, how evenly, and how much that says of how hard images are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dsnet.calibration.route_outputs import RouteOutputs, walk
from dsnet.routing.cost_table import CostTable

__all__ = ["DIFFICULTIES", "GateReport", "difficulties", "gate_reports", "mutual_information"]

DIFFICULTIES = ("easy", "dependent", "hard")
STATIC = 0.99  # share of images with the same choice from which a gate decides nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What one gate did with some images."""

    gate: int
    choice_counts: Mapping[int, int]  # choice → images
    entropy: float  # bits, of the choices
    information: float  # bits that a choice tells about the difficulty of its image

    @property
    def static(self) -> bool:
        """Whether (nearly) all images got the same choice."""
        return max(self.choice_counts.values()) >= STATIC * sum(self.choice_counts.values())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave."""
        taken = {int(choice): count for choice, count in data["taken"].items()}
        return cls(
            gate=data["gate"], choice_counts=taken, entropy=data["entropy"], information=data["information"]
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        return {
            "gate": self.gate,
            "taken": {str(choice): count for choice, count in self.choice_counts.items()},
            "entropy": self.entropy,
            "information": self.information,
            "static": self.static,
        }


def difficulties(outputs: RouteOutputs) -> Tensor:
    """[N]: 0 easy (the smallest route is right), 1 dependent (another one is), 2 hard (the largest is not).

    The paper's three kinds; what neither end solves but a route between them does counts as hard.
    """
    easy, solved = outputs.correct[:, 0], outputs.correct[:, -1]
    return torch.where(easy, 0, torch.where(solved, 1, 2))


def gate_reports(outputs: RouteOutputs, costs: CostTable, weight: float = 0.0) -> list[GateReport]:
    """Every gate's decisions on these images, at a weight of cost."""
    columns = torch.from_numpy(walk(outputs, costs, weight))
    choices = torch.tensor([route.choices for route in outputs.routes])[columns]  # [N, gates]
    hard = difficulties(outputs)
    reports = []
    for gate, options in enumerate(outputs.options):
        own = choices[:, gate]
        taken = {choice: int((own == choice).sum()) for choice in options}
        counts = torch.tensor(list(taken.values()), dtype=torch.float64)
        reports.append(
            GateReport(
                gate=gate,
                choice_counts=taken,
                entropy=_entropy(counts),
                information=mutual_information(own, hard),
            )
        )
    return reports


def mutual_information(a: Tensor, b: Tensor) -> float:
    """Bits that one label [N] tells about the other, from their counts."""
    _, a = torch.unique(a, return_inverse=True)
    _, b = torch.unique(b, return_inverse=True)
    joint = torch.zeros(int(a.max()) + 1, int(b.max()) + 1, dtype=torch.float64)
    joint.index_put_((a, b), torch.ones(len(a), dtype=torch.float64), accumulate=True)
    return max(0.0, _entropy(joint.sum(0)) + _entropy(joint.sum(1)) - _entropy(joint.flatten()))


def _entropy(counts: Tensor) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum()) + 0.0
