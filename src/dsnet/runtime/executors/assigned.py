"""A network whose images take routes that are assigned beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models.group_by_route import Routable, run_from_states
from dsnet.routes import Route, RouteSpace
from dsnet.runtime.executors.base import GateChoices
from dsnet.slicing import Mode

__all__ = ["AssignedNetwork"]


class _State(NamedTuple):
    """What stands at a gate, and which images of the batch these are."""

    state: Any  # the network's own
    rows: Tensor  # [n]
    gate: int

    def take(self, at: Tensor) -> _State:
        """Some of the images, by their places [n]."""
        return _State(self.state.take(at), self.rows[at], self.gate)

    def narrow(self, start: int, stop: int) -> _State:
        """The images of a range, without a copy."""
        return _State(self.state.narrow(start, stop), self.rows[start:stop], self.gate)

    @classmethod
    def join(cls, states: Sequence[_State]) -> _State:
        """The images of all, in order."""
        joined = states[0].state.join([state.state for state in states])
        return cls(joined, torch.cat([state.rows for state in states]), states[0].gate)


@dataclass(frozen=True, slots=True, eq=False)
class AssignedNetwork:
    """A network, asked as routing asks it, whose gates score highest what was drawn for each image.

    The gates' own scores are computed, and put aside.
    """

    network: Routable[Any]
    gates: tuple[GateChoices, ...]  # each decides between all choices of the whole space
    rows: Tensor  # [B]: 0, 1, 2, …
    wanted: tuple[Tensor, ...]  # [B, choices] a gate: 1 at the choice to take, else 0

    @classmethod
    def of(cls, network: Routable[Any], choices: Tensor) -> AssignedNetwork:
        """Wrap a network for one batch; ``choices`` [B, gates] are those of its images."""
        gates = tuple(GateChoices(options) for options in network.space.choices)
        known = (torch.tensor(gate.choices, device=choices.device) for gate in gates)
        wanted = tuple((choices[:, number, None] == row).float() for number, row in enumerate(known))
        for number, scores in enumerate(wanted):
            unknown = choices[:, number][scores.sum(1) == 0]
            if len(unknown):
                raise DsnetError(f"{network.name} does not have choice {int(unknown[0])} at gate {number}")
        return cls(network, gates, torch.arange(len(choices), device=choices.device), wanted)

    @property
    def training(self) -> bool:
        """Whether the network is in training mode."""
        return self.network.training

    @property
    def name(self) -> str:
        """Which network."""
        return self.network.name

    @property
    def space(self) -> RouteSpace:
        """All routes."""
        return self.network.space

    @property
    def choices(self) -> tuple[int, ...]:
        """How many choices every gate has."""
        return self.network.choices

    @property
    def merges(self) -> bool:
        """Whether histories may be joined."""
        return self.network.merges

    @property
    def gated_mode(self) -> Mode | None:
        """That of the network, if it has one."""
        return getattr(self.network, "gated_mode", None)

    def gate(self, stage: int) -> GateChoices:
        """The gate in front of a stage."""
        return self.gates[stage]

    def check_images(self, x: Tensor) -> None:
        """Raises an error that says what images the network takes."""
        self.network.check_images(x)

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> _State:
        """Prefix and first gate."""
        return _State(self.network.run_prefix(x, mode), self.rows, 0)

    def gate_scores(self, state: _State) -> Tensor:
        """1 for the choice to take, 0 for the others."""
        self.network.gate_scores(state.state)
        own = self.wanted[state.gate]
        return own if state.rows is self.rows else own[state.rows]

    def run_segment(self, state: _State, choices: tuple[int, ...], mode: Mode | None = None) -> _State:
        """From the gate that made the last of ``choices`` to the next one."""
        return _State(self.network.run_segment(state.state, choices, mode), state.rows, len(choices))

    def run_last_segment(self, state: _State, choices: tuple[int, ...], mode: Mode | None = None) -> Tensor:
        """From the last gate to the logits."""
        return self.network.run_last_segment(state.state, choices, mode)

    def run_from_states(
        self, states: dict[tuple[int, ...], _State], choices: tuple[int, ...], mode: Mode | None = None
    ) -> Tensor:
        """A route's logits from what stands at the gates on its way."""
        return run_from_states(self, states, choices, mode)

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """All images at one route."""
        return self.network.run_route(x, route, mode)
