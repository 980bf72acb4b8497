"""What routing saves on this machine: mixed batches of a plan beside ideal stand-alone networks, in one run.

Times are milliseconds a batch; every way takes its turn in every round, each call timed right after an
untimed one of its kind. *Ideal* is what nobody can have: stand-alone networks of the routes, made ready by
the same backend, each on a whole batch, weighted by the mix; for a cascade the smallest route on all images
and the share that goes on of the largest route's suffix.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsnet.cost import madds
from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.extract import extract
from dsnet.models import Supernet, create_model, run_gated
from dsnet.routing.latency import device_name
from dsnet.routing.rules import margin
from dsnet.runtime.backends import Backend, get_backend
from dsnet.runtime.engine import Engine, Memory, Runner
from dsnet.runtime.making import compile as make_plan
from dsnet.runtime.parts import Part
from dsnet.runtime.programs import make_runners
from dsnet.runtime.timing import Progress, silent, timed

__all__ = ["BatchResult", "BenchResult", "Spread", "bench", "decisions", "shares_of"]

WARM_UP = 2  # rounds
CASCADE_SHARE = 0.2  # of the images that go on from the smallest route to the largest
TWINS = {"ds_mbnet": "mobilenet_v1", "ds_resnet": "resnet50", "ds_vit": "deit"}


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
    threads: int
    torch: str
    image_size: tuple[int, int]
    shares: Mapping[int, float]  # of the mix, by route
    theory: float  # multiply-adds of everyone at the largest route over those of the mix
    twin: str | None
    resident: int  # bytes of weights
    programs: int
    repeats: int
    results: tuple[BatchResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        plain = asdict(self)
        plain["shares"] = {str(route): share for route, share in self.shares.items()}
        plain["results"] = [
            {
                "batch": r.batch,
                "times": {way: spread._asdict() for way, spread in r.times.items()},
                "ideal": r.ideal,
                "ideal_cascade": r.ideal_cascade,
                "ratio": r.ratio,
                "ratio_cascade": r.ratio_cascade,
                "speedup": r.speedup,
            }
            for r in self.results
        ]
        return plain


def shares_of(model: Supernet, mix: str | Mapping[int, float]) -> dict[int, float]:
    """Shares by route: ``uniform`` over what the gates decide between, or as given, made to add up to 1."""
    if isinstance(mix, str):
        if mix != "uniform":
            raise DsnetError(f"unknown mix {mix!r}; possible: uniform, or shares by route")
        if len(model.gates) == 1:
            numbers = model.gate(0).choices
        else:
            numbers = tuple(route.number for route in model.space)
        return dict.fromkeys(numbers, 1 / len(numbers))
    decided = model.gate(0).choices if len(model.gates) == 1 else [route.number for route in model.space]
    for number, share in mix.items():
        if model.space.resolve(number).number not in decided:
            raise DsnetError(f"the gate does not decide for route {number}; it has {list(decided)}")
        if not isinstance(share, int | float) or not 0 <= share < float("inf"):
            raise DsnetError(f"the share of route {number} must be a number of at least 0, not {share!r}")
    total = sum(mix.values())
    if not 0 < total < float("inf"):
        raise DsnetError("a mix needs a route with a share above 0, and a finite sum")
    return {number: share / total for number, share in sorted(mix.items()) if share}


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


def bench(
    model: Supernet,
    *,
    batches: Sequence[int] = (1, 8, 64, 256),
    mix: str | Mapping[int, float] = "uniform",
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
    if len(model.gates) > 1:
        raise DsnetError(f"{model.name} has several gates, for which there is no benchmark yet")
    for what, counts in (("batches", tuple(batches)), ("repeats", (repeats,))):
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise DsnetError(f"{what} must be positive integers, not {counts}")
    shares = shares_of(model, mix)
    last = model.space.largest.number
    routes = sorted({*shares, model.space.smallest.number, last})
    plan = make_plan(
        model,
        device=device,
        backend=backend,
        precision=precision,
        memory=memory,
        batch_buckets=batch_buckets,
        image_size=image_size,
        routes=routes,
        progress=progress,
    )
    engine = plan.engine
    twin = _twin(model)
    static = None if twin is None else _static(twin, engine, batch_buckets)
    size = {number: madds(model, number, image_size) for number in routes}
    results = []
    for batch in batches:
        timed = _ways(model, engine, shares, routes, batch, static)
        spreads = _interleave(timed.calls, repeats, engine.device, progress, f"batch {batch}: round")
        spreads = {way: _scaled(spread, timed.batches.get(way, 1)) for way, spread in spreads.items()}
        ideal = sum(share * spreads[f"alone {number}"].median for number, share in shares.items())
        cascade = spreads[f"alone {routes[0]}"].median + CASCADE_SHARE * spreads["suffix"].median
        results.append(BatchResult(batch=batch, times=spreads, ideal=ideal, ideal_cascade=cascade))
    return BenchResult(
        network=model.name,
        device=device_name(engine.device),
        backend=engine.backend,
        memory=memory,
        precision=str(engine.precision).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        image_size=engine.image_size,
        shares=shares,
        theory=size[last] / sum(share * size[number] for number, share in shares.items()),
        twin=twin,
        resident=engine.resident,
        programs=engine.programs,
        repeats=repeats,
        results=tuple(results),
    )


class _Ways(NamedTuple):
    calls: dict[str, Callable[[], object]]
    batches: dict[str, int]  # how many a call runs, where that is more than one


def _ways(
    model: Supernet,
    engine: Engine,
    shares: Mapping[int, float],
    routes: Sequence[int],
    batch: int,
    static: Runner | None,
) -> _Ways:
    draw = torch.Generator().manual_seed(0)
    shape = (batch, engine.geometry.channels, *engine.image_size)
    x = torch.randn(shape, generator=draw).to(engine.device, engine.precision)
    several = max(1, 20 // batch)  # small batches: several in a row, so that the mix is met
    drawn = decisions(shares, several * batch)
    mixes = [
        torch.tensor([engine.gate(0).choices.index(n) for n in drawn[i : i + batch]], device=engine.device)
        for i in range(0, len(drawn), batch)
    ]
    on = decisions({0: 1 - CASCADE_SHARE, 1: CASCADE_SHARE}, several * batch)
    going_on = [
        torch.tensor(on[i : i + batch], device=engine.device).nonzero()[:, 0]
        for i in range(0, len(on), batch)
    ]
    native = x.to(model.head.classifier.weight.device, model.head.classifier.weight.dtype)
    calls: dict[str, Callable[[], object]] = {
        "full": lambda: engine.run_route(x, engine.space.largest),
        "gated": lambda: [run_gated(engine, x, _given(mix)) for mix in mixes],
        "cascade": lambda: [_cascade(engine, x, (routes[0], routes[-1]), rows) for rows in going_on],
    }
    backend = get_backend(engine.backend)
    for number in routes:
        alone = extract(model, number, image_size=engine.image_size)
        calls[f"alone {number}"] = _ready(backend, alone, x)
    if static is not None:
        calls["twin"] = lambda: static(x)
    standing = engine.enter(x)
    calls["suffix"] = lambda: engine.finish(standing, engine.space.resolve(routes[-1]).choices)
    # Last: torch's threads wait busily for a while, on the cores that a backend's need.
    calls["grouped"] = lambda: [run_gated(model, native, _given(mix)) for mix in mixes]
    return _Ways(calls, dict.fromkeys(("grouped", "gated", "cascade"), len(mixes)))


def _given(positions: Tensor) -> Callable[[Tensor, int, int | None], Tensor]:
    return lambda scores, gate, previous: positions


def _cascade(engine: Engine, x: Tensor, routes: tuple[int, int], rows: Tensor) -> Tensor:
    """The smaller route for all images, the larger one for some, as if its margins had said so."""
    small, large = (engine.space.resolve(number).choices for number in routes)
    state = engine.enter(x)
    logits = engine.finish(state, small)
    unsure = (margin(logits) < -1).nonzero()[:, 0]  # asked as a cascade asks; nobody is that unsure
    rows = torch.cat([rows, unsure])
    if not len(rows):
        return logits
    some = state if len(rows) == len(x) else state.take(rows)
    return logits.index_copy(0, rows, engine.finish(some, large))


def _ready(backend: Backend, module: nn.Module, x: Tensor) -> Callable[[], object]:
    module = module.to(x.device, x.dtype).eval().requires_grad_(False)
    return functools.partial(backend.convert(module, x)(x), x)


def _twin(model: Supernet) -> str | None:
    """The static network that a user would take instead."""
    if model.geometry.image_size != 224:
        return None
    return next((twin for family, twin in TWINS.items() if model.name.startswith(family)), None)


def _static(twin: str, engine: Engine, buckets: Sequence[int] | None) -> Runner:
    """It at its best: in the batches that it runs best, as the plan is."""
    backend = get_backend(engine.backend)
    module = create_model(twin).eval().requires_grad_(False).to(engine.device, engine.precision)
    part = Part(module, Shape(engine.geometry.channels, *engine.image_size))
    sizes = sorted({1, *(buckets or backend.buckets)})
    made = make_runners({(): part}, backend, sizes, device=engine.device, precision=engine.precision)
    return made[()]


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
