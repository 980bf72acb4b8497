"""Which routes a plan holds for a budget, and how routes for another budget are added.

A cascade needs the routes of its setting. A gate may take any of its choices at any budget, but takes few of
them often: those that calibration images took are packed and compiled; where it can be done without a copy
(`fallback_segments`), the others run slices of the network's own weights, until a budget needs them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.core.timer import Progress
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.router import Router
from dsnet.runtime.backends.base import Executable, get_backend
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork
from dsnet.runtime.partition.segments import SegmentKey, share

__all__ = ["RouteExtender", "Needed", "SourceNetwork", "can_fall_back", "needed_for", "fallback_segments"]

Options = Sequence[tuple[int, ...]]  # choices by gate
SPARE = 64  # images of a part that runs the network's own weights, at most


class Needed(NamedTuple):
    """What a budget needs, gate by gate."""

    taken: Options  # choices that images took at calibration, or all that may be taken
    possible: Options  # all that may be taken


def needed_for(network: Supernet, router: Router | None, budget: float | None, *, every: bool) -> Needed:
    """The choices for a budget, or with ``every`` for all budgets that the router keeps."""
    gates = tuple(network.gate(number).choices for number in range(len(network.gates)))
    if router is None:
        return Needed(gates, gates)
    points = router.curve if every or budget is None else (router.point(budget),)
    routes = {number for point in points for number in router.policy_at(point).needed_routes()}
    if routes:
        options = _choices(network, routes)
        return Needed(options, options)
    if every or budget is None or len(gates) > 1:
        return Needed(gates, gates)
    taken = {number for point in points for number, count in point.route_counts if count}
    return Needed(_choices(network, taken) if taken else gates, gates)


def _choices(network: Supernet, routes: set[int]) -> tuple[tuple[int, ...], ...]:
    rows = zip(*(network.space.resolve(number).choices for number in sorted(routes)), strict=True)
    return tuple(tuple(sorted(set(row))) for row in rows)


def can_fall_back(network: Supernet, device: torch.device, precision: torch.dtype, *, captured: bool) -> bool:
    """Whether the network's own weights can run what a plan does not hold."""
    weight = network.head.classifier.weight
    same = (weight.device, weight.dtype) == (device, precision)
    return same and precision in (torch.float32, torch.float64) and not captured and len(network.gates) == 1


class SourceNetwork:
    """The network that a plan was made from, and what its weights were then."""

    def __init__(self, network: Supernet) -> None:
        self.network = network
        self.versions = _versions(network)

    def check(self) -> None:
        """Raises where it is not as it was: the plan has old weights, and would get new ones beside them."""
        if self.network.training or _versions(self.network) != self.versions:
            raise DsnetError(
                "this needs routes that the plan does not hold, and the network that it was made from has "
                "changed since; compile again, or with budgets='all' before the network changes"
            )


class _Spare(Executable):
    """An executable of the network's weights, as long as they are those that the plan was made from."""

    def __init__(self, call: Executable, origin: SourceNetwork) -> None:
        self.call, self.origin = call, origin

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.origin.check()
        return self.call(*inputs)


def fallback_segments(
    origin: SourceNetwork, options: Options, held: Options, image_size: int | tuple[int, int] | None
) -> dict[SegmentKey, BucketedProgram]:
    """Parts of the choices that are not held, as slices of the network's weights; they take no memory."""
    missing = [tuple(c for c in own if c not in has) for own, has in zip(options, held, strict=True)]
    if not any(missing):
        return {}
    found = {}
    for history, part in share(origin.network, missing, image_size=image_size).items():
        if history:
            x = part.example(1)
            call = get_backend("eager").convert(part.module, *x)(*x)
            found[history] = BucketedProgram({SPARE: _Spare(call, origin)}, {SPARE: 1e3}, any_batch=True)
    return found


class RouteExtender:
    """Adds routes to an compiled where another budget needs them. Threads may share one."""

    def __init__(
        self,
        origin: SourceNetwork,
        make: Callable[[Options, CompiledNetwork, Progress], CompiledNetwork],
        spare: Callable[[Options, Options], dict[SegmentKey, BucketedProgram]] | None,
        progress: Progress,
    ) -> None:
        self.origin, self.make, self.fallback, self.progress = origin, make, spare, progress
        self.lock = threading.Lock()
        self.latest: CompiledNetwork | None = None  # which holds all that was ever asked for

    def extended(
        self,
        compiled: CompiledNetwork,
        router: Router | None,
        budget: float | None,
        progress: Progress | None,
    ) -> CompiledNetwork:
        """The network with all parts that the budget needs; itself, if it has them."""
        needed = needed_for(self.origin.network, router, budget, every=False)
        wanted = needed.possible if self.fallback is None else needed.taken
        with self.lock:
            latest = self.latest or compiled
            missing = [set(own) - set(has) for own, has in zip(wanted, latest.options, strict=True)]
            if any(missing):
                self.origin.check()
                union = tuple(
                    tuple(sorted({*own, *has})) for own, has in zip(wanted, latest.options, strict=True)
                )
                latest = self.make(union, latest, progress or self.progress)
            if self.fallback is not None:
                latest = replace(latest, fallback=self.fallback(needed.possible, latest.options))
            self.latest = latest
        return latest


def _versions(network: Supernet) -> tuple[tuple[int, int], ...]:
    """What tells whether weights were replaced or written to."""
    tensors = itertools.chain(network.parameters(), network.buffers())
    return tuple((t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors)
