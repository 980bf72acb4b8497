"""The ways of running a mixed batch that a benchmark compares, as calls of no argument."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet.benchmark.baselines import indexing, masking
from dsnet.benchmark.static_network import Static
from dsnet.benchmark.workloads import Cascade, Mix, decided_routes
from dsnet.core.cuda_graphs import stream_pool
from dsnet.core.timer import Progress, silent
from dsnet.extract import extract
from dsnet.models import Supernet
from dsnet.models.group_by_route import run_assigned
from dsnet.runtime.backends.base import Executable, get_backend
from dsnet.runtime.executors.host import CompiledNetwork
from dsnet.runtime.forced_routes import decisions, mixed, thresholds_for
from dsnet.runtime.partition.segments import SegmentKey
from dsnet.runtime.stream import stream

__all__ = ["Others", "Ways", "batches_for", "make_ways"]

Convert = Callable[..., Executable]

FEWEST = 20  # images of a mix: small batches run several in a row


class Others:
    """The network as others would run it, in the plan's precision and on its device."""

    def __init__(self, model: Supernet, compiled: CompiledNetwork, mix: Mix) -> None:
        weight = model.head.classifier.weight
        if (weight.device, weight.dtype) != (compiled.device, compiled.precision):
            model = copy.deepcopy(model).to(compiled.device, compiled.precision)
        self.sliced, self.indexed = model, indexing(model)
        self.places = {number: place for place, number in enumerate(mix.shares)}
        self.masked = masking(model, [model.space.resolve(number) for number in mix.shares])


class Ways(NamedTuple):
    """Calls by name; several of them run more than one batch, so that the mix is met."""

    calls: dict[str, Callable[[], object]]
    batches: dict[str, int]  # how many a call runs, where that is more than one


