"""Mixed batches as one program: front, decision, and the rest with every image at its own widths.

There are no groups, so nothing is sorted, gathered or padded, and the host waits for nothing; only where a
gate may take what a plan does not hold, it looks. Images are read where they lie. What is behind all routes
of a detector runs in the same program, for all images at once.
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
from dsnet.runtime.executors.buffers import GatePlaces
from dsnet.runtime.executors.chunks import GraphExecutor
from dsnet.runtime.executors.penalties import set_penalties
from dsnet.runtime.executors.ragged.assignment import RouteAssignment
from dsnet.runtime.executors.ragged.layers import Gated, State
from dsnet.runtime.executors.ragged.network import Ragged
from dsnet.runtime.executors.segment_calls import SegmentCalls

__all__ = ["Mixed"]

Program = Callable[[], None]


class Mixed(GraphExecutor):
    """A network with one gate. Threads take turns."""

    def __init__(
        self,
        front: Ragged,
        rest: Ragged,
        options: Sequence[int],  # the choices that ``rest`` has, in its order
        *,
        image: Tensor,  # [1, C, H, W], like those that will come
        space: RouteSpace,
        choices: Sequence[int],  # that the gate decides between
        end: Executable | None = None,  # behind ``rest``: what it gives, and the place of the choice
        sizes: Sequence[int],
        streams: StreamPool,
        progress: Progress = silent,
    ) -> None:
        self.front, self.space, self.streams, self.lock = front, space, streams, threading.Lock()
        self.rest, self.end = rest, end
        self.sizes = tuple(sorted(set(sizes)))
        self.max_batch, device = self.sizes[-1], image.device
        held = sorted({*options, *choices})
        self.held = [held]
        places = {choice: place for place, choice in enumerate(options)}
        self.options = frozenset(options)
        self.route_of = torch.tensor(
            [places.get(choice, -1) for choice in held], dtype=torch.int32, device=device
        )
        places_held = [held.index(choice) if choice in held else 0 for choice in range(held[-1] + 1)]
        self.place_of = torch.tensor(places_held, device=device)  # by choice
        self.whole = all(choice in places for choice in choices)  # else decisions are looked at
        self.reach = max((places[choice] + 1 for choice in choices if choice in places), default=None)
        self.number = torch.tensor([space.of_choices((choice,)).number for choice in held], device=device)
        self.dtype, self.image_size = image.dtype, (image.shape[2], image.shape[3])
        self.begin = torch.zeros(1, dtype=torch.long, device=device)  # the address of images
        self.address = 0  # what ``begin`` holds
        self.given: tuple[Tensor, int] | None = None  # choices that are taken now, and how often changed
        self.unheard = torch.zeros(self.max_batch, dtype=torch.long, device=device)  # decisions not used
        with torch.no_grad():
            features, scores = front(image)
            (logits,) = rest.at(0)(features)
        taken = torch.zeros(self.max_batch, dtype=torch.long, device=device)
        self.gates = [GatePlaces(choices, held, 1, taken, scores, streams.host_buffer(len(held)))]
        self.logits = self.answers = logits.new_zeros(self.max_batch, logits.shape[1])
        if end is None:
            _, channels, *self.map_size = features.shape
            self.features = features.new_zeros(self.max_batch, features[0, 0].numel(), channels)
            self.scales = torch.ones(self.max_batch, channels, device=device)
        else:
            with torch.no_grad():
                (answers,) = end(logits, torch.zeros(1, dtype=torch.int32, device=device))
            self.answers = answers.new_zeros(self.max_batch, answers.shape[1])
        self.valid = torch.zeros(1, dtype=torch.long, device=device)
        self.images = 0  # what ``valid`` holds
        self.asked = torch.zeros(self.max_batch, dtype=torch.bool, device=device)  # by a cascade's last route
        self.threshold = torch.zeros(1, dtype=torch.float64, device=device)
        self.following = torch.zeros(1, dtype=torch.long, device=device)  # a cascade's next route, by place
        self.prices: CostPenalties | None = None
        self.programs: dict[tuple[str, int], Program] = {}
        steps: dict[str, Callable[[int], None]] = {
            "gated": self._gated,
            "own": functools.partial(self._given, self.reach),
            "any": functools.partial(self._given, None),
        }
        if end is None:
            steps |= {"first": self._first, "next": self._next}
        if self.reach == rest.count:
            del steps["own"]
        jobs = [(name, size) for size in self.sizes for name in steps]
        with streams.on_device():
            for name, size in progress(jobs, len(jobs), "program"):
                self.programs[name, size] = streams.capture(functools.partial(steps[name], size), 0)

    # --- what programs do ----------------------------------------------------------------------------
    def _gate(self, images: int) -> Gated:
        state = State(self.begin, (self.image_size,))
        found = self.front.run(state, RouteAssignment.single_padded(images, self.valid))
        assert isinstance(found, Gated)
        return found

    def _finish(
        self,
        state: State,
        reach: int | None = None,
        asked: Tensor | None = None,
        noted: Sequence[State] = (),
    ) -> None:
        """What was taken, for all images or those that are asked for; some of the first routes alone."""
        images = len(state.x)
        assignment = RouteAssignment.of_choices(
            self.gates[0].taken[:images], self.valid, self.route_of, self.rest.count, asked, reach
        )
        self.rest.run(state, assignment, self.logits[:images], noted)
        if self.end is not None:  # images left out as any others: nobody reads their answers
            (answers,) = self.end(self.logits[:images], assignment.routes.clamp(min=0))
            self.answers[:images].copy_(answers)

    def _gated(self, images: int) -> None:
        found, gate = self._gate(images), self.gates[0]
        choose(found.scores, gate.prices, gate.places, gate.taken[:images])
        self._finish(found.state, self.reach, noted=found.noted)

    def _given(self, reach: int | None, images: int) -> None:
        """Run the gate, without effect, and finish at the choices that were assigned."""
        found = self._decide(images)
        self._finish(found.state, reach, noted=found.noted)

    def _prefix(self, images: int) -> None:
        self._decide(images)

    def _decide(self, images: int) -> Gated:
        """Run prefix and gate; the decision has no effect."""
        found, gate = self._gate(images), self.gates[0]
        choose(found.scores, gate.prices, gate.places, self.unheard[:images])
        return found

    def _first(self, images: int) -> None:
        """Of a cascade: its further routes find the features."""
        state = self._gate(images).state
        self.features[:images].copy_(state.x)
        if state.scale is not None:
            self.scales[:images].copy_(state.scale)
        self.asked.fill_(True)
        self._finish(state)

    def _next(self, images: int) -> None:
        """Those whose answer is not sure, of those that the last route was asked about."""
        asked, taken = self.asked[:images], self.gates[0].taken[:images]
        asked.logical_and_(unsure(margin(self.logits[:images]), self.threshold))
        taken.copy_(torch.where(asked, self.following, taken))
        height, width = self.map_size
        state = State(self.features[:images], ((height, width),), self.scales[:images])
        self._finish(state, asked=asked)

    # --- running it ----------------------------------------------------------------------------------
    def run_gate(self, x: Tensor, penalties: CostPenalties | None = None) -> RoutedOutput:
        """Run images [B, C, H, W] at the routes that the gate decides for, scores less ``penalties``."""

        def some(at: slice | None) -> RoutedOutput:
            read = self._readable(x, at)
            images, size = self._point_at(read)
            set_penalties(self.gates, self.prices, penalties)
            self.prices, self.given = penalties, None
            self.programs["gated", size]()
            if not self.whole:
                self._check(images)
            return self._found(images)

        return self.in_chunks(x, some)

    def run_assigned(self, x: Tensor, choices: Tensor, *, within_gates: bool = False) -> RoutedOutput:
        """Run each image at its own choice [B, 1].

        ``within_gates`` promises choices of the gate: programs are then as small as when it decides.
        """
        name = "own" if within_gates and ("own", self.sizes[0]) in self.programs else "any"

        def some(at: slice | None) -> RoutedOutput:
            read = self._readable(x, at)
            images, size = self._point_at(read)
            self._take(choices, at)
            self.programs[name, size]()
            if not self.whole:
                self._check(images)
            return self._found(images)

        return self.in_chunks(x, some)

    def run_route(self, x: Tensor, route: Route) -> Tensor:
        """All images at one route."""
        place = self._place(route)

        def some(at: slice | None) -> RoutedOutput:
            own = self._readable(x, at)
            images, size = self._point_at(own)
            self._take_place(place)
            self.programs["any", size]()
            return self._found(images)

        return self.in_chunks(x, some).logits

    def run_cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        """One route after the other for those whose answer is not sure; not for detectors."""
        if self.end is not None:
            raise DsnetError("a cascade asks how sure a class is: a detector is routed by its gate")
        places = [self._place(self.space.resolve(number)) for number in routes]

        def some(at: slice | None) -> RoutedOutput:
            own = self._readable(x, at)
            images, size = self._point_at(own)
            self._take_place(places[0])
            self.programs["first", size]()
            for place, threshold in zip(places[1:], thresholds, strict=True):
                self.following.fill_(place)
                self.threshold.fill_(threshold)
                self.programs["next", size]()
            return self._found(images)

        return self.in_chunks(x, some)

    def segment_calls(self, x: Tensor) -> SegmentCalls:
        """Return functions that run all images of ``x`` up to the gate, or at one route; for profiles."""
        calls: dict[tuple[int, ...], Callable[[], object]] = {(): functools.partial(self._run_prefix, x)}
        for choice in self.space.choices[0]:
            calls[choice,] = functools.partial(self.run_route, x, self.space.of_choices((choice,)))
        return SegmentCalls(calls, cumulative=True)

    def _run_prefix(self, x: Tensor) -> RoutedOutput:
        def some(at: slice | None) -> RoutedOutput:
            read = self._readable(x, at)
            images, size = self._point_at(read)
            if ("prefix", size) not in self.programs:
                self.programs["prefix", size] = self.streams.capture(functools.partial(self._prefix, size), 0)
            self.programs["prefix", size]()
            return self._found(images)

        return self.in_chunks(x, some)

    def _place(self, route: Route) -> int:
        (choice,) = route.choices
        if choice not in self.options:
            raise DsnetError(f"this plan does not hold the choices {list(route.choices)}")
        return self.held[0].index(choice)

    def _check(self, images: int) -> None:
        """What the gate took may not be there: then nothing was run."""
        missing = self.route_of[self.gates[0].taken[:images]] < 0
        if bool(missing.any()):
            choice = self.held[0][int(self.gates[0].taken[:images][missing][0])]
            raise DsnetError(f"this plan does not hold the choices [{choice}]")

    def _take(self, given: Tensor, at: slice | None) -> None:
        """Choices of images, unless they are what is taken already."""
        keeps = at is None and not given.is_inference()  # such a tensor does not tell whether it was changed
        if keeps and self.given is not None and self.given[0] is given and self.given[1] == given._version:
            return
        self.given, own = None, given if at is None else given[at]
        torch.take(self.place_of, own.reshape(-1), out=self.gates[0].taken[: len(own)])
        self.given = (given, given._version) if keeps else None

    def _take_place(self, place: int) -> None:
        """The same for all images."""
        self.given = None
        self.gates[0].taken.fill_(place)

    def _readable(self, x: Tensor, at: slice | None) -> Tensor:
        """Images as programs read them; held until they are started, since they are read where they lie."""
        return (x if at is None else x[at]).to(self.begin.device, self.dtype).contiguous()

    def _point_at(self, x: Tensor) -> tuple[int, int]:
        """Tells programs where images are: how many, and the size of programs that hold them all."""
        images = len(x)
        size = next(size for size in self.sizes if size >= images)
        self.streams.acquire()
        address = x.data_ptr()
        if address != self.address:
            self.begin.fill_(address)
            self.address = address
        if images != self.images:
            self.valid.fill_(images)
            self.images = images
        return images, size

    def _found(self, images: int) -> RoutedOutput:
        found = RoutedOutput(self.answers[:images].clone(), self.number[self.gates[0].taken[:images]])
        self.streams.release()
        return found
