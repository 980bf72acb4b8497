"""What routing saves on this machine: mixed batches of a plan beside what others do and beside the ideal.

Times are milliseconds a batch; every way takes its turn in every round, each call timed right after an
untimed one of its kind. *Ideal* is what nobody can have: stand-alone networks of the routes, made ready by
the same backend, each on a whole batch, weighted by the mix; for a cascade its first route on all images and,
of every further route, the share that goes on to it of what it has to run then. For single images the same
networks are also timed *in turn*, as the mix has them: each then finds the cache as another one left it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from dsnet.cost import madds
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.latency import device_name
from dsnet.runtime.conditions import Conditions, conditions, load_average
from dsnet.runtime.engine import Memory
from dsnet.runtime.making import compile as make_plan
from dsnet.runtime.mix import Mix, mix_of
from dsnet.runtime.static import static_network, twin_name
from dsnet.runtime.timing import Progress, silent, timed
from dsnet.runtime.ways import Others, make_ways

__all__ = ["BatchResult", "BenchResult", "Spread", "bench"]

WARM_UP = 2  # rounds


class Spread(NamedTuple):
    """Milliseconds a batch: median and quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Everything measured at a batch size."""

    batch: int
    times: Mapping[str, Spread]  # by way
    ideal: float  # of the gated mix
    ideal_cascade: float

    @property
    def ratio(self) -> float:
        """Ideal time over the gated plan's: 1 is ideal."""
        return self.ideal / self.times["gated"].median

    @property
    def ratio_stream(self) -> float:
        """The same for a stream of such batches."""
        return self.ideal / self.times["stream"].median

    @property
    def ratio_cascade(self) -> float:
        """The same for the cascade."""
        return self.ideal_cascade / self.times["cascade"].median

    @property
    def speedup(self) -> float:
        """Time of everyone at the largest route over the gated plan's."""
        return self.times["full"].median / self.times["gated"].median


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A benchmark of one network on one device."""

    network: str
    device: str
    backend: str
    memory: str
    precision: str
    conditions: Conditions
    torch: str
    image_size: tuple[int, int]
    mix: Mix
    theory: float  # multiply-adds of everyone at the largest route over those of the mix
    twin: str | None
    twin_backend: str | None
    resident: int  # bytes of weights
    programs: int
    repeats: int
    results: tuple[BatchResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        plain = asdict(self)
        del plain["conditions"]
        plain |= self.conditions._asdict()
        plain["mix"] = self.mix.source
        plain["shares"] = {str(route): share for route, share in self.mix.shares.items()}
        plain["cascade"] = self.mix.cascade._asdict()
        plain["results"] = [
            {
                "batch": r.batch,
                "times": {way: spread._asdict() for way, spread in r.times.items()},
                "ideal": r.ideal,
                "ideal_cascade": r.ideal_cascade,
                "ratio": r.ratio,
                "ratio_stream": r.ratio_stream,
                "ratio_cascade": r.ratio_cascade,
                "speedup": r.speedup,
            }
            for r in self.results
        ]
        return plain


def bench(
    model: Supernet,
    *,
    batches: Sequence[int] = (1, 8, 64, 256),
    mix: str | Mapping[int, float] | Mix = "uniform",
    backend: str = "auto",
    device: torch.device | str | None = None,
    precision: str | None = None,
    memory: Memory = "packed",
    batch_buckets: Sequence[int] | None = None,
    image_size: int | tuple[int, int] | None = None,
    repeats: int = 20,
    progress: Progress = silent,
) -> BenchResult:
    """Measures a network with these shares of routes; weights do not matter."""
    for what, counts in (("batches", tuple(batches)), ("repeats", (repeats,))):
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise DsnetError(f"{what} must be positive integers, not {counts}")
    load = load_average()
    mix = mix_of(model, mix)
    last = model.space.largest.number
    plan = make_plan(
        model,
        device=device,
        backend=backend,
        precision=precision,
        memory=memory,
        batch_buckets=batch_buckets,
        image_size=image_size,
        routes=sorted({*mix.shares, *mix.cascade.routes, last}),
        progress=progress,
    )
    engine = plan.engine
    name = twin_name(model)
    twin = (
        None
        if name is None
        else static_network(
            name,
            engine,
            batches,
            any_backend=backend == "auto",
            buckets=batch_buckets,
            progress=progress,
        )
    )
    size = {number: madds(model, number, image_size) for number in {*mix.shares, last}}
    others = Others(model, engine, mix)
    results = []
    for batch in batches:
        ways = make_ways(model, engine, mix, batch, twin, others)
        spreads = _interleave(ways.calls, repeats, engine.device, progress, f"batch {batch}: round")
        spreads = {way: _scaled(spread, ways.batches.get(way, 1)) for way, spread in spreads.items()}
        results.append(_result(batch, spreads, mix))
    return BenchResult(
        network=model.name,
        device=device_name(engine.device),
        backend=engine.backend,
        memory=memory,
        precision=str(engine.precision).removeprefix("torch."),
        conditions=conditions(engine.device, load),
        torch=str(torch.__version__),
        image_size=engine.image_size,
        mix=mix,
        theory=size[last] / sum(share * size[number] for number, share in mix.shares.items()),
        twin=name,
        twin_backend=None if twin is None else twin.backend,
        resident=engine.resident,
        programs=engine.programs,
        repeats=repeats,
        results=tuple(results),
    )


def _result(batch: int, spreads: Mapping[str, Spread], mix: Mix) -> BatchResult:
    first, *further = zip(mix.cascade.routes, mix.cascade.shares, strict=True)
    cascade = spreads[f"alone {first[0]}"].median
    cascade += sum(share * spreads[f"suffix {number}"].median for number, share in further)
    ideal = sum(share * spreads[f"alone {number}"].median for number, share in mix.shares.items())
    return BatchResult(batch=batch, times=spreads, ideal=ideal, ideal_cascade=cascade)


@torch.no_grad()
def _interleave(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    progress: Progress,
    label: str,
) -> dict[str, Spread]:
    samples: dict[str, list[float]] = {way: [] for way in calls}
    for number in progress(range(WARM_UP + repeats), WARM_UP + repeats, label):
        for way, call in calls.items():
            _, took = timed(call, device), timed(call, device)
            if number >= WARM_UP:
                samples[way].append(took)
    return {way: _spread(taken) for way, taken in samples.items()}


def _spread(samples: list[float]) -> Spread:
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)


def _scaled(spread: Spread, batches: int) -> Spread:
    return Spread(*(value / batches for value in spread))
