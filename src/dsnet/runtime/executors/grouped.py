"""The grouped executor: a mixed batch on a GPU as captured programs, grouped by route at every gate.

Programs read and write fixed memory: the images, a table of features for every gate with a row per image, the
scores and decisions of the gates, and the logits. Deciding at a gate sorts the images by choice and sends the
number of images of each choice to the host, which waits for that alone. The host then launches one program
per segment that has images, on several streams. A program gathers its images by the sorted order and scatters
its outputs to their rows; padding goes to a row that is never read.

Behind the second gate and later ones, one segment may be shared by all choices before it (see
`find_shared_segments`): features are then as wide as the widest of them, padded with zeros, and images are
sorted by the gate's own choice into few large groups. Otherwise there is a segment and a table for every
choice before, and images are sorted by both.
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
from dsnet.runtime.executors._batching import BatchSplitter
from dsnet.runtime.executors.buffers import FeatureTable, GateBuffers
from dsnet.runtime.executors.graph_executor import GraphExecutor
from dsnet.runtime.executors.segment_calls import SegmentCalls, segment_paths
from dsnet.runtime.partition.segment_index import SegmentIndex
from dsnet.runtime.partition.segments import SegmentKey, segment_key

__all__ = ["MAX_SIDE_STREAMS", "GroupedExecutor"]

MAX_SIDE_STREAMS = 8  # besides the caller's own
ROUNDS = 5  # of timing a program

Program = Callable[[], None]


class GroupedExecutor(GraphExecutor):
    """Runs mixed batches group by group through captured programs. Threads take turns.

    Args:
        segments: Executables of the prefix, ``()``, and of the segments, each for any batch size.
        image: An image [1, C, H, W] like those that will come.
        space: All routes.
        scored: Choices that every gate scores.
        keyed: Segments whose second input is the history of each image, as one number.
        head: What runs behind all segments, on their outputs and the index of the last choice.
        sizes: Batch sizes to capture programs for.
        streams: Streams to run on.
        progress: Progress callback.
    """

    def __init__(
        self,
        segments: Mapping[SegmentKey, Executable],
        *,
        image: Tensor,
        space: RouteSpace,
        scored: Sequence[Sequence[int]],
        keyed: Collection[SegmentKey] = (),
        head: Executable | None = None,
        sizes: Sequence[int],
        streams: StreamPool,
        progress: Progress = silent,
    ) -> None:
        self.segments, self.space, self.streams, self.lock = segments, space, streams, threading.Lock()
        self.keyed, self.head = keyed, head
        self.sizes = tuple(sorted(set(sizes)))
        self.device, self.max_batch = image.device, self.sizes[-1]
        self.index = SegmentIndex(segments, scored)
        self.choices = self.index.choices
        self._allocate(scored, image)
        self._last_assigned: tuple[Tensor, int, list[Tensor]] | None = None
        self.programs: dict[tuple[str | SegmentKey, int, int], Program] = {}  # by step, gate and size
        with streams.on_device():
            times = self._capture(progress)
        self.splitters = {key: BatchSplitter(times[key]) for key in segments}
        self.concurrency = dict.fromkeys(self.sizes, 1)  # segments that run at the same time, by batch size
        with streams.on_device(), torch.no_grad():
            for size in progress(self.sizes, len(self.sizes), "mixed batch"):
                self.concurrency[size] = self._best_concurrency(size)

    # --- set-up --------------------------------------------------------------------------------------
    @torch.no_grad()
    def _allocate(self, scored: Sequence[Sequence[int]], image: Tensor) -> None:
        _, channels, height, width = image.shape
        self.images = image.new_zeros(self.max_batch, height, width, channels).permute(0, 3, 1, 2)
        self.rows = torch.arange(self.max_batch, device=self.device)
        self.valid = torch.zeros(1, dtype=torch.long, device=self.device)  # images without padding
        self.threshold = torch.zeros(1, dtype=torch.float64, device=self.device)
        self.pending = torch.zeros(self.max_batch, dtype=torch.bool, device=self.device)  # in a cascade
        self.chosen = torch.zeros(len(scored), self.max_batch, dtype=torch.long, device=self.device)
        self.routes = torch.zeros(self.max_batch, dtype=torch.long, device=self.device)
        numbers = [self.space.of_choices(choices).number for choices in itertools.product(*self.choices)]
        self.route_numbers = torch.tensor(numbers, device=self.device)
        counts = [len(choices) for choices in self.choices]
        strides = [math.prod(counts[gate + 1 :]) for gate in range(len(counts))]
        self.route_strides = torch.tensor(strides, device=self.device)[:, None]
        self.gates: list[GateBuffers] = []
        self.tables: list[dict[int, FeatureTable]] = []  # by gate, then by the choice before it
        logits = self._allocate_gates(scored, self.segments[()](image.expand(2, *image.shape[1:])))
        self.logits = logits.new_zeros(self.max_batch + 1, logits.shape[1])
        compiled = self.index.compiled[-1]
        head_index = [compiled.index(choice) if choice in compiled else 0 for choice in self.choices[-1]]
        self.head_index = torch.tensor(head_index, device=self.device)
        self.outputs = self.logits[: self.max_batch]
        if self.head is not None:
            (rows,) = self.head(logits, torch.zeros(len(logits), dtype=torch.long, device=self.device))
            self.outputs = rows.new_zeros(self.max_batch, rows.shape[1])

    def _allocate_gates(self, scored: Sequence[Sequence[int]], prefix: tuple[Tensor, ...]) -> Tensor:
        """Run images along all choices to see the shapes at every gate; return logits."""
        at_gate = {0: prefix}  # features and scores, by the choice before
        for gate, own in enumerate(scored):
            shared = self.index.is_shared(gate)
            num_previous = len(self.choices[gate - 1]) if gate else 1
            host_counts = self.streams.host_buffer(len(self.index.keys(gate)))
            scores = next(iter(at_gate.values()))[1]
            self.gates.append(
                GateBuffers(own, self.choices[gate], num_previous, self.chosen[gate], scores, host_counts)
            )
            widths = {features.shape[1] for features, _ in at_gate.values()}
            own_widths = widths if gate > 0 and shared and self._reads_rows(gate) else ()
            tables = {
                choice: FeatureTable.allocate(at_gate[choice][0], self.max_batch, own_widths)
                for choice in self.index.previous[gate]
            }
            if shared:
                tables = dict.fromkeys(at_gate, next(iter(tables.values())))
            self.tables.append(tables)
            following: dict[int, tuple[Tensor, ...]] = {}
            for previous, choice in itertools.product(at_gate, self.choices[gate]):
                key = segment_key(gate, previous, choice)
                if key in self.segments and choice not in following:
                    features = at_gate[previous][0]
                    history = (torch.zeros(len(features), dtype=torch.long, device=self.device),)
                    following[choice] = self.segments[key](features, *history * (key in self.keyed))
            at_gate = following
        return next(iter(at_gate.values()))[0]

    def _capture(self, progress: Progress) -> dict[SegmentKey, dict[int, float]]:
        """Capture all programs; return the milliseconds of prefix and segments, by batch size."""
        times: dict[SegmentKey, dict[int, float]] = {key: {} for key in self.segments}
        jobs = [(key, size) for key in self.segments for size in self.sizes]
        for key, size in progress(jobs, len(jobs), "program"):
            body = self._segment_step(key, size) if key else functools.partial(self._prefix_step, size)
            name = (key, len(key) - 1, size) if key else ("prefix", 0, size)
            program = self.programs[name] = self.streams.capture(body, self._stream_of(key))
            times[key][size] = statistics.median(timed(program, self.device) for _ in range(ROUNDS))
        for size, (number, gate) in itertools.product(self.sizes, enumerate(self.gates)):
            steps: dict[str, Program] = {
                "decide": functools.partial(self._decide_step, number, size),
                "sort assigned": functools.partial(self._decide_step, number, size, decide=False),
                "select all": functools.partial(gate.select_all, self.rows[:size], self.valid),
            }
            if number == 0:
                steps["prefix, decide"] = functools.partial(self._prefix_and_decide_step, size)
                steps["routes"] = functools.partial(self._routes_step, size)
                if self.head is None:
                    steps["select unsure"] = functools.partial(self._select_unsure_step, size)
                else:
                    steps["head"] = functools.partial(self._head_step, size)
            for step, body in steps.items():
                self.programs[step, number, size] = self.streams.capture(body, 0)
        return times

    def _best_concurrency(self, size: int) -> int:
        """Time how many segments to run at the same time, with images that take all choices equally.

        More is not always faster: kernels may fill the device alone, or share its cache.
        """
        generator, columns = torch.Generator().manual_seed(0), []
        for gate, choices in enumerate(self.index.compiled):
            order = torch.randperm(size, generator=generator) if gate else torch.arange(size)
            columns.append(torch.tensor(choices)[order * len(choices) // size])
        assigned = torch.stack(columns, 1).to(self.device)
        limit = min(MAX_SIDE_STREAMS, max(map(len, self.index.compiled)))
        times: dict[int, list[float]] = {count: [] for count in (1, 2, 3, 4, 6, 8) if count <= limit}
        for round_number in range(1 + ROUNDS):
            for count, samples in times.items():
                self.concurrency[size] = count
                run = functools.partial(self._run, self.images[:size], None, assigned)
                milliseconds = timed(run, self.device)
                if round_number:
                    samples.append(milliseconds)
        return min(times, key=lambda count: statistics.median(times[count]))

    def _stream_of(self, key: SegmentKey) -> int:
        """Return the stream whose memory a program uses: one for all segments of a choice of a gate."""
        return 1 + self.choices[len(key) - 1].index(key[-1]) % MAX_SIDE_STREAMS if key else 0

    # --- the steps that are captured -----------------------------------------------------------------
    def _prefix_step(self, images: int) -> None:
        features, scores, *scale = self.segments[()].unscaled(self.images[:images])
        self.tables[0][0].scatter(self.rows[:images], features, *scale)
        self.gates[0].scores[:images].copy_(scores)

    def _prefix_and_decide_step(self, images: int) -> None:
        self._prefix_step(images)
        self._decide_step(0, images)

    def _decide_step(self, gate: int, images: int, *, decide: bool = True) -> None:
        previous = self.gates[gate - 1].chosen if gate else None
        paired = gate > 0 and not self.index.is_shared(gate)
        self.gates[gate].sort_images(images, self.valid, previous, paired=paired, decide=decide)

    def _head_step(self, images: int) -> None:
        assert self.head is not None
        index = self.head_index[self.gates[-1].chosen[:images]]
        self.outputs[:images].copy_(self.head(self.logits[:images], index)[0])

    def _routes_step(self, images: int) -> None:
        self.routes[:images].copy_(self.route_numbers[(self.chosen[:, :images] * self.route_strides).sum(0)])

    def _select_unsure_step(self, images: int) -> None:
        """Select the pending images of a cascade whose margin is below the threshold."""
        pending = self.pending[:images]
        pending.logical_and_(unsure(margin(self.logits[:images]), self.threshold))
        for gate in self.gates:
            gate.select(pending)

    def _segment_step(self, key: SegmentKey, size: int) -> Program:
        number = len(key) - 1
        gate, is_last = self.gates[number], number + 1 == len(self.gates)
        previous, choice = key[-2] if number else 0, key[-1]
        pair, rows, segment = self.index.pair(key), self.rows[:size], self.segments[key]
        compiled = self.index.compiled
        index, count = compiled[number].index(choice), len(compiled[number])
        shared, reads_rows = self.index.is_shared(number), self._reads_rows(number)

        def step() -> None:
            sorted_images = (gate.order, gate.counts, gate.starts, gate.history)
            source, target, history = gather_indices(*sorted_images, pair, rows, self.max_batch)
            table = self.tables[number][previous]
            x = cast(Tensor, table.view(source)) if reads_rows else table.gather(source)
            keys = history if shared else history // len(compiled[number - 1])  # without the last choice
            inputs = (x, keys) if key in self.keyed else (x,)
            if is_last:
                self.logits.index_copy_(0, target, segment(*inputs)[0])
                return
            features, scores, *scale = segment.unscaled(*inputs)
            self.tables[number + 1][choice].scatter(target, features, *scale)
            following = self.gates[number + 1]
            scatter_scores(target, scores, following.scores, history, following.history, count, index)

        return step

    def _reads_rows(self, gate: int) -> bool:
        """Return whether segments behind a gate read features where they lie in a table."""
        behind = [segment for key, segment in self.segments.items() if len(key) == gate + 1]
        return all(segment.reads_rows for segment in behind)

    # --- running -------------------------------------------------------------------------------------
    def run_gate(self, x: Tensor, penalties: CostPenalties | None = None) -> RoutedOutput:
        """Run images [B, C, H, W] at the routes that the gates decide for, scores less ``penalties``."""
        return self.in_chunks(x, lambda rows: self._run(_chunk(x, rows), penalties, None))

    def run_assigned(self, x: Tensor, choices: Tensor, *, within_gates: bool = False) -> RoutedOutput:
        """Run each image at its own ``choices`` [B, gates]; ``within_gates`` makes no difference here."""
        return self.in_chunks(x, lambda rows: self._run(_chunk(x, rows), None, _chunk(choices, rows)))

    def run_route(self, x: Tensor, route: Route) -> Tensor:
        """Run all images at one route; the host does not wait."""
        return self.in_chunks(x, lambda rows: self._run_route(_chunk(x, rows), route)).logits

    def run_cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        """Run ``routes`` in turn for images whose margin is below the threshold; not for detectors."""
        if self.head is not None:
            raise DsnetError("a cascade needs the confidence in a class: a detector is routed by its gate")
        return self.in_chunks(x, lambda rows: self._run_cascade(_chunk(x, rows), routes, thresholds))

    def segment_calls(self, x: Tensor) -> SegmentCalls:
        """Return functions that run all images of ``x`` along a path of choices; for profiles."""

        def run(path: SegmentKey) -> RoutedOutput:
            return self.in_chunks(x, lambda rows: self._run_path(_chunk(x, rows), path))

        choices = [len(options) for options in self.space.choices]
        paths = [path for gate in range(len(choices)) for path in segment_paths(choices, gate)]
        return SegmentCalls({path: functools.partial(run, path) for path in ((), *paths)}, cumulative=True)

    def _run(self, x: Tensor, penalties: CostPenalties | None, assigned: Tensor | None) -> RoutedOutput:
        images, size = self._load(x)
        self.set_penalties(penalties)
        if assigned is not None:
            self.programs["prefix", 0, size]()
        for number, gate in enumerate(self.gates):
            if assigned is not None:
                gate.chosen[:images].copy_(self._index_of_assigned(assigned)[number])
                self.programs["sort assigned", number, size]()
            else:
                self.programs["decide" if number else "prefix, decide", number, size]()
            self.streams.synchronize()
            self._launch_segments(number, gate.host_counts.tolist(), size)
        self.programs["routes", 0, size]()
        return self._finish(images, self.routes[:images].clone())

    def _index_of_assigned(self, assigned: Tensor) -> list[Tensor]:
        """Return the index of assigned choices [B, gates], gate by gate; the last result is cached."""
        version = -1 if assigned.is_inference() else assigned._version  # -1: changes are not counted
        last = self._last_assigned
        if last is None or last[0] is not assigned or last[1] != version or version < 0:
            index = [gate.index_of(assigned[:, number]) for number, gate in enumerate(self.gates)]
            last = self._last_assigned = assigned, version, index
        return last[2]

    def _run_route(self, x: Tensor, route: Route) -> RoutedOutput:
        images, size = self._load(x)
        self._launch_path(route.choices, images, size)
        self.gates[-1].chosen.fill_(self.choices[-1].index(route.choices[-1]))
        return self._finish(images, torch.full((images,), route.number, device=self.device))

    def _run_path(self, x: Tensor, path: SegmentKey) -> RoutedOutput:
        images, size = self._load(x)
        self._launch_path(path, images, size)
        return self._finish(images, self.routes[:images])

    def _run_cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        images, size = self._load(x)
        gate = self.gates[0]
        numbers = torch.full((images,), routes[0], dtype=torch.long, device=self.device)
        self._launch_path(self.space.resolve(routes[0]).choices, images, size)
        self.pending.copy_(self.rows < self.valid)
        for number, threshold in zip(routes[1:], thresholds, strict=True):
            self.threshold.fill_(threshold)
            self.programs["select unsure", 0, size]()
            self.streams.synchronize()
            count = int(gate.host_counts[0])
            if not count:
                break
            for key in self.index.path(self.space.resolve(number).choices):
                self._launch(key, count)
            numbers[gate.order[:count]] = number
        return self._finish(images, numbers)

    def _launch_path(self, path: SegmentKey, images: int, size: int) -> None:
        """Run the prefix, and all images along a path of choices."""
        self.programs["prefix", 0, size]()
        for number, key in enumerate(self.index.path(path)):
            self.programs["select all", number, size]()
            self._launch(key, images)

    def _load(self, x: Tensor) -> tuple[int, int]:
        """Copy images to fixed memory; return their number and the size of the programs to run."""
        images = len(x)
        self.streams.acquire()
        self.images[:images].copy_(x)
        self.valid.fill_(images)
        return images, self._size(images)

    def _size(self, images: int) -> int:
        return next(size for size in self.sizes if size >= images)

    def _finish(self, images: int, routes: Tensor) -> RoutedOutput:
        if self.head is not None:
            self.programs["head", 0, self._size(images)]()
        output = RoutedOutput(self.outputs[:images].clone(), routes)
        self.streams.release()
        return output

    def _launch_segments(self, gate: int, counts: Sequence[int], size: int) -> None:
        """Launch the segments that images take, the longest first, each on the stream that is free first.

        Segments that share memory run on the same stream, one after the other.
        """
        jobs = []
        for key, count in zip(self.index.keys(gate), counts, strict=True):
            if count:
                jobs.append((self.splitter(key).time(count), key, count))
        concurrency = self.concurrency[size]
        busy = dict.fromkeys(range(1, 1 + concurrency) if concurrency > 1 else (0,), 0.0)
        assigned: dict[int, int] = {}  # streams, by memory
        for milliseconds, key, count in sorted(jobs, reverse=True):
            stream = assigned.setdefault(self._stream_of(key), min(busy, key=busy.__getitem__))
            busy[stream] += milliseconds
            with self.streams.use(stream):
                self._launch(key, count)
        self.streams.join(stream for stream, milliseconds in busy.items() if milliseconds)

    def splitter(self, key: SegmentKey) -> BatchSplitter:
        """Return how the images of a segment are split into batches; raise an error if there is none."""
        splitter = self.splitters.get(key)
        if splitter is None:
            raise DsnetError(f"this plan does not hold the choices {list(key)}")
        return splitter

    def _launch(self, key: SegmentKey, count: int) -> None:
        """Run a number of images through a segment, on the current stream."""
        number, sizes = len(key) - 1, self.splitter(key)(count)
        gate, pair = self.gates[number], self.index.pair(key)
        for i, size in enumerate(sizes):
            if i:
                gate.starts[pair : pair + 1].add_(sizes[i - 1])
                gate.counts[pair : pair + 1].sub_(sizes[i - 1])
            self.programs[key, number, size]()


def _chunk(x: Tensor, rows: slice | None) -> Tensor:
    return x if rows is None else x[rows]
