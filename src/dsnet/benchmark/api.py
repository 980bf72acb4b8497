"""The benchmark behind ``dsnet bench``: mixed batches of a plan beside baselines and beside the ideal.

All candidates are timed in turn in every round, each call right after an untimed one of the same candidate.
The *ideal* is out of reach: stand-alone networks of the routes, compiled by the same backend, each on a whole
batch, weighted by the mix. The ideal of a cascade is its first route on all images plus, for every further
route, the share of images that reach it, times what it still has to run. For single images the same networks
are also timed *in turn*, in the order of the mix, so that each finds the cache as another one left it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dsnet.benchmark._candidates import Candidate, Candidates
from dsnet.benchmark._conditions import conditions, load_average
from dsnet.benchmark._static_baselines import compile_static, static_networks
from dsnet.benchmark.results import Baseline, BatchResult, BenchResult, Spread
from dsnet.benchmark.workloads import Mix, gated_routes, mix_of
from dsnet.core.timer import Progress, TimeLimit, TimeUpError, silent, time_interleaved, timed
from dsnet.cost import madds
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.composite import CompositeNetwork
from dsnet.routing.latency import device_name
from dsnet.runtime.api import compile as compile_plan
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork, Memory

__all__ = ["bench"]

WARM_UP = 2  # rounds
STATIC_SHARE = 0.4  # of the time limit, after which no static network is started
QUICK_BUCKETS = (1, 8)
QUICK_BACKENDS = {"cpu": ("openvino", "eager"), "cuda": ("triton", "cudagraphs")}  # that compile fast


def bench(
    model: Supernet,
    *,
    batches: Sequence[int] = (1, 8, 64, 256),
    mix: str | Mapping[int, float] | Mix = "uniform",
    backend: str = "auto",
    precision: str | None = None,
    memory: Memory = "packed",
    batch_buckets: Sequence[int] | None = None,
    image_size: int | tuple[int, int] | None = None,
    repeats: int = 20,
    time_limit: float | None = None,
    quick: bool = False,
    progress: Progress = silent,
) -> BenchResult:
    """Time mixed batches of a network; its weights do not matter.

    Args:
        model: The network, in eval mode and on the device to measure.
        batches: Batch sizes.
        mix: ``uniform``, shares by route, or a mix; see `dsnet.benchmark.workloads.mix_of`.
        backend: The plan's backend; ``auto`` takes the fastest.
        precision: The plan's precision (default: the network's).
        memory: As for `dsnet.runtime.compile`.
        batch_buckets: As for `dsnet.runtime.compile`.
        image_size: As for `dsnet.runtime.compile`.
        repeats: How many rounds to measure.
        time_limit: Seconds after which to stop. The result names what is missing.
        quick: Leave out masking, indexing and slicing, compile for batches of 1 and 8 alone, and replace
            ``auto`` by a backend that compiles fast.
        progress: Progress callback.

    Raises:
        DsnetError: If an argument is invalid, or nothing was measured within the time limit.
    """
    for name, counts in (("batches", tuple(batches)), ("repeats", (repeats,))):
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise DsnetError(f"{name} must be positive integers, not {counts}")
    limit, load = TimeLimit(time_limit), load_average()
    limited = limit.checked(progress)
    mix = mix_of(model, mix)
    largest, gate_largest = model.space.largest.number, gated_routes(model)[-1]
    any_backend = backend == "auto" and not quick
    if isinstance(model, CompositeNetwork):
        raise DsnetError(
            f"dsnet bench compares routes of one image size; {model.name} has {model.image_sizes}. Time its "
            "routes by `dsnet profile`, a budget by Plan.break_even"
        )
    if quick:
        batch_buckets = batch_buckets or QUICK_BUCKETS
        backend = _quick_backend(model, precision) if backend == "auto" else backend
    try:
        compiled = compile_plan(
            model,
            backend=backend,
            precision=precision,
            memory=memory,
            batch_buckets=batch_buckets,
            image_size=image_size,
            routes=sorted({*mix.shares, *mix.cascade.routes, gate_largest, largest}),
            progress=limited,
        ).network
    except TimeUpError:
        raise _nothing_measured(limit) from None
    assert isinstance(compiled, CompiledNetwork)
    baselines: list[Baseline] = []
    static: dict[str, BucketedProgram] = {}
    missing = []
    for network in static_networks(model):
        try:
            if limit.used > STATIC_SHARE:
                raise TimeUpError
            baseline, program = compile_static(
                network, compiled, batches, any_backend=any_backend, buckets=batch_buckets, progress=limited
            )
        except TimeUpError:
            missing.append(network.name)
            continue
        baselines.append(baseline)
        static[network.candidate] = program
    candidates = Candidates(model, compiled, mix, static, eager=not quick)
    results = []
    for batch in batches:
        try:
            at_batch = candidates.at(batch, limited)
        except TimeUpError:
            missing.append(f"batch {batch}")
            continue
        result = _measure(at_batch, batch, mix, compiled, repeats, 1 if quick else WARM_UP, limit, progress)
        if result.rounds < repeats:
            missing.append(f"{repeats - result.rounds} of {repeats} rounds of batch {batch}")
        results.append(result)
    if not results:
        raise _nothing_measured(limit)
    cost = {number: madds(model, number, image_size) for number in {*mix.shares, gate_largest, largest}}
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
        theory=cost[largest] / sum(share * cost[number] for number, share in mix.shares.items()),
        resident=compiled.resident,
        programs=compiled.num_programs,
        repeats=repeats,
        results=tuple(results),
        madds=cost,
        largest=largest,
        gate_largest=gate_largest,
        baselines=tuple(baselines),
        missing=tuple(missing),
    )


def _nothing_measured(limit: TimeLimit) -> DsnetError:
    return DsnetError(
        f"nothing was measured within the time limit of {limit.seconds:g} s; give more time, fewer routes "
        "or fewer batch sizes (--batch, --buckets), or measure less (--quick)"
    )


def _quick_backend(model: Supernet, precision: str | None) -> str:
    """Return the first backend that compiles fast and is available, or eager."""
    weight = model.head.classifier.weight
    dtype = weight.dtype if precision is None else getattr(torch, precision, weight.dtype)
    names = QUICK_BACKENDS[weight.device.type]
    return next((n for n in names if get_backend(n).unavailable(weight.device, dtype) is None), "eager")


def _measure(
    candidates: Mapping[str, Candidate],
    batch: int,
    mix: Mix,
    compiled: CompiledNetwork,
    repeats: int,
    warm_up: int,
    limit: TimeLimit,
    progress: Progress,
) -> BatchResult:
    """Time the candidates of a batch size; at least one round is measured, even beyond the time limit."""
    samples = time_interleaved(
        {name: candidate.run for name, candidate in candidates.items()},
        compiled.device,
        rounds=repeats,
        warm_up=warm_up,
        clock=lambda call, device: (timed(call, device), timed(call, device))[1],
        progress=progress,
        label=f"batch {batch}: round",
        stop=lambda: limit.over,
    )
    times = {
        name: Spread.of([milliseconds / candidates[name].batches for milliseconds in rounds])
        for name, rounds in samples.items()
    }
    first, *further = zip(mix.cascade.routes, mix.cascade.shares, strict=True)
    suffixes = sum(share * times[f"suffix {number}"].median for number, share in further)
    return BatchResult(
        batch=batch,
        rounds=len(samples["gated"]),
        times=times,
        ideal=sum(share * times[f"alone {number}"].median for number, share in mix.shares.items()),
        ideal_cascade=times[f"alone {first[0]}"].median + suffixes,
    )
