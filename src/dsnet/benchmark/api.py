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
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from dsnet.benchmark.candidates import Convert, Others, make_ways
from dsnet.benchmark.conditions import Conditions, conditions, load_average
from dsnet.benchmark.static_network import Static, baselines, static_network
from dsnet.benchmark.workloads import Mix, decided_routes, mix_of
from dsnet.core.device import pick_device
from dsnet.core.time_limit import TimeLimit, TimeUpError
from dsnet.core.timer import Progress, silent, timed
from dsnet.cost import madds
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.latency import device_name
from dsnet.runtime.api import compile as make_plan
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors.host import CompiledNetwork, Memory

__all__ = ["Baseline", "BatchResult", "BenchResult", "Spread", "bench"]

WARM_UP = 2  # rounds
ENOUGH = 0.4  # share of a time limit after which no static network is begun
STATIC = ("twin", "half")  # what the times of static networks are called
QUICK_BUCKETS = (1, 8)
QUICK_BACKENDS = {"cpu": ("openvino", "eager"), "cuda": ("triton", "cudagraphs")}  # soon made ready


class Spread(NamedTuple):
    """Milliseconds a batch: median and quartiles."""

    median: float
    low: float
    high: float


class Baseline(NamedTuple):
    """A static network that was timed."""

    way: str  # what its times are called
    name: str
    backend: str
    madds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Everything measured at a batch size."""

    batch: int
    times: Mapping[str, Spread]  # by way
    ideal: float  # of the gated mix
    ideal_cascade: float
    rounds: int | None = None  # that were counted; none: all

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

    @property
    def speedup_gate(self) -> float:
        """The same for the largest route that the gate can take."""
        return self.times.get("gate largest", self.times["full"]).median / self.times["gated"].median


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
    madds: Mapping[int, int] = field(default_factory=dict)  # of the routes that are named here
    largest: int | None = None  # the network's largest route
    gate_largest: int | None = None  # the largest that the gate decides for
    baselines: tuple[Baseline, ...] = ()  # all static networks, by way
    missing: tuple[str, ...] = ()  # what there was no time for

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        plain = asdict(self)
        del plain["conditions"]
        plain |= self.conditions._asdict()
        plain["mix"] = self.mix.source
        plain["shares"] = {str(route): share for route, share in self.mix.shares.items()}
        plain["cascade"] = self.mix.cascade._asdict()
        plain["madds"] = {str(route): cost for route, cost in sorted(self.madds.items())}
        plain["baselines"] = [baseline._asdict() for baseline in self.baselines]
        plain["results"] = [
            {
                "batch": r.batch,
                "rounds": r.rounds or self.repeats,
                "times": {way: spread._asdict() for way, spread in r.times.items()},
                "ideal": r.ideal,
                "ideal_cascade": r.ideal_cascade,
                "ratio": r.ratio,
                "ratio_stream": r.ratio_stream,
                "ratio_cascade": r.ratio_cascade,
                "speedup": r.speedup,
                "speedup_gate": r.speedup_gate,
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
    time_limit: float | None = None,
    quick: bool = False,
    progress: Progress = silent,
) -> BenchResult:
    """Measures a network with these shares of routes; weights do not matter.

    With a ``time_limit`` in seconds what was measured by then is given, and what is missing is named.
    ``quick`` leaves out masking, indexing and slicing, makes programs for batches of 1 and 8 alone, and takes
    the backend, if that is ``auto``, from those that are soon made ready.
    """
    for what, counts in (("batches", tuple(batches)), ("repeats", (repeats,))):
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise DsnetError(f"{what} must be positive integers, not {counts}")
    limit, load = TimeLimit(time_limit), load_average()
    shown, progress = progress, limit.checked(progress)
    mix = mix_of(model, mix)
    last, own_last = model.space.largest.number, decided_routes(model)[-1]
    any_backend = backend == "auto" and not quick
    if quick:
        batch_buckets = batch_buckets or QUICK_BUCKETS
        backend = _quick_backend(model, device, precision) if backend == "auto" else backend
    try:
        plan = make_plan(
            model,
            device=device,
            backend=backend,
            precision=precision,
            memory=memory,
            batch_buckets=batch_buckets,
            image_size=image_size,
            routes=sorted({*mix.shares, *mix.cascade.routes, own_last, last}),
            progress=progress,
        )
    except TimeUpError:
        raise _too_short(limit) from None
    compiled = plan.network
    static, missing = _static(
        model, compiled, batches, batch_buckets, progress, limit, any_backend=any_backend
    )
    size = {number: madds(model, number, image_size) for number in {*mix.shares, own_last, last}}
    others = None if quick else Others(model, compiled, mix)
    results, alone = [], dict[int, Convert]()
    for batch in batches:
        try:
            ways = make_ways(model, compiled, mix, batch, static, others, alone=alone, progress=progress)
            spreads, rounds = _interleave(
                ways.calls, repeats, compiled.device, shown, batch, limit, 1 if quick else WARM_UP
            )
        except TimeUpError:
            missing.append(f"batch {batch}")
            continue
        if rounds < repeats:
            missing.append(f"{repeats - rounds} of {repeats} rounds of batch {batch}")
        spreads = {way: _scaled(spread, ways.batches.get(way, 1)) for way, spread in spreads.items()}
        results.append(_result(batch, spreads, mix, rounds))
    if not results:
        raise _too_short(limit)
    twin = static.get("twin")
    return BenchResult(
        network=model.name,
        device=device_name(compiled.device),
        backend=compiled.backend,
        memory=memory,
        precision=str(compiled.precision).removeprefix("torch."),
        conditions=conditions(compiled.device, load),
        torch=str(torch.__version__),
        image_size=compiled.image_size,
        mix=mix,
        theory=size[last] / sum(share * size[number] for number, share in mix.shares.items()),
        twin=None if twin is None else twin.name,
        twin_backend=None if twin is None else twin.backend,
        resident=compiled.resident,
        programs=compiled.num_programs,
        repeats=repeats,
        results=tuple(results),
        madds=size,
        largest=last,
        gate_largest=own_last,
        baselines=tuple(Baseline(way, s.name, s.backend, s.madds) for way, s in static.items()),
        missing=tuple(missing),
    )


def _too_short(limit: TimeLimit) -> DsnetError:
    return DsnetError(
        f"nothing was measured within the time limit of {limit.seconds:g} s; give more time, fewer routes "
        "or fewer batch sizes (--batch, --buckets), or measure less (--quick)"
    )


def _quick_backend(model: Supernet, device: torch.device | str | None, precision: str | None) -> str:
    """The first that can be used."""
    weight = model.head.classifier.weight
    place = weight.device if device is None else pick_device(str(device))
    dtype = weight.dtype if precision is None else getattr(torch, precision, weight.dtype)
    names = QUICK_BACKENDS[place.type]
    return next((n for n in names if get_backend(n).unavailable(place, dtype) is None), "eager")


def _static(
    model: Supernet,
    compiled: CompiledNetwork,
    batches: Sequence[int],
    buckets: Sequence[int] | None,
    progress: Progress,
    limit: TimeLimit,
    *,
    any_backend: bool,
) -> tuple[dict[str, Static], list[str]]:
    """Static networks by way, and those that there was no time for."""
    static: dict[str, Static] = {}
    missing = []
    for way, baseline in zip(STATIC, baselines(model), strict=False):
        if limit.used > ENOUGH:
            missing.append(baseline.name)
            continue
        try:
            static[way] = static_network(
                baseline.model,
                compiled,
                batches,
                any_backend=any_backend,
                buckets=buckets,
                progress=progress,
                options=baseline.options,
            )
        except TimeUpError:
            missing.append(baseline.name)
    return static, missing


def _result(batch: int, spreads: Mapping[str, Spread], mix: Mix, rounds: int) -> BatchResult:
    first, *further = zip(mix.cascade.routes, mix.cascade.shares, strict=True)
    cascade = spreads[f"alone {first[0]}"].median
    cascade += sum(share * spreads[f"suffix {number}"].median for number, share in further)
    ideal = sum(share * spreads[f"alone {number}"].median for number, share in mix.shares.items())
    return BatchResult(batch=batch, times=spreads, ideal=ideal, ideal_cascade=cascade, rounds=rounds)


@torch.no_grad()
def _interleave(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    progress: Progress,
    batch: int,
    limit: TimeLimit,
    warm_up: int,
) -> tuple[dict[str, Spread], int]:
    """What every way takes, and in how many rounds.

    Where the time is up rounds end; one is counted even then, for what it needs has been made.
    """
    samples: dict[str, list[float]] = {way: [] for way in calls}
    counted = 0
    rounds = range(warm_up + repeats)
    for number in progress(rounds, len(rounds), f"batch {batch}: round"):
        if limit.over and counted:
            break
        counts = number >= warm_up or limit.over
        for way, call in calls.items():
            _, took = timed(call, device), timed(call, device)
            if counts:
                samples[way].append(took)
        counted += counts
        if limit.over and counted:
            break
    return {way: _spread(taken) for way, taken in samples.items()}, counted


def _spread(samples: list[float]) -> Spread:
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)


def _scaled(spread: Spread, batches: int) -> Spread:
    return Spread(*(value / batches for value in spread))
