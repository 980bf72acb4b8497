"""Difficulty of images, and reports on how a gate's decisions depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import GatePolicy
from dsnet.routing.route_outputs import RouteOutputs

__all__ = ["DIFFICULTIES", "GateReport", "difficulties", "gate_reports", "mutual_information"]

DIFFICULTIES = ("easy", "dependent", "hard")
STATIC = 0.99  # share of images with the same choice from which a gate is called static


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """Decisions of one gate."""

    gate: int
    choice_counts: Mapping[int, int]  # choice → images
    entropy: float  # of the choices, in bits
    information: float  # mutual information of choice and difficulty, in bits

    @property
    def static(self) -> bool:
        """Whether (nearly) all images got the same choice."""
        return max(self.choice_counts.values()) >= STATIC * sum(self.choice_counts.values())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that `to_dict` wrote."""
        counts = {int(choice): count for choice, count in data["taken"].items()}
        return cls(
            gate=data["gate"],
            choice_counts=counts,
            entropy=data["entropy"],
            information=data["information"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types)."""
        return {
            "gate": self.gate,
            "taken": {str(choice): count for choice, count in self.choice_counts.items()},
            "entropy": self.entropy,
            "information": self.information,
            "static": self.static,
        }


def difficulties(outputs: RouteOutputs) -> Tensor:
    """Return difficulties [N] as positions in `DIFFICULTIES`, by the paper's definition.

    Easy: the smallest route is correct. Dependent: the largest is, the smallest is not. Hard: neither is,
    even if a route between them is correct.
    """
    easy, solved = outputs.correct[:, 0], outputs.correct[:, -1]
    return torch.where(easy, 0, torch.where(solved, 1, 2))


def gate_reports(outputs: RouteOutputs, costs: CostTable) -> list[GateReport]:
    """Return a report on every gate's own decisions on these images."""
    columns = torch.from_numpy(GatePolicy(costs=costs).replay(outputs))
    choices = torch.tensor([route.choices for route in outputs.routes])[columns]  # [N, gates]
    difficulty = difficulties(outputs)
    reports = []
    for gate, options in enumerate(outputs.options):
        chosen = choices[:, gate]
        counts = {choice: int((chosen == choice).sum()) for choice in options}
        reports.append(
            GateReport(
                gate=gate,
                choice_counts=counts,
                entropy=_entropy(torch.tensor(list(counts.values()), dtype=torch.float64)),
                information=mutual_information(chosen, difficulty),
            )
        )
    return reports


def mutual_information(a: Tensor, b: Tensor) -> float:
    """Return the mutual information of two labels [N] in bits, from their counts."""
    _, a = torch.unique(a, return_inverse=True)
    _, b = torch.unique(b, return_inverse=True)
    joint = torch.zeros(int(a.max()) + 1, int(b.max()) + 1, dtype=torch.float64)
    joint.index_put_((a, b), torch.ones(len(a), dtype=torch.float64), accumulate=True)
    return max(0.0, _entropy(joint.sum(0)) + _entropy(joint.sum(1)) - _entropy(joint.flatten()))


def _entropy(counts: Tensor) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum()) + 0.0
