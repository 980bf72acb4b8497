"""Compilation of the segments of a model by a backend, with the executor that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dsnet.core.cuda_graphs import stream_pool
from dsnet.core.timer import Progress
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.composite import CompositeNetwork
from dsnet.models.members import Member
from dsnet.runtime._resident_routes import Options, choices_of_routes
from dsnet.runtime.backends.base import Backend, Executable, get_backend
from dsnet.runtime.executors.base import Executor, GateChoices
from dsnet.runtime.executors.composite import CompiledComposite
from dsnet.runtime.executors.eager_segments import SegmentWithHead, programs_of, unshared
from dsnet.runtime.executors.grouped import MAX_SIDE_STREAMS, GroupedExecutor
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork, Memory
from dsnet.runtime.executors.ragged.support import unsupported
from dsnet.runtime.partition.batch_invariance import make_invariant, resolve_invariance
from dsnet.runtime.partition.builders import bucketed_programs, compile_head, compile_segments
from dsnet.runtime.partition.partitioner import (
    Partitioner,
    PartitionRequest,
    partitioner_of,
    segment_modules,
)
from dsnet.runtime.partition.segments import (
    Segment,
    SegmentKey,
    SharedHead,
    find_shared_segments,
    weight_bytes,
)

__all__ = ["Compiler", "CompositeCompiler"]

GRAPH_BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024),
)
PAIR_BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256)  # where there is a segment for every pair of choices


class _Programs(NamedTuple):
    segments: dict[SegmentKey, BucketedProgram]
    graph_executor: Executor | None
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """Compiles choices of a model; the attributes are the settings of `dsnet.runtime.compile`."""

    model: Any  # of the partitioner's type
    partitioner: Partitioner
    backend: Backend
    buckets: Sequence[int] | None
    memory: Memory
    image_size: int | tuple[int, int] | None
    precision: torch.dtype
    device: torch.device
    batch_invariant: bool | None

    def __call__(
        self, options: Options, previous: CompiledNetwork | None, progress: Progress
    ) -> CompiledNetwork:
        """Compile choices by gate, and reuse the segments of a previous result where that is possible."""
        network, backend, device = self.partitioner.network(self.model), self.backend, self.device
        input_dtype = backend.input_dtype or self.precision
        shared_segments: Mapping[SegmentKey, SegmentKey] = {}
        if backend.captures(device):
            shared_segments = find_shared_segments(network, options, image_size=self.image_size)
        reused: Mapping[SegmentKey, BucketedProgram] = {}
        if previous is not None and previous.graph_executor is None and not previous.keyed:
            reused = previous.segments
        request = PartitionRequest(
            options=options,
            shared_segments=shared_segments,
            shared=self.memory == "shared",
            grouped=backend.captures(device),
            fused=backend.ragged,
            image_size=self.image_size,
            precision=input_dtype,
            device=device,
        )
        # Compiled state is written to later in any mode, so it must not consist of inference tensors.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            segments, head = self.partitioner.segments(self.model, request)
            buckets = self._buckets(pairs=len(segments) > 1 + sum(map(len, options)))
            segments = {key: segment for key, segment in segments.items() if key not in reused}
            invariant = self._apply_batch_invariance(segments, network)
            programs = self._compile(network, segments, head, shared_segments, buckets, progress)
        shape = network.input_spec.shape(self.image_size)
        return CompiledNetwork(
            spec=network.spec,
            space=network.space,
            gates=tuple(GateChoices(choices) for choices in _gate_choices(network)),
            choices=network.choices,
            options=tuple(options),
            input_spec=network.input_spec,
            image_size=(shape.height, shape.width),
            classes=self.partitioner.outputs(self.model, self.image_size),
            device=device,
            precision=self.precision,
            backend=backend.name,
            memory=self.memory,
            takes=input_dtype,
            segments={**reused, **programs.segments},
            resident=programs.weight_bytes + (previous.resident if previous is not None and reused else 0),
            graph_executor=programs.graph_executor,
            batch_invariant=invariant,
        )

    def _buckets(self, *, pairs: bool) -> tuple[int, ...]:
        default = default_buckets(self.backend, self.device, pairs=pairs)
        sizes = set(default if self.buckets is None else self.buckets)
        any_batch = self.backend.any_batch(self.device) and not self.backend.captures(self.device)
        return tuple(sorted(sizes if any_batch else {1, *sizes}))

    def _apply_batch_invariance(self, segments: Mapping[SegmentKey, Segment], network: Supernet) -> bool:
        """Return whether scores are batch-invariant; change eager segments on a CPU where they are to be."""
        if self.backend.name != "eager" or self.device.type != "cpu":
            return self.backend.batch_invariant
        shape = network.input_spec.shape(self.image_size)
        invariant = resolve_invariance(
            self.batch_invariant, min(shape.height, shape.width), self.precision, self.memory
        )
        if invariant:
            make_invariant(segments, len(network.gates))
        return invariant

    def _compile(
        self,
        network: Supernet,
        segments: Mapping[SegmentKey, Segment],
        head: SharedHead | None,
        shared_segments: Mapping[SegmentKey, SegmentKey],
        buckets: Sequence[int],
        progress: Progress,
    ) -> _Programs:
        backend, device, precision = self.backend, self.device, self.precision
        modules = [segment.module for segment in segments.values()]
        weights = weight_bytes([*modules, *([] if head is None else [head.module])])
        if not backend.captures(device):
            programs = bucketed_programs(
                segments, backend, buckets, device=device, precision=precision, progress=progress
            )
            return _Programs(programs, None, weights)
        if len(network.gates) == 1 and backend.ragged:
            fused = self._compile_ragged(network, segments, head, buckets, progress)
            if fused is not None:
                return fused
        calls = compile_segments(segments, backend, device=device, precision=precision, progress=progress)
        keyed = {key for key, segment in segments.items() if segment.histories > 1}
        compiled_head = None
        if head is not None:
            compiled_head = compile_head(head, backend, device=device, precision=precision)
        side_streams = min(MAX_SIDE_STREAMS, max(map(len, network.slice_table)))
        executor = GroupedExecutor(
            calls,
            image=torch.zeros(1, *segments[()].shape, device=device, dtype=precision),
            space=network.space,
            scored=_gate_choices(network),
            keyed=keyed,
            head=compiled_head,
            sizes=buckets,
            streams=stream_pool(device, 1 + side_streams),
            progress=progress,
        )
        if compiled_head is not None:
            options = sorted(key[-1] for key in calls if key)
            calls |= {(c,): SegmentWithHead(calls[c,], compiled_head, i) for i, c in enumerate(options)}
        eager = {**calls, **unshared(calls, segments, shared_segments)}
        eager_keyed = keyed | {key for key, other in shared_segments.items() if other in keyed}
        return _Programs(programs_of(eager, buckets, eager_keyed), executor, weights)

    def _compile_ragged(
        self,
        network: Supernet,
        segments: Mapping[SegmentKey, Segment],
        head: SharedHead | None,
        buckets: Sequence[int],
        progress: Progress,
    ) -> _Programs | None:
        """Compile all segments behind the only gate as one; None if a network has layers without kernels.

        A detector's segments have no other form on this backend, and its head runs by torch's kernels.
        """
        options = [key[0] for key in segments if key]
        prefix_modules, modules = segment_modules(segments)
        reason = unsupported(prefix_modules) or unsupported(modules)
        if reason is not None:
            if head is None:
                return None
            raise DsnetError(f"backend {self.backend.name}: {reason}; try inductor or cudagraphs")
        from dsnet.runtime.executors.ragged.executor import RaggedExecutor  # imports Triton
        from dsnet.runtime.executors.ragged.network import Ragged

        prefix, rest = Ragged(prefix_modules), Ragged(modules)
        compiled_head = None
        if head is not None:
            cudagraphs = get_backend("cudagraphs")
            compiled_head = compile_head(head, cudagraphs, device=self.device, precision=self.precision)
        executor = RaggedExecutor(
            prefix,
            rest,
            options,
            image=torch.zeros(1, *segments[()].shape, device=self.device, dtype=self.precision),
            space=network.space,
            scored=network.gate(0).choices,
            head=compiled_head,
            sizes=buckets,
            streams=stream_pool(self.device, 1),
            progress=progress,
        )
        calls: dict[SegmentKey, Executable] = {(): prefix.at(0)}
        for i, choice in enumerate(options):
            call = rest.at(i)
            calls[choice,] = call if compiled_head is None else SegmentWithHead(call, compiled_head, i)
        weights = prefix.resident + rest.resident + (0 if head is None else weight_bytes([head.module]))
        return _Programs(programs_of(calls, buckets), executor, weights)


@dataclass(frozen=True, slots=True)
class CompositeCompiler:
    """Compiles the members of a composite network, each as a network of its own.

    Attributes:
        network: The composite network.
        compiler: The settings.
    """

    network: CompositeNetwork
    compiler: Compiler

    def __call__(
        self, options: Options, previous: CompiledComposite | None, progress: Progress
    ) -> CompiledComposite:
        """Compile routes, and reuse what a previous result has."""
        network, (routes,) = self.network, options
        own: list[list[int]] = [[] for _ in network.members]
        for route in routes:
            member, local = network.locations[route]
            own[member].append(local.number)
        gates = tuple(GateChoices(gate.choices) for gate in network.gates)
        gate = network.gate_member
        if gate is not None and not own[gate]:
            own[gate] = [0]  # its prefix and gate are needed
        members: list[Member[CompiledNetwork] | None] = []
        for number, (part, numbers) in enumerate(zip(network.members, own, strict=True)):
            if not numbers:
                members.append(None)
                continue
            before = None if previous is None else previous.members[number]
            compiler = replace(
                self.compiler,
                model=part.network,
                partitioner=partitioner_of(part.network),
                image_size=part.image_size,
            )
            compiled = compiler(
                choices_of_routes(part.network, numbers),
                None if before is None else before.network,
                progress,
            )
            members.append(Member(compiled, part.scale, part.shift, part.interpolation))
        return CompiledComposite(
            spec=network.spec,
            space=network.space,
            gates=gates,
            options=tuple(map(tuple, options)),
            input_spec=network.input_spec,
            members=tuple(members),
            locations=network.locations,
            gate_member=network.gate_member,
        )


def _gate_choices(network: Supernet) -> list[tuple[int, ...]]:
    return [network.gate(gate).choices for gate in range(len(network.gates))]


def default_buckets(backend: Backend, device: torch.device, *, pairs: bool) -> tuple[int, ...]:
    """Return the batch sizes to compile for; ``pairs``: there is a segment for every pair of choices."""
    if not backend.captures(device):
        return backend.buckets
    return PAIR_BUCKETS if pairs else GRAPH_BUCKETS
