"""Which routes a plan holds for a budget, and how routes for another budget are added.

A cascade needs the routes of its operating point. A gate may take any of its choices at any budget, but most
images take few of them: choices that calibration images took are compiled. Where `can_fall_back` returns
true, the other choices run slices of the network's own weights until a budget needs them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from dsnet.core.timer import Progress
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.router import Router
from dsnet.runtime.backends.base import Executable, get_backend
from dsnet.runtime.executors.host import BucketedProgram
from dsnet.runtime.partition.segments import SegmentKey, share

__all__ = [
    "NeededChoices",
    "Options",
    "RouteExtender",
    "SourceNetwork",
    "can_fall_back",
    "choices_of_routes",
    "needed_choices",
]

C = TypeVar("C")  # a compiled network
Options = Sequence[tuple[int, ...]]  # choices by gate
FALLBACK_BATCH = 64  # images that a fallback segment runs together, at most


class NeededChoices(NamedTuple):
    """The choices that a budget needs, by gate."""

    likely: Options  # taken by calibration images; all possible choices if that is not known
    possible: Options


def needed_choices(
    network: Supernet, router: Router | None, budget: float | None, *, all_budgets: bool
) -> NeededChoices:
    """Return the choices for a budget, or for all budgets of the router."""
    gates = tuple(gate.choices for gate in map(network.gate, range(len(network.gates))))
    if router is None:
        return NeededChoices(gates, gates)
    points = router.curve if all_budgets or budget is None else (router.point(budget),)
    routes = {route for point in points for route in router.policy_at(point).needed_routes()}
    if routes:
        options = choices_of_routes(network, routes)
        return NeededChoices(options, options)
    if all_budgets or budget is None or len(gates) > 1:
        return NeededChoices(gates, gates)
    used = {route for point in points for route, count in point.route_counts if count}
    return NeededChoices(choices_of_routes(network, used) if used else gates, gates)


def choices_of_routes(network: Supernet, routes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return the choices at each gate that some of these routes take, in ascending order."""
    columns = zip(*(network.space.resolve(route).choices for route in routes), strict=True)
    return tuple(tuple(sorted(set(column))) for column in columns)


def can_fall_back(network: Supernet, device: torch.device, precision: torch.dtype, *, captured: bool) -> bool:
    """Return whether the network's own weights can run choices that a plan does not hold."""
    weight = network.head.classifier.weight
    same = (weight.device, weight.dtype) == (device, precision)
    return same and precision in (torch.float32, torch.float64) and not captured and len(network.gates) == 1


class SourceNetwork:
    """The network that a plan was compiled from, which must not change while its weights are still needed."""

    def __init__(self, network: Supernet) -> None:
        self.network = network
        self.versions = self._versions()

    def check(self) -> None:
        """Raise if the network has changed: the plan has the old weights."""
        if self.network.training or self._versions() != self.versions:
            raise DsnetError(
                "this needs routes that the plan does not hold, and the network that it was made from has "
                "changed since; compile again, or with budgets='all' before the network changes"
            )

    def _versions(self) -> list[tuple[int, int]]:
        """Return numbers that differ once a weight is replaced or written to."""
        tensors = itertools.chain(self.network.parameters(), self.network.buffers())
        return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]

    def fallback_segments(
        self, options: Options, compiled: Options, image_size: int | tuple[int, int] | None
    ) -> dict[SegmentKey, BucketedProgram]:
        """Return segments for the choices that are not compiled, as slices of the network's weights."""
        missing = [tuple(c for c in own if c not in has) for own, has in zip(options, compiled, strict=True)]
        if not any(missing):
            return {}
        segments = {}
        for history, segment in share(self.network, missing, image_size=image_size).items():
            if history:
                x = segment.example(1)
                call = _Fallback(get_backend("eager").convert(segment.module, *x)(*x), self)
                segments[history] = BucketedProgram(
                    {FALLBACK_BATCH: call}, {FALLBACK_BATCH: 1e3}, any_batch=True
                )
        return segments


class _Fallback(Executable):
    """A segment that runs the network's weights while they are those that the plan was compiled from."""

    def __init__(self, call: Executable, source: SourceNetwork) -> None:
        self.call, self.source = call, source

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.source.check()
        return self.call(*inputs)


class RouteExtender:
    """Adds choices to a compiled network where another budget needs them. Threads may share one.

    Args:
        source: The network.
        compile_choices: Compiles choices, reusing the segments of a compiled network.
        fallback: Returns fallback segments for the choices [first argument] that are not compiled [second],
            or None if there is no fallback.
        progress: Shows what is compiled.
    """

    def __init__(
        self,
        source: SourceNetwork,
        compile_choices: Callable[[Options, Any, Progress], Any],
        fallback: Callable[[Options, Options], dict[SegmentKey, BucketedProgram]] | None,
        progress: Progress,
    ) -> None:
        self.source, self.compile_choices, self.progress = source, compile_choices, progress
        self.fallback = fallback
        self.lock = threading.Lock()
        self.latest: Any = None  # has all choices that any budget has needed so far

    def extended(
        self,
        compiled: C,
        router: Router,
        budget: float | None,
        progress: Progress | None,
    ) -> C:
        """Return the compiled network with all segments that the budget needs."""
        needed = needed_choices(self.source.network, router, budget, all_budgets=False)
        wanted = needed.possible if self.fallback is None else needed.likely
        with self.lock:
            latest: Any = self.latest or compiled
            pairs = list(zip(wanted, latest.options, strict=True))
            if any(set(own) - set(has) for own, has in pairs):
                self.source.check()
                union = tuple(tuple(sorted({*own, *has})) for own, has in pairs)
                latest = self.compile_choices(union, latest, progress or self.progress)
            if self.fallback is not None:
                latest = replace(latest, fallback=self.fallback(needed.possible, latest.options))
            self.latest = latest
        return cast(C, latest)
