"""From a network, routed or not, to a plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor, nn

from dsnet.core.cuda_graphs import stream_pool
from dsnet.core.device import pick_device
from dsnet.core.timer import Progress, logged
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.routing.latency import DeviceKind
from dsnet.routing.router import Routed
from dsnet.runtime.autotune import choose_backend
from dsnet.runtime.backends.base import Backend, Executable, get_backend, list_backends
from dsnet.runtime.executors.base import Executor, GateChoices
from dsnet.runtime.executors.eager_segments import SegmentWithHead, programs_of, unshared
from dsnet.runtime.executors.grouped import MAX_SIDE_STREAMS, GroupedExecutor
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork, Memory
from dsnet.runtime.executors.ragged.support import unsupported
from dsnet.runtime.partition.batch_invariance import chosen, make_invariant
from dsnet.runtime.partition.builders import bucketed_programs, make_calls, make_end
from dsnet.runtime.partition.partitioner import (
    Partitioner,
    PartitionRequest,
    partitioner_of,
    segment_modules,
)
from dsnet.runtime.partition.segments import (
    Segment,
    SegmentKey,
    SharedHead,
    find_shared_segments,
    segment_histories,
    weight_bytes,
)
from dsnet.runtime.plan import Plan
from dsnet.runtime.resident_routes import (
    RouteExtender,
    SourceNetwork,
    can_fall_back,
    fallback_segments,
    needed_for,
)

__all__ = ["compile"]

RECORDED = (  # images, by a GPU
    *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024),
)
RECORDED_PAIRS = (1, 4, 8, 16, 32, 64, 128, 256)  # where there is a part for every pair of choices
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@overload
def compile(  # noqa: A001
    model: Supernet | Routed,
    *,
    device: torch.device | str | None = ...,
    backend: str = ...,
    precision: str | None = ...,
    memory: Memory = ...,
    batch_buckets: Sequence[int] | None = ...,
    image_size: int | tuple[int, int] | None = ...,
    routes: Sequence[int] | None = ...,
    budgets: Literal["all"] | None = ...,
    batch_invariant: bool | None = ...,
    progress: Progress = ...,
) -> Plan: ...
@overload
def compile(  # noqa: A001
    model: nn.Module,
    *,
    device: torch.device | str | None = ...,
    backend: str = ...,
    precision: str | None = ...,
    memory: Memory = ...,
    batch_buckets: Sequence[int] | None = ...,
    image_size: int | tuple[int, int] | None = ...,
    routes: Sequence[int] | None = ...,
    budgets: Literal["all"] | None = ...,
    batch_invariant: bool | None = ...,
    progress: Progress = ...,
) -> Any: ...  # noqa: ANN401
def compile(  # noqa: A001  (dsnet.runtime.compile, as torch.compile)
    model: Supernet | Routed | nn.Module,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    precision: str | None = None,
    memory: Memory = "packed",
    batch_buckets: Sequence[int] | None = None,
    image_size: int | tuple[int, int] | None = None,
    routes: Sequence[int] | None = None,
    budgets: Literal["all"] | None = None,
    batch_invariant: bool | None = None,
    progress: Progress = logged,
) -> Any:
    """Makes a network, or another model with a registered partitioner such as a detector, ready for a device.

    A `Routed` brings its router and budget along; a network alone is routed by its gates' own decision.
    ``memory="packed"`` gives every route its own weights, contiguous, batch norms folded; ``"shared"`` runs
    slices of the supernet's own. ``backend="auto"`` times those that can be used here and takes the fastest;
    the choice is remembered. ``batch_buckets`` are the batch sizes that programs are made for, where a
    backend needs to know; others run in several of these, by measured times. With a single size, a backend
    that takes any batch (such as eager) is not timed: it runs batches of up to this size whole. ``routes``
    are those to hold, by default those that the budget needs, as `dsnet.runtime.resident_routes` says;
    `Plan.at` adds what another budget needs, and ``budgets="all"`` holds them all from the start.
    ``progress`` shows what is being made (by default in the log, at level INFO). ``batch_invariant``: whether
    gates of the backend eager on a CPU decide alike, to the last bit, whatever the batch; by default where
    that costs less than a twentieth of the time, for images of 96 pixels and more. Other backends are as
    `Plan.batch_invariant` says.
    """
    router, budget = (model.router, model.budget) if isinstance(model, Routed) else (None, None)
    partitioner = partitioner_of(model)
    network = partitioner.network(model)
    if network.training:
        raise DsnetError("a plan is for inference: call .eval() on the network first")
    weight = network.head.classifier.weight
    place = weight.device if device is None else pick_device(str(device))
    if place.type not in get_args(DeviceKind):
        raise DsnetError(f"a plan is for {' or '.join(get_args(DeviceKind))}, not for {place}")
    dtype = weight.dtype if precision is None else _precision(precision)
    _check_memory(memory, backend, shared=(place, dtype) == (weight.device, weight.dtype))
    if backend == "auto":
        names = ["eager"] if memory == "shared" else None
        if partitioner.has_shared_head(model):  # timed without what is behind it, which other kernels run
            names = _usable_backends(model, partitioner, network, routes, image_size, dtype, place)
        backend = choose_backend(
            network, device=place, precision=dtype, image_size=image_size, candidates=names, progress=progress
        ).name
    made_by = get_backend(backend)
    reason = made_by.unavailable(place, dtype)
    if reason is not None:
        raise DsnetError(f"backend {backend} cannot be used: {reason}")
    if budgets not in (None, "all") or (budgets is not None and routes is not None):
        raise DsnetError(
            f"budgets is 'all' or None, and takes no routes beside it, not budgets={shorten(budgets)}, "
            f"routes={shorten(routes)}"
        )
    every = budgets == "all" or memory == "shared"  # slices take no memory
    needed = needed_for(network, router, None if budget is None else float(budget), every=every)
    spares = not every and can_fall_back(network, place, dtype, captured=made_by.captures(place))
    options = needed.taken if spares else needed.possible
    if routes is not None:
        options = _options(network, routes)
    make = functools.partial(
        _engine, model, partitioner, made_by, batch_buckets, memory, image_size, dtype, place, batch_invariant
    )
    compiled = make(options, None, progress)
    extender = None
    if router is not None and routes is None:
        origin = SourceNetwork(network)
        spare = functools.partial(fallback_segments, origin, image_size=image_size) if spares else None
        extender = RouteExtender(origin, make, spare, progress)
        if spare is not None:
            compiled = replace(compiled, fallback=spare(needed.possible, options))
    plan = Plan(compiled, router, budget, extender=extender)
    return partitioner.plan(model, plan, image_size)


def _engine(
    model: object,
    partitioner: Partitioner,
    backend: Backend,
    batch_buckets: Sequence[int] | None,
    memory: Memory,
    image_size: int | tuple[int, int] | None,
    precision: torch.dtype,
    place: torch.device,
    batch_invariant: bool | None,
    options: Sequence[tuple[int, ...]],
    before: CompiledNetwork | None,
    progress: Progress,
) -> CompiledNetwork:
    """Everything for these choices; what a network of ``before`` has is not made again where that can be."""
    network = partitioner.network(model)
    shared_segments: Mapping[SegmentKey, SegmentKey] = {}
    if backend.captures(place):
        shared_segments = find_shared_segments(network, options, image_size=image_size)
    pairs = len(segment_histories(network, options, shared_segments)) > 1 + sum(map(len, options))
    any_batch = backend.any_batch(place) and not backend.captures(place)
    buckets = _buckets(batch_buckets, _sizes(backend, place, pairs=pairs), any_batch=any_batch)
    size = network.input_spec.shape(image_size)
    known: Mapping[SegmentKey, BucketedProgram] = {}
    if before is not None and before.graph_executor is None and not before.keyed:
        known = before.segments  # parts do not depend on which others there are
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(place.type, enabled=False):
        # What is made here is written to in any mode later, in the plan's own precision.
        request = PartitionRequest(
            options=options,
            shared_segments=shared_segments,
            shared=memory == "shared",
            grouped=backend.captures(place),
            fused=backend.ragged,
            image_size=image_size,
            precision=backend.input_dtype or precision,
            device=place,
        )
        parts, end = partitioner.segments(model, request)
        parts = {history: part for history, part in parts.items() if history not in known}
        invariant = backend.batch_invariant
        if backend.name == "eager" and place.type == "cpu":
            invariant = chosen(batch_invariant, (size.height, size.width), precision, memory)
            make_invariant(parts if invariant else {}, len(network.gates))
        made = _programs(network, backend, parts, end, shared_segments, buckets, place, precision, progress)
    return CompiledNetwork(
        spec=network.spec,
        space=network.space,
        gates=tuple(GateChoices(network.gate(g).choices) for g in range(len(network.gates))),
        choices=network.choices,
        options=tuple(options),
        input_spec=network.input_spec,
        image_size=(size.height, size.width),
        classes=partitioner.outputs(model, image_size),
        device=place,
        precision=precision,
        backend=backend.name,
        memory=memory,
        takes=backend.input_dtype or precision,
        segments={**known, **made.segments},
        resident=made.resident + (before.resident if before is not None and known else 0),
        graph_executor=made.graph_executor,
        batch_invariant=invariant,
    )


def _usable_backends(
    model: object,
    partitioner: Partitioner,
    network: Supernet,
    routes: Sequence[int] | None,
    image_size: int | tuple[int, int] | None,
    precision: torch.dtype,
    device: torch.device,
) -> list[str]:
    """Return all backends but those of ragged kernels, if the model has layers that these do not support."""
    options = [network.gate(0).choices] if routes is None else _options(network, routes)
    request = PartitionRequest(
        options=options,
        shared_segments={},
        shared=False,
        grouped=True,
        fused=True,
        image_size=image_size,
        precision=precision,
        device=device,
    )
    parts, _ = partitioner.segments(model, request)
    known = all(unsupported(modules) is None for modules in segment_modules(parts))
    return [name for name in list_backends() if known or not get_backend(name).ragged]


class _Made(NamedTuple):
    segments: dict[SegmentKey, BucketedProgram]
    graph_executor: Executor | None  # for mixed batches, where there are graphs
    resident: int  # bytes of weights


def _programs(
    network: Supernet,
    backend: Backend,
    parts: Mapping[SegmentKey, Segment],
    end: SharedHead | None,
    shared_segments: Mapping[SegmentKey, SegmentKey],
    buckets: Sequence[int],
    device: torch.device,
    precision: torch.dtype,
    progress: Progress,
) -> _Made:
    """Programs for one part after the other, and where there are graphs those for mixed batches."""
    modules = [part.module for part in parts.values()] + ([] if end is None else [end.module])
    resident = weight_bytes(modules)
    if not backend.captures(device):
        runners = bucketed_programs(
            parts, backend, buckets, device=device, precision=precision, progress=progress
        )
        return _Made(runners, None, resident)
    choices = [network.gate(g).choices for g in range(len(network.gates))]
    image = torch.zeros(1, *parts[()].shape, device=device, dtype=precision)
    if len(choices) == 1 and backend.ragged:
        made = _joined(network, backend, parts, end, buckets, image, progress)
        if made is not None:
            return made
    calls = make_calls(parts, backend, device=device, precision=precision, progress=progress)
    keyed = {history for history, part in parts.items() if part.histories > 1}
    last = None if end is None else make_end(end, backend, device=device, precision=precision)
    executor = GroupedExecutor(
        calls,
        image=image,
        space=network.space,
        scored=choices,
        keyed=keyed,
        head=last,
        sizes=buckets,
        streams=stream_pool(device, 1 + min(MAX_SIDE_STREAMS, max(map(len, network.slice_table)))),
        progress=progress,
    )
    if last is not None:
        options = sorted(history[-1] for history in calls if history)
        calls |= {(c,): SegmentWithHead(calls[c,], last, place) for place, c in enumerate(options)}
    single = {**calls, **unshared(calls, parts, shared_segments)}
    single_keyed = keyed | {history for history, other in shared_segments.items() if other in keyed}
    return _Made(programs_of(single, buckets, single_keyed), executor, resident)


def _joined(
    network: Supernet,
    backend: Backend,
    parts: Mapping[SegmentKey, Segment],
    end: SharedHead | None,
    buckets: Sequence[int],
    image: Tensor,
    progress: Progress,
) -> _Made | None:
    """All parts behind the only gate as one, if the backend can; what is behind them by torch's own kernels.

    Parts of a detector cannot be had otherwise.
    """
    options = [history[0] for history in parts if history]
    begin, behind = segment_modules(parts)
    reason = unsupported(begin) or unsupported(behind)
    if reason is not None:
        if end is None:
            return None
        raise DsnetError(f"backend {backend.name}: {reason}; try inductor or cudagraphs")
    from dsnet.runtime.executors.ragged.executor import RaggedExecutor  # needs Triton
    from dsnet.runtime.executors.ragged.network import Ragged

    front, rest = Ragged(begin), Ragged(behind)
    last = None
    if end is not None:
        last = make_end(end, get_backend("cudagraphs"), device=image.device, precision=image.dtype)
    executor = RaggedExecutor(
        front,
        rest,
        options,
        image=image,
        space=network.space,
        scored=network.gate(0).choices,
        head=last,
        sizes=buckets,
        streams=stream_pool(image.device, 1),
        progress=progress,
    )
    calls: dict[SegmentKey, Executable] = {(): front.at(0)}
    for place, choice in enumerate(options):
        call = rest.at(place)
        calls[choice,] = call if last is None else SegmentWithHead(call, last, place)
    resident = front.resident + rest.resident + weight_bytes([] if end is None else [end.module])
    return _Made(programs_of(calls, buckets), executor, resident)


def _check_memory(memory: str, backend: str, *, shared: bool) -> None:
    """``shared``: whether the network's weights are as the plan's are to be."""
    if memory not in get_args(Memory):
        raise DsnetError(f"unknown memory {memory!r}; possible: {', '.join(get_args(Memory))}")
    if memory == "shared" and backend not in ("auto", "eager"):
        raise DsnetError(f"{backend} copies weights; memory='shared' is for eager")
    if memory == "shared" and not shared:
        raise DsnetError("memory='shared' runs the network's own weights as they are: move or convert them")


def _precision(name: str) -> torch.dtype:
    if name not in PRECISIONS:
        raise DsnetError(f"unknown precision {name!r}; possible: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _sizes(backend: Backend, device: torch.device, *, pairs: bool) -> tuple[int, ...]:
    if not backend.captures(device):
        return backend.buckets
    return RECORDED_PAIRS if pairs else RECORDED


def _buckets(given: Sequence[int] | None, usual: Sequence[int], *, any_batch: bool) -> tuple[int, ...]:
    sizes = usual if given is None else given
    if (
        not isinstance(sizes, list | tuple)
        or not sizes
        or any(type(size) is not int or size < 1 for size in sizes)
    ):
        raise DsnetError(f"batch_buckets are positive integers, not {given!r}")
    return tuple(sorted({*sizes} if any_batch else {1, *sizes}))


def _options(model: Supernet, routes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every gate's choices that some route needs."""
    if not isinstance(routes, list | tuple | range):
        raise DsnetError(f"routes are a list of numbers, not {shorten(routes)}")
    wanted = [model.space.resolve(number) for number in routes]
    options = [tuple(sorted({route.choices[gate] for route in wanted})) for gate in range(len(model.gates))]
    if not all(options):
        raise DsnetError("a plan needs at least one route")
    return options
