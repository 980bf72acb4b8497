"""A network made ready for a device: its parts as executables, asked as routing asks a supernet."""

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
from dsnet.runtime.executors.base import Executor, GateChoices
from dsnet.runtime.executors.batching import Division
from dsnet.runtime.executors.segment_calls import SegmentCalls, calls_of_network
from dsnet.runtime.partition.segments import SegmentKey, canonical_key
from dsnet.slicing import Mode

__all__ = ["CompiledNetwork", "HostExecutor", "Memory", "BucketedProgram", "GateState"]

Memory = Literal["packed", "shared"]


class GateState(NamedTuple):
    """What stands at a gate: features that it has scaled, its scores, and what led there."""

    x: Tensor
    scores: Tensor
    gate: int
    earlier: Tensor | None = None  # [B]: choices before the last one, as one number; where norms depend on it

    def take(self, at: Tensor) -> GateState:
        """Some of the images, by their places [n]."""
        earlier = None if self.earlier is None else _rows(self.earlier, at)
        return GateState(_rows(self.x, at), _rows(self.scores, at), self.gate, earlier)

    def narrow(self, start: int, stop: int) -> GateState:
        """The images of a range, without a copy."""
        earlier = None if self.earlier is None else self.earlier[start:stop]
        return GateState(self.x[start:stop], self.scores[start:stop], self.gate, earlier)

    @classmethod
    def join(cls, states: Sequence[GateState]) -> GateState:
        """The images of all, in order."""
        x, scores = [state.x for state in states], [state.scores for state in states]
        earlier = [state.earlier for state in states if state.earlier is not None]
        return cls(torch.cat(x), torch.cat(scores), states[0].gate, torch.cat(earlier) if earlier else None)


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """Some rows; on the host by numpy, since torch's threads wait busily where a backend's are to work."""
    if x.device.type != "cpu" or x.dtype == torch.bfloat16:
        return x[at]
    return torch.from_numpy(x.numpy()[at.numpy()])


