"""Compiled segments of a network, and the executor that runs them one after the other from the host."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from dsnet.core.process_bound import InProcess
from dsnet.errors import DsnetError
from dsnet.models.group_by_route import greedy, run_assigned, run_from_states
from dsnet.models.input_spec import InputSpec
from dsnet.models.supernet import ModelSpec
from dsnet.routes import Route, RouteSpace
from dsnet.routing.cost_table import CostPenalties
from dsnet.routing.policies import (
    RoutedOutput,
    margin,
    penalised_decision,
    routed_output,
    run_cascade,
    run_gated_routes,
    unsure,
)
from dsnet.runtime.backends.base import Executable, WritingExecutable
from dsnet.runtime.executors._batching import BatchSplitter
from dsnet.runtime.executors.base import Executor, GateChoices
from dsnet.runtime.executors.segment_calls import SegmentCalls, calls_of_network
from dsnet.runtime.partition.segments import SegmentKey, canonical_key
from dsnet.slicing import Mode

__all__ = ["CompiledNetwork", "HostExecutor", "Memory", "BucketedProgram", "GateState"]

Memory = Literal["packed", "shared"]


class GateState(NamedTuple):
    """Images at a gate: their scaled features and scores."""

    x: Tensor
    scores: Tensor
    gate: int
    history: Tensor | None = None  # [B]: choices before the last one as one number, where norms need them

    def take(self, at: Tensor) -> GateState:
        """Return some of the images, by their positions [n]."""
        history = None if self.history is None else _rows(self.history, at)
        return GateState(_rows(self.x, at), _rows(self.scores, at), self.gate, history)

    def narrow(self, start: int, stop: int) -> GateState:
        """Return a range of the images, without a copy."""
        history = None if self.history is None else self.history[start:stop]
        return GateState(self.x[start:stop], self.scores[start:stop], self.gate, history)

    @classmethod
    def join(cls, states: Sequence[GateState]) -> GateState:
        """Concatenate the images of several states."""
        x, scores = [state.x for state in states], [state.scores for state in states]
        history = [state.history for state in states if state.history is not None]
        return cls(torch.cat(x), torch.cat(scores), states[0].gate, torch.cat(history) if history else None)


def _numpy_copies(x: Tensor) -> bool:
    """Return whether numpy is to copy rows: torch's threads would spin on the cores that a backend needs."""
    return x.device.type == "cpu" and x.dtype != torch.bfloat16  # which numpy does not have


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy()[index.numpy()]) if _numpy_copies(x) else x[index]


def _padded(x: Tensor, size: int) -> Tensor:
    """Append images of zeros."""
    padded = torch.zeros(size, *x.shape[1:], dtype=x.dtype, device=x.device)
    if _numpy_copies(x):
        padded.numpy()[: len(x)] = x.numpy()
    else:
        padded[: len(x)] = x
    return padded


