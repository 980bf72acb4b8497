"""Converted networks as supernets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from dsnet.gate import RoutingGate
from dsnet.models.blocks import Step
from dsnet.models.convert._blocks import GraphBlock, GraphHead
from dsnet.models.convert.report import Conversion
from dsnet.models.input_spec import InputSpec
from dsnet.models.options import GateOptions
from dsnet.models.supernet import Supernet
from dsnet.routes import RouteSpace, Slice
from dsnet.slicing import Factory

__all__ = ["ConvertedNetwork", "Parts"]


class Parts(NamedTuple):
    """The blocks of a converted network.

    Attributes:
        prefix: Blocks in front of the gate.
        stages: Blocks behind it, by stage.
        head: The head.
        gate_width: Channels of the features at the gate.
        kept: For each route, the blocks of each stage that it runs, by position.
    """

    prefix: Sequence[GraphBlock]
    stages: Sequence[Sequence[GraphBlock]]
    head: GraphHead
    gate_width: int
    kept: Sequence[Sequence[Sequence[int]]]


class ConvertedNetwork(Supernet):
    """A network of other origin as a supernet. `dsnet.convert` makes it.

    Attributes:
        conversion: What the conversion did.
        new_classifier: Whether pretrained weights were loaded without those of the classifier.
    """

    gate_type = RoutingGate
    new_classifier = False

    def __init__(
        self,
        parts: Parts,
        sizes: Sequence[Sequence[Slice]],
        *,
        name: str,
        input_spec: InputSpec,
        options: GateOptions,
        factory: Factory,
        conversion: Conversion,
        narrowings: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        rows = tuple(tuple(row) for row in sizes)
        super().__init__(
            RouteSpace.of_table(name, rows, narrowings),
            slices=(rows,),
            gate_widths=[parts.gate_width],
            input_spec=input_spec,
            options=options,
            factory=factory,
        )
        self.conversion = conversion
        self._kept = parts.kept
        self.prefix = nn.ModuleList(parts.prefix)
        self.stages = nn.ModuleList(nn.ModuleList(stage) for stage in parts.stages)
        self.head = parts.head
        self._whole = Slice(width=parts.gate_width)
        self.seal()

    def prefix_steps(self) -> list[Step]:
        """Return the blocks before the gate, which run whole."""
        return [Step(block, self._whole) for block in self.prefix]  # type: ignore[arg-type]

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        """Return the blocks of a route behind the gate."""
        (route,) = choices
        return [
            Step(stage[position], size, self.key(choices))  # type: ignore[index]
            for stage, size, kept in zip(self.stages, self.slices(choices), self._kept[route], strict=True)
            for position in kept
        ]