@dataclass(frozen=True, slots=True, eq=False)
class BucketedProgram:
    """A part for any number of images: in one go, or in batches of sizes that it runs well."""

    executables: Mapping[int, Executable]  # by batch size
    milliseconds: Mapping[int, float]  # of each, as measured here
    any_batch: bool = False  # whether each of them takes every size
    by_history: bool = False  # whether they also take the number of each image's history
    division: Division = field(init=False)
    splits: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)  # by number of images

    def __post_init__(self) -> None:
        object.__setattr__(self, "division", Division(self.milliseconds))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Features and scores, or logits."""
        images = len(inputs[0])
        if not images:  # nothing to run, but what it gives still has its shape
            return tuple(y[:0] for y in self._run(1, *(x.new_zeros(1, *x.shape[1:]) for x in inputs)))
        sizes = self.splits.get(images)
        if sizes is None:
            sizes = self.splits[images] = self.split(images)
        if len(sizes) == 1:
            return self._run(sizes[0], *inputs)
        first = self.executables.get(sizes[0])
        pieces = list(zip(*(_pieces(x, sizes) for x in inputs), strict=True))
        if isinstance(first, WritingExecutable) and sum(sizes) == images:
            kinds = zip(first.shapes, first.dtypes, strict=True)
            whole = tuple(inputs[0].new_empty(images, *shape[1:], dtype=dtype) for shape, dtype in kinds)
            found = zip(*(_pieces(output, sizes) for output in whole), strict=True)
            for size, piece, output in zip(sizes, pieces, found, strict=True):
                cast(WritingExecutable, self.executables[size]).into(piece, output)
            return whole
        ran = [self._run(size, *piece) for size, piece in zip(sizes, pieces, strict=True)]
        return tuple(torch.cat(parts) for parts in zip(*ran, strict=True))

    def split(self, images: int) -> tuple[int, ...]:
        """Batches that hold so many images in the least time, by what was measured; largest first.

        The last may hold fewer images than it has room for.
        """
        if self.any_batch:
            full, rest = divmod(images, self.division.best)
            return (self.division.best,) * full + ((rest,) if rest else ())
        return self.division(images)

    def _run(self, size: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        executable = self.executables.get(size)
        if executable is None:
            assert self.any_batch
            executable = next(iter(self.executables.values()))
        images = len(inputs[0])
        if images == size or self.any_batch:
            return executable(*inputs)
        return tuple(y[:images] for y in executable(*(_padded(x, size) for x in inputs)))


def _pieces(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    starts = itertools.accumulate(sizes, initial=0)
    return [x[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _padded(x: Tensor, size: int) -> Tensor:
    """With images of zeros at the end; on the host by numpy, as `_rows`."""
    room = torch.zeros(size, *x.shape[1:], dtype=x.dtype, device=x.device)
    if x.device.type == "cpu" and x.dtype != torch.bfloat16:
        room.numpy()[: len(x)] = x.numpy()
    else:
        room[: len(x)] = x
    return room


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledNetwork(InProcess):
    """The executables of a network, with all that routing asks of it (`group_by_route.Routable`)."""

    spec: ModelSpec
    space: RouteSpace
    gates: tuple[GateChoices, ...]
    choices: tuple[int, ...]  # how many every gate of the whole space has
    options: tuple[tuple[int, ...], ...]  # those that are held, gate by gate
    input_spec: InputSpec
    image_size: tuple[int, int]
    classes: int
    device: torch.device
    precision: torch.dtype
    backend: str
    memory: Memory
    takes: torch.dtype  # the precision of images
    segments: Mapping[SegmentKey, BucketedProgram]
    resident: int  # bytes of weights
    graph_executor: Executor | None = None  # the same segments for mixed batches on a GPU
    batch_invariant: bool = False  # whether no image's scores depend on the others of its batch
    fallback: Mapping[SegmentKey, BucketedProgram] = field(default_factory=dict)  # of other choices
    training: bool = field(default=False, init=False)
    merges: bool = field(default=True, init=False)  # what depends on all choices travels with the images
    keyed: bool = field(init=False)  # whether some parts take the number of each image's history
    image_shape: tuple[int, int, int] = field(init=False)
    process: int = field(default_factory=os.getpid, init=False)
    threads: int = field(default_factory=torch.get_num_threads, init=False)  # when its programs were made

    def __post_init__(self) -> None:
        object.__setattr__(self, "keyed", any(runner.by_history for runner in self.segments.values()))
        object.__setattr__(self, "image_shape", (self.input_spec.channels, *self.image_size))

    @property
    def name(self) -> str:
        """Which network."""
        return self.spec.name

    @property
    def num_programs(self) -> int:
        """How many executables were made, or captured."""
        return self.executor.num_programs

    @property
    def executor(self) -> Executor:
        """What runs batches."""
        return HostExecutor(self) if self.graph_executor is None else self.graph_executor

    def gate(self, stage: int) -> GateChoices:
        """The gate in front of a stage."""
        return self.gates[stage]

    def check_images(self, x: Tensor) -> None:
        """Raises an error that says what images this plan takes."""
        if os.getpid() != self.process:
            self._check_fork()
        dense = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested
        right = dense and x.shape[1:] == self.image_shape and x.is_floating_point()
        if right and x.device.type == self.device.type:
            return
        takes = f"this plan of {self.name} takes images [batch, {self.input_spec.channels}, height, width]"
        if not isinstance(x, Tensor):
            raise DsnetError(f"{takes} as a tensor, not a {type(x).__name__}")
        if not dense:
            kind = "nested tensor" if x.is_nested else f"{x.layout} tensor"
            raise DsnetError(f"{takes} as a dense tensor, not a {kind}; convert it (to_dense, torch.stack)")
        if x.ndim != 4 or x.shape[1] != self.input_spec.channels or not x.is_floating_point():
            raise DsnetError(f"{takes} of numbers, not a {x.dtype} tensor of shape {list(x.shape)}")
        if tuple(x.shape[2:]) != self.image_size:
            raise DsnetError(
                f"this plan of {self.name} was made for images of {self.image_size[0]} × "
                f"{self.image_size[1]} pixels, not {x.shape[2]} × {x.shape[3]}; compile(…, image_size=…)"
            )
        if x.device.type != self.device.type:
            raise DsnetError(f"the images are on {x.device}, this plan is for {self.device}; move them there")

    def _check_fork(self) -> None:
        """Raises an error in a forked process: threads and GPU contexts do not survive a fork."""
        if self.device.type == "cuda" or max(self.threads, torch.get_num_threads()) > 1:
            raise DsnetError(
                f"this plan of {self.name} was compiled before this process was forked "
                f"(process {self.process}, now {os.getpid()}): its threads or its GPU are not there. "
                "Start processes with 'spawn' (multiprocessing.get_context('spawn')) and compile in each, or "
                "compile after the fork; on a CPU torch.set_num_threads(1) before compiling also lets forked "
                "processes use it"
            )

    def shared_network(self) -> str | None:
        """The network whose own weights it runs, if it does."""
        return self.name if self.memory == "shared" else None

    def holds(self, route: Route) -> bool:
        """Whether all parts of a route are there."""
        ways = (route.choices[:gates] for gates in range(1, len(route.choices) + 1))
        return all(canonical_key(way) in self.segments for way in ways)

    def run_prefix(self, x: Tensor, mode: Mode | None = None) -> GateState:
        """Prefix and first gate."""
        self._check_mode(mode)
        self.check_images(x)
        features, scores = self._run((), x.to(self.takes))
        earlier = torch.zeros(len(x), dtype=torch.long, device=x.device) if self.keyed else None
        return GateState(features, scores, 0, earlier)

    def gate_scores(self, state: GateState) -> Tensor:
        """Scores [B, choices] of the gate for what stands at it."""
        return state.scores

    def run_segment(self, state: GateState, choices: SegmentKey, mode: Mode | None = None) -> GateState:
        """From the gate that made the last of ``choices`` to the next one."""
        self._check_mode(mode)
        features, scores = self._run(choices, state.x, state.earlier)
        earlier = state.earlier
        if earlier is not None and len(choices) > 1:
            options = self.options[len(choices) - 2]
            earlier = earlier * len(options) + options.index(choices[-2])
        return GateState(features, scores, len(choices), earlier)

    def run_last_segment(self, state: GateState, choices: SegmentKey, mode: Mode | None = None) -> Tensor:
        """From the last gate to the logits."""
        self._check_mode(mode)
        (logits,) = self._run(choices, state.x, state.earlier)
        return logits

    def run_from_states(
        self, states: dict[SegmentKey, GateState], choices: SegmentKey, mode: Mode | None = None
    ) -> Tensor:
        """A route's logits from what stands at the gates on its way; adds what is not there yet."""
        return run_from_states(self, states, choices, mode)

    def run_route(self, x: Tensor, route: Route, mode: Mode | None = None) -> Tensor:
        """All images at one route."""
        self.check_images(x)
        if not len(x):
            return x.new_empty(0, self.classes, dtype=self.precision)
        return self.run_from_states({(): self.run_prefix(x, mode)}, route.choices, mode)

    @torch.no_grad()
    def _run(self, history: SegmentKey, x: Tensor, earlier: Tensor | None = None) -> tuple[Tensor, ...]:
        runner = self._runner(history)
        inputs = (x, earlier) if runner.by_history and earlier is not None else (x,)
        if torch.is_autocast_enabled(self.device.type):  # precisions were chosen when the plan was made
            with torch.autocast(self.device.type, enabled=False):
                return runner(*inputs)
        return runner(*inputs)

    def _runner(self, history: SegmentKey) -> BucketedProgram:
        runner = self.segments.get(canonical_key(history)) or self.fallback.get(history)
        if runner is None:
            raise DsnetError(f"this plan of {self.name} does not hold the choices {list(history)}")
        return runner

    @staticmethod
    def _check_mode(mode: Mode | None) -> None:
        if mode is not None:
            raise DsnetError("a plan is for inference: it runs in no other mode")


class HostExecutor:
    """Run segment after segment from the host: group images by the gates' choices, run each group sliced."""

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