def make_ways(
    model: Supernet,
    compiled: CompiledNetwork,
    mix: Mix,
    batch: int,
    static: Mapping[str, Static],
    others: Others | None,
    *,
    alone: dict[int, Convert] | None = None,
    progress: Progress = silent,
) -> Ways:
    """Everything that is timed at a batch size, on the same images.

    ``static`` networks by way. Without ``others`` only the plan, its ideal, and these. ``alone`` keeps what
    makes stand-alone networks ready, by route, for another batch size.
    """
    makers = {} if alone is None else alone
    space, place = compiled.space, compiled.device
    shape = (batch, compiled.input_spec.channels, *compiled.image_size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(place, compiled.precision)
    own = x.to(compiled.takes)  # the same images as the plan takes them
    several = batches_for(mix, batch)
    drawn = _batches(decisions(mix.shares, several * batch), batch)
    routes = [[space.resolve(number) for number in numbers] for numbers in drawn]
    answered = _batches(decisions(mix.cascade.answered, several * batch), batch)
    calls: dict[str, Callable[[], object]] = {
        "full": lambda: compiled.executor.run_route(own, space.largest),
        "gated": _one_by_one([functools.partial(mixed(compiled, taken), own) for taken in routes]),
        "cascade": _cascades(compiled, own, mix.cascade.routes, answered),
    }
    own_largest = space.resolve(decided_routes(model)[-1])
    if own_largest != space.largest and compiled.holds(own_largest):
        calls["gate largest"] = lambda: compiled.executor.run_route(own, own_largest)
    # On a GPU many of those that a stream joins: the answers of one are taken while the next runs, and only
    # the last one's answers are waited for.
    joined = 16 if compiled.executor.asynchronous else 1
    streamed = max(2, joined, joined * compiled.executor.max_batch // batch)
    calls["stream"] = _streamed(compiled, own, mix, streamed)
    backend = get_backend(compiled.backend)
    alone_at = sorted({*mix.shares, mix.cascade.routes[0]})
    for number in progress(alone_at, len(alone_at), f"batch {batch}: stand-alone network"):
        if number not in makers:
            network = extract(model, number, image_size=compiled.image_size)
            network = network.to(x.device, x.dtype).eval().requires_grad_(False)
            makers[number] = backend.convert(network, x)
        calls[f"alone {number}"] = _recorded(compiled, functools.partial(makers[number](x), own))
    if batch == 1:  # what leaves the cache when another network runs is no matter of a plan
        calls["in turn"] = _one_by_one([calls[f"alone {number}"] for (number,) in drawn])
    for way, baseline in static.items():
        calls[way] = _recorded(compiled, functools.partial(baseline.run, own))
    calls |= _suffixes(compiled, own, mix.cascade)
    runs = dict.fromkeys(("gated", "cascade", "slicing", "indexing", "in turn"), several)
    runs["stream"] = streamed
    if others is None:
        return Ways(calls, runs)
    # Last: torch's threads wait busily for a while, on the cores that a backend's need.
    at = torch.tensor([others.places[number] for number in drawn[0]], device=place)
    for way, asked in (("slicing", others.sliced), ("indexing", others.indexed)):
        choices = [torch.tensor([route.choices for route in own], device=place) for own in routes]
        calls[way] = _one_by_one([functools.partial(run_assigned, asked, x, own) for own in choices])
    calls["masking"] = lambda: others.masked(x, at)  # one batch will do: the mix does not matter
    calls["largest"] = lambda: others.sliced(x, space.largest)
    return Ways(calls, runs)


def batches_for(mix: Mix, batch: int) -> int:
    """How many batches a call runs: every route of the mix has its turn."""
    return max(FEWEST // batch, -(-len(mix.shares) // batch), 1)


def _batches(drawn: Sequence[int], batch: int) -> list[Sequence[int]]:
    return [drawn[start : start + batch] for start in range(0, len(drawn), batch)]


def _streamed(compiled: CompiledNetwork, x: Tensor, mix: Mix, batches: int) -> Callable[[], object]:
    """So many batches as a stream, which joins them; every image at its route."""
    most, batch = compiled.executor.max_batch, len(x)
    joined = batch * max(1, -(-most // batch))
    drawn = [compiled.space.resolve(number) for number in decisions(mix.shares, batches * batch)]
    pieces = [drawn[start : start + joined] for start in range(0, len(drawn), joined)]
    ways = [mixed(compiled, own) for own in pieces]

    def run() -> None:
        following = iter(ways)
        answers = stream(
            lambda images: next(following)(images),
            compiled.check_images,
            [x] * batches,
            images=most,
            delay=2 * batches,
            ahead=compiled.executor.asynchronous,
            blocks=False,
        )
        assert sum(answer.error is None for answer in answers) == len(drawn)

    return run


def _one_by_one(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    return lambda: [call() for call in calls]


def _recorded(compiled: CompiledNetwork, call: Callable[[], object]) -> Callable[[], object]:
    """As a graph, where the plan is made of graphs."""
    if not compiled.executor.asynchronous:
        return call

    def body() -> None:
        call()

    program = stream_pool(compiled.device, 1).capture(body, 0)
    return lambda: (program(), call)  # a graph works on memory that what was called holds


def _cascades(
    compiled: CompiledNetwork, x: Tensor, routes: Sequence[int], batches: Sequence[Sequence[int]]
) -> Callable[[], object]:
    """The plan as a cascade; ``batches`` are the positions in ``routes`` that answer the images of each."""
    further = range(1, len(routes))
    counts = [[sum(last >= position for last in answered) for position in further] for answered in batches]
    thresholds = [thresholds_for(compiled, x, routes, own) for own in counts]
    return lambda: [compiled.executor.run_cascade(x, routes, own) for own in thresholds]


def _suffixes(compiled: CompiledNetwork, x: Tensor, cascade: Cascade) -> dict[str, Callable[[], object]]:
    """What every further route of a cascade has to run behind those before it."""
    calls: dict[str, Callable[[], object]] = {}
    states: dict[SegmentKey, Any] = {(): compiled.run_prefix(x)}
    for level, number in enumerate(cascade.routes):
        choices = compiled.space.resolve(number).choices
        if level:
            behind = functools.partial(_finish, compiled, dict(states), choices)
            calls[f"suffix {number}"] = _recorded(compiled, behind)
        compiled.run_from_states(states, choices)
    return calls


def _finish(compiled: CompiledNetwork, states: Mapping[SegmentKey, Any], choices: tuple[int, ...]) -> Tensor:
    """Leaves ``states`` as they are: whatever is not there yet runs every time."""
    return compiled.run_from_states(dict(states), choices)
