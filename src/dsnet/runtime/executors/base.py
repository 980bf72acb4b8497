"""The executor protocol: how a compiled network runs a batch in which every image has a route of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from dsnet.routes import Route
from dsnet.routing.cost_table import CostPenalties
from dsnet.routing.policies import RoutedOutput
from dsnet.runtime.executors.segment_calls import SegmentCalls

__all__ = ["Executor", "GateChoices"]


class GateChoices(NamedTuple):
    """The choices that a gate decides between."""

    choices: tuple[int, ...]


class Executor(Protocol):
    """Run batches of any size, also empty ones; images must have passed the network's ``check_images``.

    Three implementations: `HostExecutor` runs segment after segment, the grouped executor replays CUDA graphs
    of segments, and the ragged executor runs a mixed batch as one program. Threads may share one.
    """

    @property
    def max_batch(self) -> int:
        """The number of images that are best run together; more are run in chunks."""

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before the device is done."""

    @property
    def num_programs(self) -> int:
        """The number of programs that were compiled or captured."""

    def run_gate(self, x: Tensor, penalties: CostPenalties | None = None) -> RoutedOutput:
        """Run images [B, C, H, W] at the routes of the largest scores less ``penalties``.

        These are `CostTable.penalties` of the gates' own choices behind all choices before.
        """

    def run_assigned(self, x: Tensor, choices: Tensor, *, within_gates: bool = False) -> RoutedOutput:
        """Run each image at its own ``choices`` [B, gates], whatever the gates' scores.

        ``within_gates`` promises that the gates could have made these choices, for which an executor may have
        smaller programs.
        """

    def run_route(self, x: Tensor, route: Route) -> Tensor:
        """Run all images at one route and return their logits."""

    def run_cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        """Run ``routes`` one after the other, each for the images whose margin is below the threshold."""

    def segment_calls(self, x: Tensor) -> SegmentCalls:
        """Return functions that run the prefix, or a path of choices, on all of ``x``; for profiles."""
