"""Cost tables: the cost of every segment, in multiply-adds or milliseconds, for losses and decisions.

A route's cost is that of the prefix plus that of each segment, which depends on the gate's choice and on the
choice before it. A differentiable cost is probabilities times this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsnet.cost import madds
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.models.composite import CompositeNetwork
from dsnet.models.counting import segment_costs
from dsnet.models.group_by_route import Routable

__all__ = ["CostPenalties", "CostTable", "Unit"]

Unit = Literal["madds", "ms"]

CostPenalties = tuple[tuple[tuple[float, ...], ...], ...]
"""What is subtracted from the scores of gates: ``[gate][previous choice][choice]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Cost of an image: ``segments[gate][previous choice][choice]``; at the first gate previous is 0.

    Where routes belong to several members (`dsnet.models.composite`), each member has a prefix of its own,
    and the gate is at that of member 0: a segment costs what the route adds behind this gate, for routes of
    other members all that they run.
    """

    unit: Unit
    prefix: float  # up to the first gate
    segments: tuple[tuple[tuple[float, ...], ...], ...]
    network: str = ""  # its name; empty: any network with these choices
    members: tuple[int, ...] = ()  # that each route belongs to; empty: there is one
    prefixes: tuple[float, ...] = ()  # of each member

    def __post_init__(self) -> None:
        if self.unit not in ("madds", "ms"):
            raise DsnetError(f"unknown unit of cost {shorten(self.unit)}; possible: madds, ms")
        before = 1
        for number, gate in enumerate(self.segments):
            sizes = {len(row) for row in gate}
            if len(gate) != before or len(sizes) != 1 or 0 in sizes:
                raise DsnetError(
                    f"a cost table needs a row of costs for each of {before} choices before gate {number}"
                )
            (before,) = sizes
        values = [self.prefix, *(c for gate in self.segments for row in gate for c in row)]
        if not self.segments or not all(isinstance(v, int | float) and 0 <= v < math.inf for v in values):
            raise DsnetError("a cost table needs finite costs of at least 0 for every segment")
        if self.members and (
            len(self.segments) != 1
            or len(self.members) != len(self.segments[0][0])
            or any(type(m) is not int or not 0 <= m < len(self.prefixes) for m in self.members)
            or not all(isinstance(v, int | float) and 0 <= v < math.inf for v in self.prefixes)
        ):
            raise DsnetError("a cost table of several members needs one for each route, and its prefix")
        if self.largest == 0:
            raise DsnetError("a cost table needs a largest route that costs something")

    @classmethod
    def of_model(cls, model: Supernet, image_size: int | tuple[int, int] | None = None) -> CostTable:
        """Count multiply-adds by arithmetic, gates included (the paper's convention)."""
        if isinstance(model, CompositeNetwork):
            model.input_spec.shape(image_size)
            return cls._of_composite(model)
        costs = segment_costs(model, model.input_spec.shape(image_size))
        sizes = model.choices
        segments = [
            [[0.0] * size for _ in range(before)] for before, size in zip((1, *sizes), sizes, strict=False)
        ]
        for choices in model.segments:
            before = choices[-2] if len(choices) > 1 else 0
            segments[len(choices) - 1][before][choices[-1]] = float(costs[choices].madds())
        table = cls(
            unit="madds",
            prefix=float(costs[()].madds()),
            segments=tuple(tuple(tuple(row) for row in rows) for rows in segments),
            network=model.spec.name,
        )
        largest = model.space.largest
        assert table.of(largest.choices) == madds(model, largest, image_size)
        return table

    @classmethod
    def _of_composite(cls, model: CompositeNetwork) -> CostTable:
        counted = [model.segment_costs(route) for route in model.space]
        prefixes = {key[0]: cost for costs in counted for key, cost in costs.items() if len(key) == 1}
        prefix = float(prefixes[0].madds()) if model.has_gate else 0.0
        members = tuple(model.member_of(route) for route in model.space)
        totals = [float(sum(cost.madds() for cost in costs.values())) for costs in counted]
        row = tuple(t - (prefix if m == 0 else 0.0) for t, m in zip(totals, members, strict=True))
        return cls(
            unit="madds",
            prefix=prefix,
            segments=((row,),),
            network=model.spec.name,
            members=members,
            prefixes=tuple(float(prefixes[m].madds()) for m in range(len(model.members))),
        )

    def segment(self, gate: int, previous: int | None, choice: int) -> float:
        """Return the cost of the segment after a gate's choice, up to the next gate or the logits."""
        return self.segments[gate][previous or 0][choice]

    def of(self, choices: tuple[int, ...]) -> float:
        """Return the cost of a whole route, alone."""
        if self.members and self.members[choices[0]] != 0:
            return self.segments[0][0][choices[0]]
        return self.gated(choices)

    def gated(self, choices: tuple[int, ...]) -> float:
        """Return the cost of a route that the gates choose."""
        steps = enumerate(zip((0, *choices), choices, strict=False))
        return sum((self.segments[gate][before][choice] for gate, (before, choice) in steps), self.prefix)

    def of_several(self, routes: Iterable[tuple[int, ...]]) -> float:
        """Return the cost of running several routes on one image, shared segments counted once."""
        if self.members:
            numbers = sorted({choices[0] for choices in routes})
            shared = {self.members[number] for number in numbers}
            behind = sum(self.of((number,)) - self.prefixes[self.members[number]] for number in numbers)
            return behind + sum(self.prefixes[member] for member in shared)
        ran = sorted({choices[:gates] for choices in routes for gates in range(1, len(choices) + 1)})
        return self.prefix + sum(self.segment(len(h) - 1, h[-2] if len(h) > 1 else None, h[-1]) for h in ran)

    def penalties(
        self,
        weight: float,
        choices: Sequence[Sequence[int]],
        previous: Sequence[Sequence[int]] | None = None,
    ) -> CostPenalties:
        """Return λ · cost / cost of the largest route for every choice of every gate.

        A gate that pays for cost takes the choice with the largest score − penalty.

        Args:
            weight: The Lagrange multiplier λ. Above 0 it saves cost, below 0 it spends more.
            choices: For every gate the choices that its scores stand for, in their order.
            previous: For every gate the choices before it that get a row (default: all, by number).

        Returns:
            Penalties ``[gate][row of previous][position in choices]``.

        Raises:
            DsnetError: If the weight is not finite.
        """
        if not math.isfinite(weight):
            raise DsnetError(f"the weight of cost must be finite, not {weight}")
        if previous is None:
            previous = [range(len(rows)) for rows in self.segments]
        scale = weight / self.largest
        return tuple(
            tuple(tuple(scale * self.segment(gate, before, choice) for choice in options) for before in rows)
            for gate, (rows, options) in enumerate(zip(previous, choices, strict=True))
        )

    @property
    def largest(self) -> float:
        """Cost of the route that takes every gate's last choice."""
        return self.of(tuple(len(gate[0]) - 1 for gate in self.segments))

    def fits(self, model: Routable[Any]) -> bool:
        """Return whether the table is for this network and has a cost for every choice."""
        if self.network not in ("", model.name):
            return False
        sizes = [(len(gate), len(gate[0])) for gate in self.segments]
        return sizes == list(zip((1, *model.choices[:-1]), model.choices, strict=True))
