"""From a network, routed or not, to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.latency import DeviceKind
from dsnet.routing.router import Routed, Router
from dsnet.runtime.backends import Backend, get_backend
from dsnet.runtime.choose import choose_backend
from dsnet.runtime.engine import Engine, GateChoices, Memory
from dsnet.runtime.parts import pack, share, weight_bytes
from dsnet.runtime.plan import Plan
from dsnet.runtime.programs import make_runners
from dsnet.runtime.timing import Progress, silent
from dsnet.training.run import pick_device

__all__ = ["compile"]

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def compile(  # noqa: A001  (dsnet.runtime.compile, as torch.compile)
    model: Supernet | Routed,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    precision: str | None = None,
    memory: Memory = "packed",
    batch_buckets: Sequence[int] | None = None,
    image_size: int | tuple[int, int] | None = None,
    routes: Sequence[int] | None = None,
    progress: Progress = silent,
) -> Plan:
    """Makes a network ready for a device.

    A `Routed` brings its router and budget along; a network alone is routed by its gates' own decision.
    ``memory="packed"`` gives every route its own weights, contiguous, batch norms folded; ``"shared"`` runs
    slices of the supernet's own. ``backend="auto"`` times those that can be used here and takes the fastest;
    the choice is remembered. ``batch_buckets`` are the batch sizes that programs are made for, where a
    backend needs to know; others run in several of these. ``routes`` are those to hold, by default all that
    the router can take at any budget.
    """
    router, budget = (model.router, model.budget) if isinstance(model, Routed) else (None, None)
    network = _network(model)
    weight = network.head.classifier.weight
    place = weight.device if device is None else pick_device(str(device))
    if place.type not in get_args(DeviceKind):
        raise DsnetError(f"a plan is for {' or '.join(get_args(DeviceKind))}, not for {place}")
    dtype = weight.dtype if precision is None else _precision(precision)
    _check_memory(memory, backend, shared=(place, dtype) == (weight.device, weight.dtype))
    if backend == "auto":
        names = ("eager",) if memory == "shared" else None
        backend = choose_backend(
            network, device=place, precision=dtype, image_size=image_size, candidates=names, progress=progress
        ).name
    made_by = get_backend(backend)
    reason = made_by.missing(place, dtype)
    if reason is not None:
        raise DsnetError(f"backend {backend} cannot be used: {reason}")
    buckets = _buckets(batch_buckets, made_by)
    options = _options(network, router, routes)
    size = network.geometry.shape(image_size)
    parts = (
        pack(network, options, image_size=image_size, precision=dtype, device=place)
        if memory == "packed"
        else share(network, options, image_size=image_size)
    )
    engine = Engine(
        spec=network.spec,
        space=network.space,
        gates=tuple(GateChoices(network.gate(g).choices) for g in range(len(network.gates))),
        choices=network.choices,
        merges=network.merges,
        geometry=network.geometry,
        image_size=(size.height, size.width),
        classes=network.head.classifier.out_features,
        device=place,
        precision=dtype,
        backend=backend,
        memory=memory,
        runners=make_runners(parts, made_by, buckets, device=place, precision=dtype, progress=progress),
        resident=weight_bytes(part.module for part in parts.values()),
    )
    return Plan(engine, router, budget)


def _network(model: object) -> Supernet:
    network = model.model if isinstance(model, Routed) else model
    if not isinstance(network, Supernet):
        raise DsnetError(f"a plan is made from a supernet or a Routed one, not a {type(network).__name__}")
    if network.training:
        raise DsnetError("a plan is for inference: call .eval() on the network first")
    return network


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


def _buckets(given: Sequence[int] | None, backend: Backend) -> tuple[int, ...]:
    sizes = backend.buckets if given is None else given
    if (
        not isinstance(sizes, list | tuple)
        or not sizes
        or any(type(size) is not int or size < 1 for size in sizes)
    ):
        raise DsnetError(f"batch_buckets are positive integers, not {given!r}")
    return tuple(sorted({1, *sizes}))


def _options(model: Supernet, router: Router | None, routes: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Every gate's choices that some route needs."""
    if routes is not None and not isinstance(routes, list | tuple | range):
        raise DsnetError(f"routes are a list of numbers, not {routes!r}")
    if routes is not None:
        wanted = [model.space.resolve(number) for number in routes]
    else:
        taken = {number for point in (router.curve if router else ()) for number in point.routes}
        wanted = [model.space.resolve(number) for number in sorted(taken)]
    options = []
    for gate in range(len(model.gates)):
        own = set() if routes is not None or taken else set(model.gate(gate).choices)
        options.append(tuple(sorted(own | {route.choices[gate] for route in wanted})))
    if not all(options):
        raise DsnetError("a plan needs at least one route")
    return options
