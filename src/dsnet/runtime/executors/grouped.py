"""Mixed batches on a GPU: everything between two decisions is one launch, and the host waits once a gate.

All that programs read and write lies at fixed places: images, what stands in front of every gate (a table of
features with a row for each image), scores, decisions, logits. A gate's decision sorts the images by what
they take and tells the host how many take each; the host then starts, side by side, one program for every
part that has images. A program gathers its images itself, by the sorted order, and puts what it makes of them
back into their rows; where it has room for more images than take the part, the rest goes to a row that nobody
reads.

A part behind the second gate or a later one stands in for all choices before it where it can: features are as
wide as the widest of them, the rest is zeros, and images are sorted by the gate's own choice into few, large
groups. Elsewhere there are parts and a table for each choice before, and images are sorted by both.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from dsnet.core.cuda_graphs import StreamPool
from dsnet.core.timer import Progress, silent, timed
from dsnet.errors import DsnetError
from dsnet.kernels.dispatch import gather_indices, scatter_scores
from dsnet.routes import Route, RouteSpace
from dsnet.routing.cost_table import CostPenalties
from dsnet.routing.policies import RoutedOutput, margin, unsure
from dsnet.runtime.backends.base import Executable
from dsnet.runtime.executors.batching import Division
from dsnet.runtime.executors.buffers import GatePlaces, Table
from dsnet.runtime.executors.chunks import GraphExecutor
from dsnet.runtime.executors.penalties import set_penalties
from dsnet.runtime.executors.segment_calls import SegmentCalls, segment_paths
from dsnet.runtime.partition.segment_index import SegmentIndex
from dsnet.runtime.partition.segments import SegmentKey, segment_key

__all__ = ["SIDE", "Graphed"]

SIDE = 8  # streams beside the caller's own, at most
ROUNDS = 5  # of timing a program

Program = Callable[[], None]


class Graphed(GraphExecutor):
    """A network whose parts are programs on streams. One batch runs at a time: threads take turns."""

    def __init__(
        self,
        calls: Mapping[SegmentKey, Executable],  # every part, or its stand-in, for any number of images
        *,
        image: Tensor,  # [1, C, H, W], like those that will come
        space: RouteSpace,
        choices: Sequence[Sequence[int]],  # that every gate decides between
        keyed: Collection[SegmentKey] = (),  # parts that also take the number of each image's history
        end: Executable | None = None,  # behind all parts: what they give, and the place of the last choice
        sizes: Sequence[int],
        streams: StreamPool,
        progress: Progress = silent,
    ) -> None:
        self.calls, self.space, self.streams, self.lock = calls, space, streams, threading.Lock()
        self.keyed, self.end = keyed, end
        self.sizes = tuple(sorted(set(sizes)))
        self.device, self.max_batch = image.device, self.sizes[-1]
        _, channels, height, width = image.shape
        self.images = image.new_zeros(self.max_batch, height, width, channels).permute(0, 3, 1, 2)
        self.row = torch.arange(self.max_batch, device=self.device)
        self.valid = torch.zeros(1, dtype=torch.long, device=self.device)
        self.threshold = torch.zeros(1, dtype=torch.float64, device=self.device)
        self.asked = torch.zeros(self.max_batch, dtype=torch.bool, device=self.device)  # by the last route
        self.gates: list[GatePlaces] = []
        self.tables: list[dict[int, Table]] = []  # by gate, then by the choice before it (0 at the first)
        self.serving = SegmentIndex(calls, choices)
        self.held = self.serving.held
        self.taken = torch.zeros(len(choices), self.max_batch, dtype=torch.long, device=self.device)
        self._make_places(choices, image)
        ways = itertools.product(*self.held)
        self.numbers = torch.tensor([space.of_choices(way).number for way in ways], device=self.device)
        widths = [len(own) for own in self.held]
        steps = [math.prod(widths[number + 1 :]) for number in range(len(widths))]
        self.steps = torch.tensor(steps, device=self.device)[:, None]  # between ways, by gate
        self.routes = torch.zeros(self.max_batch, dtype=torch.long, device=self.device)
        self.prices: CostPenalties | None = None
        self.places: tuple[Tensor, int, list[Tensor]] | None = None  # of choices that were given last
        self.programs: dict[tuple[str | SegmentKey, int, int], Program] = {}  # what, gate, size
        with streams.on_device():
            times = self._record(progress)
        self.divisions = {history: Division(times[history]) for history in calls}
        self.abreast = dict.fromkeys(self.sizes, 1)  # parts that run side by side, by batch size
        with streams.on_device(), torch.no_grad():
            for size in progress(self.sizes, len(self.sizes), "mixed batch"):
                self.abreast[size] = self._fastest_abreast(size)

    # --- making it -----------------------------------------------------------------------------------
    @torch.no_grad()
    def _make_places(self, choices: Sequence[Sequence[int]], image: Tensor) -> None:
        """Runs an image through everything, to see the shapes."""
        standing = {0: self.calls[()](image.expand(2, *image.shape[1:]))}  # by the choice before
        for number, own in enumerate(choices):
            held, alone = self.held[number], self.serving.before[number]
            before = len(self.gates[-1].held) if self.gates else 1
            told = self.streams.host_buffer(len(self.serving.of_pairs(number)))
            scores = next(iter(standing.values()))[1]
            self.gates.append(GatePlaces(own, held, before, self.taken[number], scores, told))
            widths = {found[0].shape[1] for found in standing.values()}
            ragged = number > 0 and self.serving.stands_in(number) and self._reads_rows(number)
            own_widths = widths if ragged else ()
            tables = {c: Table.like(standing[c][0], self.max_batch, own_widths) for c in alone}
            if self.serving.stands_in(number):
                tables = dict.fromkeys(standing, tables[alone[0]])
            self.tables.append(tables)
            following: dict[int, tuple[Tensor, ...]] = {}
            for previous, choice in itertools.product(standing, held):
                history = segment_key(number, previous, choice)
                if history in self.calls and choice not in following:
                    features = standing[previous][0]
                    first = (torch.zeros(len(features), dtype=torch.long, device=self.device),)
                    following[choice] = self.calls[history](features, *first * (history in self.keyed))
            standing = following
        logits = next(iter(standing.values()))[0]
        self.logits = logits.new_zeros(self.max_batch + 1, logits.shape[1])
        options = self.serving.options[-1]
        places = [options.index(choice) if choice in options else 0 for choice in self.gates[-1].held]
        self.place_of = torch.tensor(places, device=self.device)
        self.answers = self.logits[: self.max_batch]
        if self.end is not None:
            (answers,) = self.end(logits, torch.zeros(len(logits), dtype=torch.long, device=self.device))
            self.answers = answers.new_zeros(self.max_batch, answers.shape[1])

    def _record(self, progress: Progress) -> dict[SegmentKey, dict[int, float]]:
        """Makes all programs; milliseconds of the front and of the parts, by size."""
        times: dict[SegmentKey, dict[int, float]] = {history: {} for history in self.calls}
        jobs = [(history, size) for history in self.calls for size in self.sizes]
        for history, size in progress(jobs, len(jobs), "program"):
            body = self._part(history, size) if history else functools.partial(self._front, size)
            key = (history, len(history) - 1, size) if history else ("front", 0, size)
            program = self.programs[key] = self.streams.capture(body, self._memory(history))
            taken = [timed(program, self.device) for _ in range(ROUNDS)]
            times[history][size] = statistics.median(taken)
        for size, (number, gate) in itertools.product(self.sizes, enumerate(self.gates)):
            steps: dict[str, Program] = {
                "decide": functools.partial(self._decide, number, size),
                "arrange": functools.partial(self._decide, number, size, decided=True),
                "everyone": functools.partial(gate.everyone, self.row[:size], self.valid),
            }
            if number == 0:
                steps["begin"] = functools.partial(self._begin, size)
                steps["routes"] = functools.partial(self._number, size)
                if self.end is None:
                    steps["unsure"] = functools.partial(self._unsure, size)
                else:
                    steps["end"] = functools.partial(self._end, size)
            for name, step in steps.items():
                self.programs[name, number, size] = self.streams.capture(step, 0)
        return times

    def _fastest_abreast(self, size: int) -> int:
        """How many parts at a time, for images that take all choices equally.

        Kernels that fill the device only hinder each other, and so do maps that no longer fit its cache.
        """
        draw, columns = torch.Generator().manual_seed(0), []
        for number, own in enumerate(self.serving.options):
            order = torch.randperm(size, generator=draw) if number else torch.arange(size)
            columns.append(torch.tensor(own)[order * len(own) // size])
        given = torch.stack(columns, 1).to(self.device)
        most = min(SIDE, max(map(len, self.serving.options)))
        taken: dict[int, list[float]] = {count: [] for count in (1, 2, 3, 4, 6, 8) if count <= most}
        for number in range(1 + ROUNDS):
            for count, samples in taken.items():
                self.abreast[size] = count
                took = timed(functools.partial(self._run, self.images[:size], None, given), self.device)
                if number:
                    samples.append(took)
        return min(taken, key=lambda count: statistics.median(taken[count]))

    def _memory(self, history: SegmentKey) -> int:
        """The lane whose memory it works in: the same for parts behind the same choice of a gate."""
        return 1 + self.gates[len(history) - 1].held.index(history[-1]) % SIDE if history else 0

    # --- what programs do ----------------------------------------------------------------------------
    def _front(self, images: int) -> None:
        features, scores, *by = self.calls[()].unscaled(self.images[:images])
        self.tables[0][0].put(self.row[:images], features, *by)
        self.gates[0].scores[:images].copy_(scores)

    def _begin(self, images: int) -> None:
        """The front and the first decision at once."""
        self._front(images)
        self._decide(0, images)

    def _decide(self, number: int, images: int, *, decided: bool = False) -> None:
        previous = self.gates[number - 1].taken if number else None
        paired = number > 0 and not self.serving.stands_in(number)
        self.gates[number].settle(images, self.valid, previous, paired=paired, decided=decided)

    def _end(self, images: int) -> None:
        """What is behind all parts, for all images at once."""
        assert self.end is not None
        which = self.place_of[self.gates[-1].taken[:images]]
        self.answers[:images].copy_(self.end(self.logits[:images], which)[0])

    def _number(self, images: int) -> None:
        """The routes of what was taken."""
        self.routes[:images].copy_(self.numbers[(self.taken[:, :images] * self.steps).sum(0)])

    def _unsure(self, images: int) -> None:
        """Those whose answer is not sure, of those that the last route was asked about."""
        asked = self.asked[:images]
        asked.logical_and_(unsure(margin(self.logits[:images]), self.threshold))
        for gate in self.gates:
            gate.only(asked)

    def _part(self, history: SegmentKey, size: int) -> Program:
        number = len(history) - 1
        gate, last = self.gates[number], number + 1 == len(self.gates)
        previous, choice = history[-2] if number else 0, history[-1]
        pair, rows, call = self.serving.pair(history), self.row[:size], self.calls[history]
        options = self.serving.options
        place, count = options[number].index(choice), len(options[number])
        apart = not self.serving.stands_in(number)  # then all its images took the same choice before
        reads = self._reads_rows(number)

        def body() -> None:
            sorted_images = (gate.order, gate.counts, gate.starts, gate.earlier)
            at, to, earlier = gather_indices(*sorted_images, pair, rows, self.max_batch)
            table = self.tables[number][previous]
            x = cast(Tensor, table.read(at)) if reads else table.get(at)
            keys = [earlier // len(options[number - 1]) if apart else earlier]
            inputs = (x, *keys) if history in self.keyed else (x,)
            if last:
                self.logits.index_copy_(0, to, call(*inputs)[0])
                return
            features, scores, *by = call.unscaled(*inputs)
            self.tables[number + 1][choice].put(to, features, *by)
            following = self.gates[number + 1]
            scatter_scores(to, scores, following.scores, earlier, following.earlier, count, place)

        return body

    def _reads_rows(self, number: int) -> bool:
        """Whether parts behind this gate read features where they lie in a table."""
        behind = [call for history, call in self.calls.items() if len(history) == number + 1]
        return all(call.reads_rows for call in behind)

    # --- running it ----------------------------------------------------------------------------------
    def run_gate(self, x: Tensor, penalties: CostPenalties | None = None) -> RoutedOutput:
        """Run images [B, C, H, W] at the routes that the gates decide for, scores less ``penalties``."""
        return self.in_chunks(x, lambda rows: self._run(_some(x, rows), penalties, None))

    def run_assigned(self, x: Tensor, choices: Tensor, *, within_gates: bool = False) -> RoutedOutput:
        """Run each image at its own ``choices`` [B, gates]; ``within_gates`` makes no difference here."""
        return self.in_chunks(x, lambda rows: self._run(_some(x, rows), None, _some(choices, rows)))

    def run_route(self, x: Tensor, route: Route) -> Tensor:
        """Run all images at one route; the host waits for nothing."""
        return self.in_chunks(x, lambda rows: self._run_route(_some(x, rows), route)).logits

    def run_cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        """Run ``routes`` in turn for images whose margin is below the threshold; not for detectors."""
        if self.end is not None:
            raise DsnetError("a cascade asks how sure a class is: a detector is routed by its gate")
        return self.in_chunks(x, lambda rows: self._cascade(_some(x, rows), routes, thresholds))

    def segment_calls(self, x: Tensor) -> SegmentCalls:
        """Return functions that run all images of ``x`` along a path of choices; for profiles."""

        def run(path: SegmentKey) -> RoutedOutput:
            return self.in_chunks(x, lambda rows: self._run_path(_some(x, rows), path))

        choices = [len(options) for options in self.space.choices]
        paths = [path for gate in range(len(choices)) for path in segment_paths(choices, gate)]
        return SegmentCalls({path: functools.partial(run, path) for path in ((), *paths)}, cumulative=True)

    def _run(self, x: Tensor, prices: CostPenalties | None, given: Tensor | None) -> RoutedOutput:
        images, size = self._load(x)
        set_penalties(self.gates, self.prices, prices)
        self.prices = prices
        if given is not None:
            self.programs["front", 0, size]()
        for number, gate in enumerate(self.gates):
            if given is not None:
                gate.taken[:images].copy_(self._places(given)[number])
                self.programs["arrange", number, size]()
            else:
                self.programs["decide" if number else "begin", number, size]()
            self.streams.synchronize()
            self._start(number, gate.told.tolist(), size)
        self.programs["routes", 0, size]()
        return self._found(images, self.routes[:images].clone())

    def _places(self, given: Tensor) -> list[Tensor]:
        """Of given choices [B, gates], gate by gate; those of the last ones are kept."""
        version = -1 if given.is_inference() else given._version  # such a tensor does not count changes
        if self.places is None or self.places[0] is not given or self.places[1] != version or version < 0:
            own = enumerate(self.gates)
            found = [gate.places_of(given[:, at]) for at, gate in own]
            self.places = given, version, found
        return self.places[2]

    def _run_route(self, x: Tensor, route: Route) -> RoutedOutput:
        images, size = self._load(x)
        self._run_everyone(route.choices, images, size)
        self.gates[-1].taken.fill_(self.gates[-1].held.index(route.choices[-1]))
        return self._found(images, torch.full((images,), route.number, device=self.device))

    def _cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        images, size = self._load(x)
        gate = self.gates[0]
        numbers = torch.full((images,), routes[0], dtype=torch.long, device=self.device)
        self._run_everyone(self.space.resolve(routes[0]).choices, images, size)
        self.asked.copy_(self.row < self.valid)
        for number, threshold in zip(routes[1:], thresholds, strict=True):
            self.threshold.fill_(threshold)
            self.programs["unsure", 0, size]()
            self.streams.synchronize()
            count = int(gate.told[0])
            if not count:
                break
            for history in self.serving.way(self.space.resolve(number)):
                self._run_part(history, count)
            numbers[gate.order[:count]] = number
        return self._found(images, numbers)

    def _run_path(self, x: Tensor, path: SegmentKey) -> RoutedOutput:
        images, size = self._load(x)
        self._run_everyone(path, images, size)
        return self._found(images, self.routes[:images])

    def _run_everyone(self, path: SegmentKey, images: int, size: int) -> None:
        """Run the prefix, and all images along a path of choices."""
        self.programs["front", 0, size]()
        for number, pair in enumerate(zip((0, *path), path, strict=False)):
            self.programs["everyone", number, size]()
            self._run_part(self.serving.part(number, *pair), images)

    def _load(self, x: Tensor) -> tuple[int, int]:
        """Puts images into their place: how many, and the size of programs that hold them all."""
        images = len(x)
        self.streams.acquire()
        self.images[:images].copy_(x)
        self.valid.fill_(images)
        return images, self._size(images)

    def _size(self, images: int) -> int:
        return next(size for size in self.sizes if size >= images)

    def _found(self, images: int, routes: Tensor) -> RoutedOutput:
        if self.end is not None:
            self.programs["end", 0, self._size(images)]()
        found = RoutedOutput(self.answers[:images].clone(), routes)
        self.streams.release()
        return found

    def _start(self, number: int, counts: Sequence[int], size: int) -> None:
        """Starts a program for every part that images take, the longest first; the host has waited.

        Those that share memory run on the same lane, one after the other.
        """
        jobs = []
        for history, count in zip(self.serving.of_pairs(number), counts, strict=True):
            if count:
                jobs.append((self.division(history).time(count), history, count))
        busy = dict.fromkeys(range(1, 1 + self.abreast[size]) if self.abreast[size] > 1 else (0,), 0.0)
        placed: dict[int, int] = {}  # streams by memory
        for took, history, count in sorted(jobs, reverse=True):
            lane = placed.setdefault(self._memory(history), min(busy, key=busy.__getitem__))  # begins first
            busy[lane] += took
            with self.streams.use(lane):
                self._run_part(history, count)
        self.streams.join(lane for lane, took in busy.items() if took)

    def division(self, history: SegmentKey) -> Division:
        """Into which batches images of a part are divided."""
        division = self.divisions.get(history)
        if division is None:
            raise DsnetError(f"this plan does not hold the choices {list(history)}")
        return division

    def _run_part(self, history: SegmentKey, count: int) -> None:
        """So many images through a part, on the lane at hand."""
        number, sizes = len(history) - 1, self.division(history)(count)
        gate, pair = self.gates[number], self.serving.pair(history)
        for place, size in enumerate(sizes):
            if place:
                gate.starts[pair : pair + 1].add_(sizes[place - 1])
                gate.counts[pair : pair + 1].sub_(sizes[place - 1])
            self.programs[history, number, size]()


def _some(x: Tensor, at: slice | None) -> Tensor:
    return x if at is None else x[at]
