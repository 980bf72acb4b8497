"""A plan: a routed network made ready for a device, called like the network."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from dsnet.counts import human
from dsnet.errors import DsnetError
from dsnet.models import Supernet, run_gated
from dsnet.models.gated import Decide, greedy
from dsnet.routes import Route
from dsnet.routing.latency import DeviceKind
from dsnet.routing.router import Routed, Router
from dsnet.routing.rules import GateRule, RoutedOutput, gate_decision
from dsnet.runtime.backends import Backend, Executable, get_backend
from dsnet.runtime.choose import choose_backend
from dsnet.runtime.engine import Engine, GateChoices, Memory, Runner
from dsnet.runtime.parts import History, Part, canonical, pack, share, weight_bytes
from dsnet.runtime.stream import Answer, stream
from dsnet.runtime.timing import timed
from dsnet.training.run import pick_device

__all__ = ["Plan", "compile"]

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""(items, how many, what they are) → the items, passed on one by one."""

WARM_UP, ROUNDS = 2, 7  # of timing them
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def _silent(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
    return items


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """A network with its router on a device. Frozen: several threads may call it, each at its own budget."""

    engine: Engine
    router: Router | None = None
    budget: float | str | None = None
    routed: Routed | None = field(init=False)

    def __post_init__(self) -> None:
        if self.router is None and self.budget is not None:
            raise DsnetError(
                "this plan has no calibrated router, so it cannot keep a budget; make it from "
                "dsnet.load_routed(RUN, budget), after `dsnet calibrate RUN`"
            )
        routed = None if self.router is None else Routed(self.engine, self.router, self.budget)
        object.__setattr__(self, "routed", routed)
        object.__setattr__(self, "budget", None if routed is None else routed.budget)

    def __call__(self, x: Tensor, route: Route | int | None = None) -> Tensor:
        """Images [B, C, H, W] → logits [B, classes], at one route or, without one, routed."""
        if route is None:
            return self.run(x).logits
        found = self.engine.space.resolve(route)
        if not self.engine.holds(found):
            held = ", ".join(str(r.number) for r in self.held())
            raise DsnetError(f"this plan does not hold route {found.number}; it holds {held}")
        return self.engine.run_route(x, found)

    def run(self, x: Tensor) -> RoutedOutput:
        """Logits, and the number of the route that gave each."""
        if self.routed is not None:
            return self.routed.run(x)
        output = run_gated(self.engine, x)
        if len(self.engine.gates) == 1:
            return RoutedOutput(output.logits, output.choices[:, 0])
        numbers = [self.engine.space.of_choices(choices).number for choices in output.choices.tolist()]
        return RoutedOutput(output.logits, torch.tensor(numbers, dtype=torch.long, device=x.device))

    def route(self, x: Tensor) -> Tensor:
        """The number [B] of the route that answers each image."""
        return self.run(x).routes

    def stream(
        self, batches: Iterable[Tensor | None], *, group: int = 16, delay: int = 8
    ) -> Iterator[Answer]:
        """Batches one after the other, images regrouped across them; answers in the order of the images.

        ``group`` images of a route run together; none waits for more than ``delay`` further batches. What
        cannot be run is answered by its error, and the rest go on.
        """
        decide: Decide = greedy
        if self.routed is not None:
            rule = self.routed.rule
            if not isinstance(rule, GateRule):
                raise DsnetError(
                    "a stream regroups what gates decide; a cascade runs batch by batch: plan(x)"
                )
            decide = gate_decision(rule.costs, rule.weight, [gate.choices for gate in self.engine.gates])
        return stream(self.engine, decide, batches, group=group, delay=delay)

    def at(self, budget: float | str | None) -> Plan:
        """The same executables at another budget; nothing is compiled."""
        return Plan(self.engine, self.router, budget)

    def held(self) -> list[Route]:
        """The routes whose parts are there."""
        return [route for route in self.engine.space if self.engine.holds(route)]

    def __repr__(self) -> str:
        engine = self.engine
        return (
            f"Plan({engine.name}, {engine.backend} on {engine.device.type}, {engine.memory}, "
            f"{len(self.held())} routes, {engine.programs} programs, {human(engine.resident)}B of weights, "
            f"budget={self.budget})"
        )


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
    progress: Progress = _silent,
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
    network = model.model if isinstance(model, Routed) else model
    if not isinstance(network, Supernet):
        raise DsnetError(f"a plan is made from a supernet or a Routed one, not a {type(network).__name__}")
    if network.training:
        raise DsnetError("a plan is for inference: call .eval() on the network first")
    if memory not in get_args(Memory):
        raise DsnetError(f"unknown memory {memory!r}; possible: {', '.join(get_args(Memory))}")
    weight = network.head.classifier.weight
    place = weight.device if device is None else pick_device(str(device))
    if place.type not in get_args(DeviceKind):
        raise DsnetError(f"a plan is for {' or '.join(get_args(DeviceKind))}, not for {place}")
    dtype = weight.dtype if precision is None else _precision(precision)
    if backend == "auto":
        names = ("eager",) if memory == "shared" else None
        choice = choose_backend(
            network, device=place, precision=dtype, image_size=image_size, candidates=names, progress=progress
        )
        backend = choice.name
    made_by = get_backend(backend)
    reason = made_by.missing(place, dtype)
    if reason is not None:
        raise DsnetError(f"backend {backend} cannot be used: {reason}")
    if memory == "shared" and backend != "eager":
        raise DsnetError(f"{backend} copies weights; memory='shared' is for eager")
    if memory == "shared" and (place, dtype) != (weight.device, weight.dtype):
        raise DsnetError(
            f"memory='shared' runs the network's own weights, {weight.dtype} on {weight.device}: move them"
        )
    buckets = _buckets(batch_buckets, made_by)
    options = _options(network, router, routes)
    size = network.geometry.shape(image_size)
    parts = (
        pack(network, options, image_size=image_size, precision=dtype, device=place)
        if memory == "packed"
        else share(network, options, image_size=image_size)
    )
    runners = _make(parts, made_by, buckets, place, dtype, progress)
    return Plan(
        Engine(
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
            runners=runners,
            canonical=_Canonical(network.merges),
            resident=weight_bytes(part.module for part in parts.values()),
        ),
        router,
        budget,
    )


@dataclass(frozen=True, slots=True)
class _Canonical:
    merges: bool

    def __call__(self, history: History) -> History:
        return canonical(history, merges=self.merges)


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


def _make(
    parts: dict[History, Part],
    backend: Backend,
    buckets: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> dict[History, Runner]:
    jobs = [(history, bucket) for history in parts for bucket in buckets]
    examples: dict[tuple[History, int], Tensor] = {}
    made: dict[History, dict[int, Executable]] = {history: {} for history in parts}
    generator = torch.Generator().manual_seed(0)
    makers = {}
    for history, bucket in progress(jobs, len(jobs), "program"):
        part = parts[history]
        example = torch.randn(bucket, *part.shape, generator=generator).to(device, dtype)
        if history not in makers:
            makers[history] = backend.convert(part.module, example)
        made[history][bucket] = makers[history](example)
        examples[history, bucket] = example
    calls: dict[Any, Callable[[], object]]
    calls = {job: functools.partial(made[job[0]][job[1]], examples[job]) for job in jobs}
    times = _milliseconds(calls, device)
    return {
        history: Runner(
            executables, {bucket: times[history, bucket] for bucket in buckets}, backend.any_batch
        )
        for history, executables in made.items()
    }


@torch.no_grad()
def _milliseconds(calls: dict[Any, Callable[[], object]], device: torch.device) -> dict[Any, float]:
    """The median of each, all taking turns."""
    taken: dict[Any, list[float]] = {job: [] for job in calls}
    for number in range(WARM_UP + ROUNDS):
        for job, call in calls.items():
            took = timed(call, device)
            if number >= WARM_UP:
                taken[job].append(took)
    return {job: statistics.median(samples) for job, samples in taken.items()}
