"""The batch size from which routing is faster than one route for all images, as measured."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.core.timer import time_interleaved
from dsnet.counts import human
from dsnet.errors import DsnetError
from dsnet.routes import Route
from dsnet.routing.policies import CascadePolicy
from dsnet.runtime.executors.composite import AnyCompiled
from dsnet.runtime.forced_routes import assigned_call, normalized_shares, sample_routes, thresholds_for

__all__ = ["BreakEven", "Times", "measure"]

ROUNDS, WARM_UP = 7, 2
MIN_IMAGES = 16  # of a mix: small batches run several times in a row


class Times(NamedTuple):
    """Milliseconds per batch."""

    batch: int
    routed: float
    single: float  # all images at the largest route within the budget
    largest: float  # all images at the largest route


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Times of routed batches and of batches at one route. Print it for a table.

    Attributes:
        network: The name of the network.
        where: Backend and device.
        shares: The share of the images that each route answers.
        single: The largest route within the budget.
        times: Times by batch size, in ascending order.
    """

    network: str
    where: str
    shares: Mapping[int, float]
    single: Route
    times: tuple[Times, ...]

    @property
    def smallest_batch(self) -> int | None:
        """Return the smallest measured batch size from which on routing always pays, if there is one."""
        smallest = None
        for t in sorted(self.times, reverse=True):
            if t.routed >= t.largest:
                break
            smallest = t.batch
        return smallest

    def __str__(self) -> str:
        mix = ", ".join(f"{100 * share:.0f} % route {number}" for number, share in self.shares.items())
        pays_from = (
            f"from batches of {self.smallest_batch} on"
            if self.smallest_batch is not None
            else "at none of these batch sizes: all images at the largest route are as fast"
        )
        single = f"route {self.single.number}, ms"
        lines = [f"{'batch':>5}  {'routed, ms':>10}  {single:>12}  {'largest, ms':>11}  pays"]
        for t in self.times:
            pays = f"{t.largest / t.routed:.2f} ×" if t.routed < t.largest else "no"
            lines.append(f"{t.batch:>5}  {t.routed:>10.3g}  {t.single:>12.3g}  {t.largest:>11.3g}  {pays}")
        return "\n".join([f"{self.network}, {self.where}: {mix}", f"Routing pays {pays_from}.", "", *lines])


@torch.no_grad()
def measure(
    compiled: AnyCompiled,
    shares: Mapping[int, float],
    single: Route,
    batches: Iterable[int] | int,
    *,
    cascade: CascadePolicy | None = None,
) -> BreakEven:
    """Time batches that are routed in these shares, or a cascade whose routes answer them.

    Args:
        compiled: The compiled network of a plan.
        shares: The share of the images that each route answers.
        single: The route to compare with.
        batches: Batch sizes, or one.
        cascade: Time this cascade, with thresholds that give the shares.
    """
    batches = tuple(batches) if isinstance(batches, Iterable) else (batches,)
    if not batches or any(type(batch) is not int or batch < 1 for batch in batches):
        raise DsnetError(f"batches are positive integers, not {batches!r}")
    shares, times = normalized_shares(shares), []
    for batch in sorted(set(batches)):
        repeats = max(1, -(-MIN_IMAGES // batch))
        calls = _calls(compiled, shares, single, batch, repeats, cascade)
        samples = time_interleaved(calls, compiled.device, rounds=ROUNDS, warm_up=WARM_UP)
        medians = {name: statistics.median(milliseconds) for name, milliseconds in samples.items()}
        times.append(Times(batch, medians["routed"] / repeats, medians["single"], medians["largest"]))
    where = f"{compiled.backend} on {compiled.device.type}, {human(compiled.resident)}B of weights"
    return BreakEven(network=compiled.name, where=where, shares=shares, single=single, times=tuple(times))


def _calls(
    compiled: AnyCompiled,
    shares: Mapping[int, float],
    single: Route,
    batch: int,
    repeats: int,
    cascade: CascadePolicy | None,
) -> dict[str, Callable[[], object]]:
    shape = (repeats * batch, *compiled.image_shape)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(compiled.device, compiled.takes)
    pieces = torch.split(x, batch)
    if cascade is not None:
        thresholds = _thresholds(compiled, x, cascade.routes, shares)
        run_cascade = compiled.executor.run_cascade
        routed = [functools.partial(run_cascade, piece, cascade.routes, thresholds) for piece in pieces]
    else:
        routes = [compiled.space.resolve(number) for number in sample_routes(shares, repeats * batch)]
        routed = [
            functools.partial(assigned_call(compiled, routes[i * batch : (i + 1) * batch]), piece)
            for i, piece in enumerate(pieces)
        ]
    largest = [route for route in compiled.space if compiled.holds(route)][-1]
    return {
        "routed": lambda: [call() for call in routed],
        "single": lambda: compiled.executor.run_route(pieces[0], single),
        "largest": lambda: compiled.executor.run_route(pieces[0], largest),
    }


def _thresholds(
    compiled: AnyCompiled, x: Tensor, routes: Sequence[int], shares: Mapping[int, float]
) -> tuple[float, ...]:
    """Return the thresholds with which the routes of a cascade answer these shares of the images."""
    remaining = [sum(shares.get(number, 0.0) for number in routes[i:]) for i in range(1, len(routes))]
    return tuple(thresholds_for(compiled, x, routes, [round(share * len(x)) for share in remaining]))