def _pieces(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    starts = itertools.accumulate(sizes, initial=0)
    return [x[start : start + size] for start, size in zip(starts, sizes, strict=False)]


@dataclass(frozen=True, slots=True, eq=False)
class BucketedProgram:
    """A segment for batches of any size, which are split into sizes that it was compiled for.

    Attributes:
        executables: The compiled segment, by batch size.
        milliseconds: Measured time, by batch size.
        any_batch: Whether each executable takes every batch size.
        by_history: Whether executables take the routing history [B] of each image as their second input.
    """

    executables: Mapping[int, Executable]
    milliseconds: Mapping[int, float]
    any_batch: bool = False
    by_history: bool = False
    division: BatchSplitter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "division", BatchSplitter(self.milliseconds))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run images and return features and scores, or logits."""
        images = len(inputs[0])
        if not images:  # one image of zeros gives the shapes of the outputs
            return tuple(y[:0] for y in self._run(1, *(x.new_zeros(1, *x.shape[1:]) for x in inputs)))
        sizes = self.split(images)
        if len(sizes) == 1:
            return self._run(sizes[0], *inputs)
        first = self.executables.get(sizes[0])
        pieces = list(zip(*(_pieces(x, sizes) for x in inputs), strict=True))
        if isinstance(first, WritingExecutable) and sum(sizes) == images:
            formats = zip(first.shapes, first.dtypes, strict=True)
            whole = tuple(inputs[0].new_empty(images, *shape[1:], dtype=dtype) for shape, dtype in formats)
            outputs = zip(*(_pieces(output, sizes) for output in whole), strict=True)
            for size, piece, output in zip(sizes, pieces, outputs, strict=True):
                cast(WritingExecutable, self.executables[size]).into(piece, output)
            return whole
        results = [self._run(size, *piece) for size, piece in zip(sizes, pieces, strict=True)]
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    def split(self, images: int) -> tuple[int, ...]:
        """Return batch sizes that hold this many images in the least measured time, largest first.

        The last batch may be padded.
        """
        if self.any_batch:
            full, rest = divmod(images, self.division.best)
            return (self.division.best,) * full + ((rest,) if rest else ())
        return self.division(images)

    def _run(self, size: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.any_batch:
            return next(iter(self.executables.values()))(*inputs)
        executable, images = self.executables[size], len(inputs[0])
        if images == size:
            return executable(*inputs)
        return tuple(y[:images] for y in executable(*(_padded(x, size) for x in inputs)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledNetwork(InProcess):
    """The compiled segments of a network. It can be routed as a supernet is: it is a `Routable`.

    Attributes:
        spec: How the network is created.
        space: All routes of the network.
        gates: The choices of each gate.
        choices: How many choices each gate has in the whole space.
        options: The compiled choices of each gate.
        input_spec: The images that the network takes.
        image_size: Height and width of the images that the plan takes.
        classes: The number of outputs per image.
        device: Where it runs.
        precision: The precision of features and outputs.
        backend: The name of the backend.
        memory: Whether weights are packed copies or shared with the network.
        takes: The precision to which images are converted.
        segments: Compiled segments.
        resident: Bytes of weights.
        graph_executor: The executor of CUDA graphs, if there are graphs.
        batch_invariant: Whether scores of an image are bitwise the same in every batch.
        fallback: Segments of other choices, which run slices of the network's own weights.
        keyed: Whether some segments take the routing history of each image.
        process: The process that compiled it.
        threads: The number of torch threads at that time.
    """

    spec: ModelSpec
    space: RouteSpace
    gates: tuple[GateChoices, ...]
    choices: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]
    input_spec: InputSpec
    image_size: tuple[int, int]
    classes: int
    device: torch.device
    precision: torch.dtype
    backend: str
    memory: Memory
    takes: torch.dtype
    segments: Mapping[SegmentKey, BucketedProgram]
    resident: int
    graph_executor: Executor | None = None
    batch_invariant: bool = False
    fallback: Mapping[SegmentKey, BucketedProgram] = field(default_factory=dict)
    training: bool = field(default=False, init=False)
    merges: bool = field(default=True, init=False)  # images carry the history that their norms need
    keyed: bool = field(init=False)
    image_shape: tuple[int, int, int] = field(init=False)
    process: int = field(default_factory=os.getpid, init=False)
    threads: int = field(default_factory=torch.get_num_threads, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keyed", any(runner.by_history for runner in self.segments.values()))
        object.__setattr__(self, "image_shape", (self.input_spec.channels, *self.image_size))

    @property
    def name(self) -> str:
        """Return the name of the network."""
        return self.spec.name

    @property
    def num_programs(self) -> int:
        """Return the number of programs that were compiled or captured."""
        return self.executor.num_programs

    @property
    def executor(self) -> Executor:
        """Return what runs batches."""
        return HostExecutor(self) if self.graph_executor is None else self.graph_executor

    def gate(self, stage: int) -> GateChoices:
        """Return the choices of a gate."""
        return self.gates[stage]

    def check_images(self, x: Tensor) -> None:
        """Raise unless ``x`` are images that this plan takes, in the process that compiled it."""
        self.check_images_of(x, self.name, self.image_shape)

    def check_images_of(self, x: Tensor, name: str, shape: tuple[int, int, int]) -> None:
        """Check images of the network ``name``, of which this one may be a member, and of this shape."""
        if os.getpid() != self.process:
            self._check_fork()
        dense = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested
        if dense and x.shape[1:] == shape and x.is_floating_point() and x.device.type == self.device.type:
            return
        takes = f"this plan of {name} takes images [batch, {self.input_spec.channels}, height, width]"
        if not isinstance(x, Tensor):
            raise DsnetError(f"{takes} as a tensor, not a {type(x).__name__}")
        if not dense:
            layout = "nested tensor" if x.is_nested else f"{x.layout} tensor"
            raise DsnetError(f"{takes} as a dense tensor, not a {layout}; convert it (to_dense, torch.stack)")
        if x.ndim != 4 or x.shape[1] != self.input_spec.channels or not x.is_floating_point():
            raise DsnetError(
                f"{takes} of floating-point numbers, not a {x.dtype} tensor of shape {list(x.shape)}"
            )
        if x.shape[1:] != shape:
            raise DsnetError(
                f"this plan of {name} was made for images of {shape[1]} × {shape[2]} pixels, not "
                f"{x.shape[2]} × {x.shape[3]}; compile(…, image_size=…)"
            )
        raise DsnetError(f"the images are on {x.device}, this plan is for {self.device}; move them there")

    def _check_fork(self) -> None:
        """Raise in a forked process if the plan uses threads or a GPU, which do not survive a fork."""
        if self.device.type == "cuda" or max(self.threads, torch.get_num_threads()) > 1:
            raise DsnetError(
                f"this plan of {self.name} was compiled before this process was forked "
                f"(process {self.process}, now {os.getpid()}): its threads or its GPU are not available. "
                "Start processes with 'spawn' (multiprocessing.get_context('spawn')) and compile in each, or "
                "compile after the fork; on a CPU torch.set_num_threads(1) before compiling also lets forked "
                "processes use it"
            )

    def shared_network(self) -> str | None:
        """Return the name of the network whose weights it shares, if it does."""
        return self.name if self.memory == "shared" else None

    def holds(self, route: Route) -> bool:
        """Return whether all segments of a route are compiled."""
        histories = (route.choices[:gates] for gates in range(1, len(route.choices) + 1))
        return all(canonical_key(history) in self.segments for history in histories)

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> GateState:
        """Run the prefix and the first gate."""
        self._check_mode(mode)
        self.check_images(x)
        features, scores = self._run((), x.to(self.takes))
        history = torch.zeros(len(x), dtype=torch.long, device=x.device) if self.keyed else None
        return GateState(features, scores, 0, history)

    def gate_scores(self, state: GateState) -> Tensor:
        """Return the scores [B, choices] of the gate."""
        return state.scores

    def run_segment(self, state: GateState, choices: SegmentKey, mode: Mode | None = None) -> GateState:
        """Run the segment behind ``choices``, with the next gate."""
        self._check_mode(mode)
        features, scores = self._run(choices, state.x, state.history)
        history = state.history
        if history is not None and len(choices) > 1:
            options = self.options[len(choices) - 2]
            history = history * len(options) + options.index(choices[-2])
        return GateState(features, scores, len(choices), history)

    def run_last_segment(self, state: GateState, choices: SegmentKey, mode: Mode | None = None) -> Tensor:
        """Run the segment behind the last gate and return logits."""
        self._check_mode(mode)
        (logits,) = self._run(choices, state.x, state.history)
        return logits

    def run_from_states(
        self, states: dict[SegmentKey, GateState], choices: SegmentKey, mode: Mode | None = None
    ) -> Tensor:
        """Return a route's logits from the states at its gates; states that are missing are added."""
        return run_from_states(self, states, choices, mode)

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """Run all images at one route."""
        self.check_images(x)
        if not len(x):
            return x.new_empty(0, self.classes, dtype=self.precision)
        return self.run_from_states({(): self.run_prefix(x, mode)}, route.choices, mode)

    @torch.no_grad()
    def _run(self, key: SegmentKey, x: Tensor, history: Tensor | None = None) -> tuple[Tensor, ...]:
        program = self.segments.get(canonical_key(key)) or self.fallback.get(key)
        if program is None:
            raise DsnetError(f"this plan of {self.name} does not hold the choices {list(key)}")
        inputs = (x, history) if program.by_history and history is not None else (x,)
        if torch.is_autocast_enabled(self.device.type):  # compilation has chosen the precisions
            with torch.autocast(self.device.type, enabled=False):
                return program(*inputs)
        return program(*inputs)

    @staticmethod
    def _check_mode(mode: Mode | None) -> None:
        if mode is not None:
            raise DsnetError("a plan takes no mode: it runs inference as it was compiled")


