"""From which batch size on routing pays: a mixed batch beside everyone at one route, as measured here."""

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
from dsnet.runtime.executors.host import CompiledNetwork
from dsnet.runtime.forced_routes import adding_up, decisions, mixed, thresholds_for

__all__ = ["BreakEven", "Times", "measure"]

ROUNDS, WARM_UP = 7, 2
FEWEST = 16  # images of a mix: of small batches several run in a row


class Times(NamedTuple):
    """Milliseconds a batch."""

    batch: int
    routed: float
    single: float  # everyone at the largest route within the budget
    largest: float  # everyone at the largest route


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """What routing takes at several batch sizes, beside single routes."""

    network: str
    where: str  # backend and device
    shares: Mapping[int, float]  # of the images that routes answer
    single: Route
    times: tuple[Times, ...]

    def pays(self, batch: int) -> bool:
        """Whether routing is faster than everyone at the largest route, at the size measured next to this."""
        near = min(self.times, key=lambda t: (abs(t.batch - batch), t.batch))
        return near.routed < near.largest

    @property
    def least(self) -> int | None:
        """The smallest measured batch from which on routing always pays; none: it does not."""
        found = None
        for t in sorted(self.times, reverse=True):
            if t.routed >= t.largest:
                break
            found = t.batch
        return found

    def __str__(self) -> str:
        mix = ", ".join(f"{100 * share:.0f} % route {number}" for number, share in self.shares.items())
        said = (
            f"from batches of {self.least} on"
            if self.least is not None
            else "at none of these batch sizes: everyone at the largest route is as fast"
        )
        single = f"route {self.single.number}, ms"
        lines = [f"{'batch':>5}  {'routed, ms':>10}  {single:>12}  {'largest, ms':>11}  pays"]
        for t in self.times:
            pays = f"{t.largest / t.routed:.2f} ×" if t.routed < t.largest else "no"
            lines.append(f"{t.batch:>5}  {t.routed:>10.3g}  {t.single:>12.3g}  {t.largest:>11.3g}  {pays}")
        return "\n".join([f"{self.network}, {self.where}: {mix}", f"Routing pays {said}.", "", *lines])


@torch.no_grad()
def measure(
    compiled: CompiledNetwork,
    shares: Mapping[int, float],
    single: Route,
    batches: Iterable[int] | int,
    *,
    cascade: CascadePolicy | None = None,
) -> BreakEven:
    """Times mixed batches with these shares, or a cascade whose routes answer them."""
    batches = tuple(batches) if isinstance(batches, Iterable) else (batches,)
    if not batches or any(type(batch) is not int or batch < 1 for batch in batches):
        raise DsnetError(f"batches are positive integers, not {batches!r}")
    shares, found = adding_up(shares), []
    for batch in sorted(set(batches)):
        several = max(1, -(-FEWEST // batch))
        calls = _calls(compiled, shares, single, batch, several, cascade)
        samples = time_interleaved(calls, compiled.device, rounds=ROUNDS, warm_up=WARM_UP)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        found.append(Times(batch, medians["routed"] / several, medians["single"], medians["largest"]))
    where = f"{compiled.backend} on {compiled.device.type}, {human(compiled.resident)}B of weights"
    return BreakEven(
        network=compiled.name, where=where, shares=dict(shares), single=single, times=tuple(found)
    )


def _calls(
    compiled: CompiledNetwork,
    shares: Mapping[int, float],
    single: Route,
    batch: int,
    several: int,
    cascade: CascadePolicy | None,
) -> dict[str, Callable[[], object]]:
    shape = (several * batch, compiled.input_spec.channels, *compiled.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    pieces = torch.split(images.to(compiled.device, compiled.takes), batch)
    space = compiled.space
    routed: list[Callable[[], object]]
    if cascade is not None:
        thresholds = _thresholds(compiled, torch.cat(list(pieces)), cascade.routes, shares)
        run = compiled.executor.run_cascade
        routed = [functools.partial(run, x, cascade.routes, thresholds) for x in pieces]
    else:
        drawn = decisions(shares, several * batch)
        at = [drawn[start : start + batch] for start in range(0, len(drawn), batch)]
        routed = [
            functools.partial(mixed(compiled, [space.resolve(n) for n in own]), x)
            for x, own in zip(pieces, at, strict=True)
        ]
    return {
        "routed": lambda: [call() for call in routed],
        "single": lambda: compiled.executor.run_route(pieces[0], single),
        "largest": lambda: compiled.executor.run_route(pieces[0], _largest(compiled)),
    }


def _thresholds(
    compiled: CompiledNetwork, x: Tensor, routes: Sequence[int], shares: Mapping[int, float]
) -> tuple[float, ...]:
    """With which routes answer these shares of the images."""
    beyond = [sum(shares.get(number, 0.0) for number in routes[place:]) for place in range(1, len(routes))]
    return tuple(thresholds_for(compiled, x, routes, [round(share * len(x)) for share in beyond]))


def _largest(compiled: CompiledNetwork) -> Route:
    """Of those that are held."""
    return [route for route in compiled.space if compiled.holds(route)][-1]
