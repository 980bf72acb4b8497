"""The ragged executor: a mixed batch as one program, in which every image has the widths of its own route.

There are no groups: nothing is sorted, gathered or padded, and the host does not wait, unless the gate may
choose a route that the plan does not hold. Images are read where they lie. The head that all routes of a
detector share runs in the same program, for all images at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsnet.core.cuda_graphs import StreamPool
from dsnet.core.timer import Progress, silent
from dsnet.errors import DsnetError
from dsnet.kernels.dispatch import choose
from dsnet.routes import Route, RouteSpace
from dsnet.routing.cost_table import CostPenalties
from dsnet.routing.policies import RoutedOutput, margin, unsure
from dsnet.runtime.backends.base import Executable
from dsnet.runtime.executors.buffers import GateBuffers
from dsnet.runtime.executors.graph_executor import GraphExecutor
from dsnet.runtime.executors.ragged._assignment import RouteAssignment
from dsnet.runtime.executors.ragged._layers import Gated, State
from dsnet.runtime.executors.ragged.network import Ragged
from dsnet.runtime.executors.segment_calls import SegmentCalls

__all__ = ["RaggedExecutor"]

Program = Callable[[], None]


class RaggedExecutor(GraphExecutor):
    """Runs mixed batches of a network with one gate. Threads take turns.

    Args:
        prefix: The prefix and the gate.
        rest: The segments of all compiled choices as one.
        compiled: These choices, in the order of ``rest``.
        image: An image [1, C, H, W] like those that will come.
        space: All routes.
        scored: Choices that the gate scores.
        head: What runs behind ``rest``, on its outputs and the index of the choice.
        sizes: Batch sizes to capture programs for.
        streams: Streams to run on.
        progress: Progress callback.
    """

    def __init__(
        self,
        prefix: Ragged,
        rest: Ragged,
        compiled: Sequence[int],
        *,
        image: Tensor,
        space: RouteSpace,
        scored: Sequence[int],
        head: Executable | None = None,
        sizes: Sequence[int],
        streams: StreamPool,
        progress: Progress = silent,
    ) -> None:
        self.prefix, self.space, self.streams, self.lock = prefix, space, streams, threading.Lock()
        self.rest, self.head = rest, head
        self.sizes = tuple(sorted(set(sizes)))
        self.max_batch = self.sizes[-1]
        self.compiled = {choice: index for index, choice in enumerate(compiled)}
        self.choices = sorted({*compiled, *scored})
        self.gate_is_covered = all(choice in self.compiled for choice in scored)
        # The gate chooses among the first of the compiled routes alone: kernels have fewer routes to look at.
        self.gate_limit = max((self.compiled[c] + 1 for c in scored if c in self.compiled), default=None)
        self._allocate(image, scored)
        steps: dict[str, Callable[[int], None]] = {
            "gate": self._gate_step,
            "assigned within gate": functools.partial(self._assigned_step, self.gate_limit),
            "assigned": functools.partial(self._assigned_step, None),
        }
        if head is None:
            steps |= {"cascade first": self._cascade_first_step, "cascade next": self._cascade_next_step}
        if self.gate_limit == rest.count:
            del steps["assigned within gate"]
        self.programs: dict[tuple[str, int], Program] = {}
        jobs = [(name, size) for size in self.sizes for name in steps]
        with streams.on_device():
            for name, size in progress(jobs, len(jobs), "program"):
                self.programs[name, size] = streams.capture(functools.partial(steps[name], size), 0)

    def _allocate(self, image: Tensor, scored: Sequence[int]) -> None:
        device, choices = image.device, self.choices
        self.dtype, self.image_size = image.dtype, (image.shape[2], image.shape[3])
        routes = [self.compiled.get(choice, -1) for choice in choices]
        self.route_of = torch.tensor(routes, dtype=torch.int32, device=device)  # by index of the choice
        index_of = [choices.index(choice) if choice in choices else 0 for choice in range(choices[-1] + 1)]
        self.index_of = torch.tensor(index_of, device=device)  # by choice
        numbers = [self.space.of_choices((choice,)).number for choice in choices]
        self.route_numbers = torch.tensor(numbers, device=device)
        self.image_address = torch.zeros(1, dtype=torch.long, device=device)  # where programs read images
        self.valid = torch.zeros(1, dtype=torch.long, device=device)  # images without padding
        self._address = self._images = 0  # the values of these two
        self._last_assigned: tuple[Tensor, int] | None = None  # and its version, as now in `chosen`
        self.unused_decisions = torch.zeros(self.max_batch, dtype=torch.long, device=device)
        with torch.no_grad():
            features, scores = self.prefix(image)
            (logits,) = self.rest.at(0)(features)
        self.chosen = torch.zeros(self.max_batch, dtype=torch.long, device=device)
        host_counts = self.streams.host_buffer(len(choices))
        self.gates = [GateBuffers(scored, choices, 1, self.chosen, scores, host_counts)]
        self.logits = self.outputs = logits.new_zeros(self.max_batch, logits.shape[1])
        self.pending = torch.zeros(self.max_batch, dtype=torch.bool, device=device)  # in a cascade
        self.threshold = torch.zeros(1, dtype=torch.float64, device=device)
        self.next_choice = torch.zeros(1, dtype=torch.long, device=device)  # its index
        if self.head is None:
            _, channels, *self.map_size = features.shape
            self.features = features.new_zeros(self.max_batch, features[0, 0].numel(), channels)
            self.scales = torch.ones(self.max_batch, channels, device=device)
        else:
            with torch.no_grad():
                (rows,) = self.head(logits, torch.zeros(1, dtype=torch.int32, device=device))
            self.outputs = rows.new_zeros(self.max_batch, rows.shape[1])

    # --- the steps that are captured -----------------------------------------------------------------
    def _run_prefix_and_scores(self, images: int) -> Gated:
        state = State(self.image_address, (self.image_size,))
        output = self.prefix.run(state, RouteAssignment.single_padded(images, self.valid))
        assert isinstance(output, Gated)
        return output

    def _run_rest(
        self,
        state: State,
        route_limit: int | None = None,
        active: Tensor | None = None,
        saved: Sequence[State] = (),
    ) -> None:
        """Run each image, or those of a mask, at its chosen route; only routes below the limit occur."""
        images = len(state.x)
        assignment = RouteAssignment.of_choices(
            self.chosen[:images], self.valid, self.route_of, self.rest.count, active, route_limit
        )
        self.rest.run(state, assignment, self.logits[:images], saved)
        if self.head is not None:  # also for padding, whose output is not read
            (rows,) = self.head(self.logits[:images], assignment.routes.clamp(min=0))
            self.outputs[:images].copy_(rows)

    def _decide(self, images: int, decisions: Tensor) -> Gated:
        output, gate = self._run_prefix_and_scores(images), self.gates[0]
        choose(output.scores, gate.penalties, gate.choice_index, decisions[:images])
        return output

    def _prefix_step(self, images: int) -> None:
        self._decide(images, self.unused_decisions)

    def _gate_step(self, images: int) -> None:
        output = self._decide(images, self.chosen)
        self._run_rest(output.state, self.gate_limit, saved=output.saved)

    def _assigned_step(self, route_limit: int | None, images: int) -> None:
        output = self._decide(images, self.unused_decisions)
        self._run_rest(output.state, route_limit, saved=output.saved)

    def _cascade_first_step(self, images: int) -> None:
        """Run the first route of a cascade, and keep the features at the gate for its other routes."""
        state = self._run_prefix_and_scores(images).state
        self.features[:images].copy_(state.x)
        if state.scale is not None:
            self.scales[:images].copy_(state.scale)
        self.pending.fill_(True)
        self._run_rest(state)

    def _cascade_next_step(self, images: int) -> None:
        """Run the next route of a cascade for pending images whose margin is below the threshold."""
        pending, chosen = self.pending[:images], self.chosen[:images]
        pending.logical_and_(unsure(margin(self.logits[:images]), self.threshold))
        chosen.copy_(torch.where(pending, self.next_choice, chosen))
        height, width = self.map_size
        state = State(self.features[:images], ((height, width),), self.scales[:images])
        self._run_rest(state, active=pending)

    # --- running -------------------------------------------------------------------------------------
    def run_gate(self, x: Tensor, penalties: CostPenalties | None = None) -> RoutedOutput:
        """Run images [B, C, H, W] at the routes that the gate decides for, scores less ``penalties``."""

        def launch(size: int, rows: slice | None) -> None:
            self.set_penalties(penalties)
            self._last_assigned = None
            self.programs["gate", size]()

        return self._run(x, launch, check=not self.gate_is_covered)

    def run_assigned(self, x: Tensor, choices: Tensor, *, within_gates: bool = False) -> RoutedOutput:
        """Run each image at its own choice [B, 1].

        ``within_gates`` promises choices that the gate scores: kernels then have fewer routes to look at.
        """
        fewer = within_gates and ("assigned within gate", self.sizes[0]) in self.programs
        name = "assigned within gate" if fewer else "assigned"

        def launch(size: int, rows: slice | None) -> None:
            self._assign(choices, rows)
            self.programs[name, size]()

        return self._run(x, launch, check=not self.gate_is_covered)

    def run_route(self, x: Tensor, route: Route) -> Tensor:
        """Run all images at one route."""
        index = self._index(route)

        def launch(size: int, rows: slice | None) -> None:
            self._assign_all(index)
            self.programs["assigned", size]()

        return self._run(x, launch).logits

    def run_cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        """Run ``routes`` in turn for images whose margin is below the threshold; not for detectors."""
        if self.head is not None:
            raise DsnetError("a cascade needs the confidence in a class: a detector is routed by its gate")
        first, *others = (self._index(self.space.resolve(number)) for number in routes)

        def launch(size: int, rows: slice | None) -> None:
            self._assign_all(first)
            self.programs["cascade first", size]()
            for index, threshold in zip(others, thresholds, strict=True):
                self.next_choice.fill_(index)
                self.threshold.fill_(threshold)
                self.programs["cascade next", size]()

        return self._run(x, launch)

    def segment_calls(self, x: Tensor) -> SegmentCalls:
        """Return functions that run all images of ``x`` up to the gate, or at one route; for profiles."""

        def launch(size: int, rows: slice | None) -> None:
            if ("prefix", size) not in self.programs:
                body = functools.partial(self._prefix_step, size)
                self.programs["prefix", size] = self.streams.capture(body, 0)
            self.programs["prefix", size]()

        calls: dict[tuple[int, ...], Callable[[], object]] = {(): lambda: self._run(x, launch)}
        for choice in self.space.choices[0]:
            calls[choice,] = functools.partial(self.run_route, x, self.space.of_choices((choice,)))
        return SegmentCalls(calls, cumulative=True)

    def _run(
        self, x: Tensor, launch: Callable[[int, slice | None], None], *, check: bool = False
    ) -> RoutedOutput:
        """Run images chunk by chunk: ``launch`` gets the size of the programs and the rows of a chunk."""

        def run(rows: slice | None) -> RoutedOutput:
            chunk = x if rows is None else x[rows]
            chunk = chunk.to(self.image_address.device, self.dtype).contiguous()  # read where it lies
            images = len(chunk)
            self._point_to(chunk)
            launch(next(size for size in self.sizes if size >= images), rows)
            if check:
                self._check_choices(images)
            output = RoutedOutput(self.outputs[:images].clone(), self.route_numbers[self.chosen[:images]])
            self.streams.release()
            return output

        return self.in_chunks(x, run)

    def _index(self, route: Route) -> int:
        (choice,) = route.choices
        if choice not in self.compiled:
            raise DsnetError(f"this plan does not hold the choices {list(route.choices)}")
        return self.choices.index(choice)

    def _check_choices(self, images: int) -> None:
        """Raise an error if an image has a choice without a compiled route; such images did not run."""
        chosen = self.chosen[:images]
        missing = self.route_of[chosen] < 0
        if bool(missing.any()):
            choice = self.choices[int(chosen[missing][0])]
            raise DsnetError(f"this plan does not hold the choices [{choice}]")

    def _assign(self, choices: Tensor, rows: slice | None) -> None:
        """Write assigned choices to `chosen`, unless the same tensor, unchanged, was written last."""
        countable = rows is None and not choices.is_inference()  # inference tensors do not count changes
        last = self._last_assigned
        if countable and last is not None and last[0] is choices and last[1] == choices._version:
            return
        self._last_assigned, chunk = None, choices if rows is None else choices[rows]
        torch.take(self.index_of, chunk.reshape(-1), out=self.chosen[: len(chunk)])
        self._last_assigned = (choices, choices._version) if countable else None

    def _assign_all(self, index: int) -> None:
        self._last_assigned = None
        self.chosen.fill_(index)

    def _point_to(self, x: Tensor) -> None:
        """Tell programs where the images are and how many."""
        self.streams.acquire()
        if x.data_ptr() != self._address:
            self._address = x.data_ptr()
            self.image_address.fill_(self._address)
        if len(x) != self._images:
            self._images = len(x)
            self.valid.fill_(self._images)