class HostExecutor:
    """Group images by the choices of each gate and run the segment of every group, one after the other."""

    asynchronous = False
    max_batch = 64

    def __init__(self, network: CompiledNetwork) -> None:
        self.network = network

    @property
    def num_programs(self) -> int:
        """The number of executables."""
        runners = self.network.segments.values()
        return len({id(executable) for runner in runners for executable in runner.executables.values()})

    def run_gate(self, x: Tensor, penalties: CostPenalties | None = None) -> RoutedOutput:
        """Run images [B, C, H, W] at the routes that the gates decide for, scores less ``penalties``."""
        decide = greedy if penalties is None else penalised_decision(penalties)
        return run_gated_routes(self.network, x, decide)

    def run_assigned(self, x: Tensor, choices: Tensor, *, within_gates: bool = False) -> RoutedOutput:
        """Run each image at its own ``choices`` [B, gates]; ``within_gates`` makes no difference here."""
        return routed_output(self.network, run_assigned(self.network, x, choices))

    def run_route(self, x: Tensor, route: Route) -> Tensor:
        """Run all images at one route and return their logits."""
        return self.network.run_route(x, route)

    def run_cascade(self, x: Tensor, routes: Sequence[int], thresholds: Sequence[float]) -> RoutedOutput:
        """Run ``routes`` one after the other, each for the images whose margin is below the threshold."""

        def proceed(step: int, logits: Tensor) -> Tensor:
            return unsure(margin(logits), thresholds[step]).nonzero()[:, 0]

        return run_cascade(self.network, x, routes, proceed)

    def segment_calls(self, x: Tensor) -> SegmentCalls:
        """Return functions that run the prefix, or one segment, on all images of ``x``; for profiles."""
        return calls_of_network(self.network, x)
