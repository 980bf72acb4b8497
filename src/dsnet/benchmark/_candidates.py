"""The candidates of a benchmark: what is timed at each batch size, as functions without arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dsnet.benchmark._baselines import indexing, masking
from dsnet.benchmark.workloads import Mix, gated_routes
from dsnet.core.cuda_graphs import stream_pool
from dsnet.core.timer import Progress, silent
from dsnet.extract import extract
from dsnet.models import Supernet
from dsnet.models.group_by_route import run_assigned
from dsnet.routes import Route
from dsnet.runtime.backends.base import Executable, get_backend
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork
from dsnet.runtime.forced_routes import assigned_call, sample_routes, thresholds_for
from dsnet.runtime.partition.segments import SegmentKey
from dsnet.runtime.stream import stream

__all__ = ["Candidate", "Candidates", "batches_per_call"]

T = TypeVar("T")
Run = Callable[[], Any]

MIN_IMAGES = 20  # per call that runs the mix


class Candidate(NamedTuple):
    """A function to time, and how many batches a call of it runs."""

    run: Run
    batches: int = 1


class Candidates:
    """Builds the candidates for one batch size after another; stand-alone networks are converted once.

    Args:
        model: The network.
        compiled: The network of its plan.
        mix: The routes of the images.
        static: Compiled static networks, by the key of their times.
        eager: Whether to time the network without a plan as well: slicing, indexing and masking.
    """

    def __init__(
        self,
        model: Supernet,
        compiled: CompiledNetwork,
        mix: Mix,
        static: Mapping[str, BucketedProgram],
        *,
        eager: bool = True,
    ) -> None:
        self.model, self.compiled, self.mix, self.static, self.eager = model, compiled, mix, static, eager
        self.standalone: dict[int, Callable[..., Executable]] = {}  # converted for any batch size, by route
        if eager:
            self.sliced = copy.deepcopy(model).to(compiled.device, compiled.precision)
            self.indexed = indexing(self.sliced)
            self.masked = masking(self.sliced, [model.space.resolve(number) for number in mix.shares])

    def at(self, batch: int, progress: Progress = silent) -> dict[str, Candidate]:
        """Return the candidates at a batch size by name; all run the same images."""
        compiled, space = self.compiled, self.compiled.space
        x = torch.randn(batch, *compiled.image_shape, generator=torch.Generator().manual_seed(0))
        x = x.to(compiled.device, compiled.precision)
        images = x.to(compiled.takes)
        batches = batches_per_call(self.mix, batch)
        routes = self._forced_routes(batches * batch, batch)
        gated = _sequence([partial(assigned_call(compiled, batch_routes), images) for batch_routes in routes])
        candidates = {
            "full": Candidate(partial(compiled.executor.run_route, images, space.largest)),
            "gated": Candidate(gated, batches),
            "cascade": Candidate(self._cascade(images, batches), batches),
        }
        gate_largest = space.resolve(gated_routes(self.model)[-1])
        if gate_largest != space.largest and compiled.holds(gate_largest):
            candidates["gate largest"] = Candidate(partial(compiled.executor.run_route, images, gate_largest))
        candidates["stream"] = self._stream(images)
        standalone = sorted({*self.mix.shares, self.mix.cascade.routes[0]})
        for number in progress(standalone, len(standalone), f"batch {batch}: stand-alone network"):
            network = partial(self._standalone(number, x), images)
            candidates[f"alone {number}"] = self._captured(network)
        if batch == 1:  # each network then finds the cache as another one left it
            runs = [candidates[f"alone {route.number}"].run for (route,) in routes]
            candidates["in turn"] = Candidate(_sequence(runs), batches)
        for name, program in self.static.items():
            candidates[name] = self._captured(partial(program, images))
        candidates |= self._suffixes(images)
        return candidates | (self._eager_networks(x, routes) if self.eager else {})

    def _forced_routes(self, images: int, size: int) -> list[list[Route]]:
        """Return routes for images in the shares of the mix, in groups of ``size``."""
        routes = [self.compiled.space.resolve(number) for number in sample_routes(self.mix.shares, images)]
        return _split(routes, size)

    def _standalone(self, number: int, x: Tensor) -> Executable:
        if number not in self.standalone:
            network = extract(self.model, number, image_size=self.compiled.image_size)
            network = network.to(x.device, x.dtype).eval().requires_grad_(False)
            self.standalone[number] = get_backend(self.compiled.backend).convert(network, x)
        return self.standalone[number](x)

    def _captured(self, run: Run) -> Candidate:
        """Capture a CUDA graph if the plan consists of them."""
        if not self.compiled.executor.asynchronous:
            return Candidate(run)

        def body() -> None:
            run()

        graph = stream_pool(self.compiled.device, 1).capture(body, 0)
        return Candidate(lambda: (graph(), run))  # keep `run`: the graph works on its memory

    def _cascade(self, images: Tensor, batches: int) -> Run:
        """Run the plan as a cascade, with thresholds that send the given shares of images on."""
        routes, executor = self.mix.cascade.routes, self.compiled.executor
        last_steps = sample_routes(self.mix.cascade.final_shares, batches * len(images))
        runs = []
        for steps in _split(last_steps, len(images)):
            counts = [sum(last >= step for last in steps) for step in range(1, len(routes))]
            thresholds = thresholds_for(self.compiled, images, routes, counts)
            runs.append(partial(executor.run_cascade, images, routes, thresholds))
        return _sequence(runs)

    def _stream(self, images: Tensor) -> Candidate:
        """Run the plan on a stream of batches, which joins them."""
        batch, executor = len(images), self.compiled.executor
        # On a GPU the results of joined batches are read while the next ones run, and only the last are
        # waited for: stream many of them.
        joins = 16 if executor.asynchronous else 1
        batches = max(2, joins, joins * executor.max_batch // batch)
        joined = batch * max(1, -(-executor.max_batch // batch))
        groups = [
            assigned_call(self.compiled, group) for group in self._forced_routes(batches * batch, joined)
        ]

        def run() -> None:
            remaining = iter(groups)
            answers = stream(
                lambda x: next(remaining)(x),
                self.compiled.check_images,
                [images] * batches,
                images=executor.max_batch,
                delay=2 * batches,
                ahead=executor.asynchronous,
                blocks=False,
            )
            assert sum(answer.error is None for answer in answers) == batches * batch

        return Candidate(run, batches)

    def _suffixes(self, images: Tensor) -> dict[str, Candidate]:
        """Run each further route of the cascade from the states that the routes before it left."""
        compiled, candidates = self.compiled, {}
        states: dict[SegmentKey, Any] = {(): compiled.run_prefix(images)}
        for step, number in enumerate(self.mix.cascade.routes):
            choices = compiled.space.resolve(number).choices
            if step:
                run = partial(_run_missing, compiled, dict(states), choices)
                candidates[f"suffix {number}"] = self._captured(run)
            compiled.run_from_states(states, choices)
        return candidates

    def _eager_networks(self, x: Tensor, routes: Sequence[Sequence[Route]]) -> dict[str, Candidate]:
        """Run the network without a plan.

        These come last: torch's threads wait busily for a while, on cores that a backend needs.
        """
        choices = [torch.tensor([route.choices for route in group], device=x.device) for group in routes]
        index = {number: row for row, number in enumerate(self.mix.shares)}
        rows = torch.tensor([index[route.number] for route in routes[0]], device=x.device)
        candidates = {
            name: Candidate(_sequence([partial(run_assigned, network, x, c) for c in choices]), len(choices))
            for name, network in (("slicing", self.sliced), ("indexing", self.indexed))
        }
        candidates["masking"] = Candidate(lambda: self.masked(x, rows))  # its time does not depend on routes
        candidates["largest"] = Candidate(lambda: self.sliced(x, self.sliced.space.largest))
        return candidates


def batches_per_call(mix: Mix, batch: int) -> int:
    """Return how many batches a call runs, so that every route of the mix occurs."""
    return max(MIN_IMAGES // batch, -(-len(mix.shares) // batch), 1)


def _split(items: list[T], size: int) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _sequence(runs: Sequence[Run]) -> Run:
    return lambda: [run() for run in runs]


def _run_missing(
    compiled: CompiledNetwork, states: Mapping[SegmentKey, Any], choices: tuple[int, ...]
) -> Tensor:
    """Run the segments of a route that ``states`` lacks; on a copy, so that each call runs them anew."""
    return compiled.run_from_states(dict(states), choices)
