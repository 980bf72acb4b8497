"""A network whose images take routes that are given beforehand: for timing, where decisions must be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet.errors import DsnetError, shorten
from dsnet.models.group_by_route import Routable, greedy, run_from_states
from dsnet.routes import Route, RouteSpace
from dsnet.routing.policies import RoutedOutput, margin, run_gated_routes, unsure
from dsnet.runtime.executors.host import Engine, GateChoices
from dsnet.runtime.promotion import promoting
from dsnet.slicing import Mode

__all__ = ["Drawn", "Followed", "adding_up", "decisions", "mixed", "thresholds_for"]


class Followed(NamedTuple):
    """What stands at a gate, and which images of the batch these are."""

    state: Any  # the network's own
    rows: Tensor  # [n]
    gate: int

    def take(self, at: Tensor) -> Followed:
        """Some of the images, by their places [n]."""
        return Followed(self.state.take(at), self.rows[at], self.gate)

    def narrow(self, start: int, stop: int) -> Followed:
        """The images of a range, without a copy."""
        return Followed(self.state.narrow(start, stop), self.rows[start:stop], self.gate)

    @classmethod
    def join(cls, states: Sequence[Followed]) -> Followed:
        """The images of all, in order."""
        joined = states[0].state.join([state.state for state in states])
        return cls(joined, torch.cat([state.rows for state in states]), states[0].gate)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A network, asked as routing asks it, whose gates score highest what was drawn for each image.

    The gates' own scores are computed, and put aside.
    """

    network: Routable[Any]
    gates: tuple[GateChoices, ...]  # each decides between all choices of the whole space
    rows: Tensor  # [B]: 0, 1, 2, …
    wanted: tuple[Tensor, ...]  # [B, choices] a gate: 1 at the choice to take, else 0

    @classmethod
    def of(cls, network: Routable[Any], routes: Sequence[Route], device: torch.device) -> Drawn:
        """For a batch of so many images, each at its route."""
        gates = tuple(GateChoices(options) for options in network.space.choices)
        wanted = tuple(
            torch.tensor(
                [[float(option == route.choices[stage]) for option in gate.choices] for route in routes],
                device=device,
            )
            for stage, gate in enumerate(gates)
        )
        return cls(network, gates, torch.arange(len(routes), device=device), wanted)

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

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> Followed:
        """Prefix and first gate."""
        return Followed(self.network.run_prefix(x, mode), self.rows, 0)

    def gate_scores(self, state: Followed) -> Tensor:
        """1 for the choice to take, 0 for the others."""
        self.network.gate_scores(state.state)
        own = self.wanted[state.gate]
        return own if state.rows is self.rows else own[state.rows]

    def run_segment(self, state: Followed, choices: tuple[int, ...], mode: Mode | None = None) -> Followed:
        """From the gate that made the last of ``choices`` to the next one."""
        return Followed(self.network.run_segment(state.state, choices, mode), state.rows, len(choices))

    def run_last_segment(self, state: Followed, choices: tuple[int, ...], mode: Mode | None = None) -> Tensor:
        """From the last gate to the logits."""
        return self.network.run_last_segment(state.state, choices, mode)

    def run_from_states(
        self, states: dict[tuple[int, ...], Followed], choices: tuple[int, ...], mode: Mode | None = None
    ) -> Tensor:
        """A route's logits from what stands at the gates on its way."""
        return run_from_states(self, states, choices, mode)

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """All images at one route."""
        return self.network.run_route(x, route, mode)


def mixed(
    engine: Engine, routes: Sequence[Route], *, promote: bool = False
) -> Callable[[Tensor], RoutedOutput]:
    """The plan for a batch of so many images, each at its route or, promoted, at a larger one."""
    for route in routes:
        if not engine.holds(route):
            raise DsnetError(f"this plan does not hold route {route.number}")
    graphed = engine.graphed
    if graphed is not None:
        given = torch.tensor([route.choices for route in routes], device=engine.device)
        own = all(
            choice in gate.choices
            for route in routes
            for choice, gate in zip(route.choices, engine.gates, strict=True)
        )
        return lambda x: graphed.run(x, given=given, own=own, promote=promote)
    network = Drawn.of(engine, routes, engine.device)
    decide = promoting(greedy, engine, network.gates) if promote else greedy
    return lambda x: run_gated_routes(network, x, decide)


def thresholds_for(engine: Engine, x: Tensor, routes: Sequence[int], counts: Sequence[int]) -> list[float]:
    """With which so many images go on from each route, equal margins aside."""
    found: list[float] = []
    left = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for number, count in zip(routes[:-1], counts, strict=True):
        sure = margin(engine.run_route(x, engine.space.resolve(number))).double()
        ordered = [-1.0, *sure[left].sort()[0].tolist(), 2.0]  # no margin is as small or as large
        found.append((ordered[count] + ordered[count + 1]) / 2)
        left &= unsure(sure, found[-1])
    return found


def adding_up(shares: Mapping[int, float]) -> dict[int, float]:
    """The same shares of routes, adding up to 1; those of 0 are left out."""
    if not isinstance(shares, Mapping):
        raise DsnetError(f"a mix is shares by route, as {{0: 0.7, 13: 0.3}}, not {shorten(shares)}")
    for number, share in shares.items():
        if not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise DsnetError(
                f"the share of route {number} must be a number of at least 0, not {shorten(share)}"
            )
    total = sum(shares.values())
    if not 0 < total < math.inf:
        raise DsnetError("a mix needs a route with a share above 0, and a finite sum")
    return {number: share / total for number, share in sorted(shares.items()) if share}


def decisions(shares: Mapping[int, float], images: int, seed: int = 0) -> list[int]:
    """Routes for so many images in these shares, as near as whole images come to them, in a drawn order."""
    exact = {number: share * images for number, share in shares.items()}
    counts = {number: int(count) for number, count in exact.items()}
    by_rest = sorted(exact, key=lambda number: counts[number] - exact[number])
    for number in by_rest[: images - sum(counts.values())]:
        counts[number] += 1
    made = [number for number, count in counts.items() for _ in range(count)]
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed)).tolist()
    return [made[i] for i in order]
