"""Capture of CUDA graphs: the one place that records what a function launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

__all__ = ["CapturedGraph", "capture"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph(Generic[T]):
    """A CUDA graph and the outputs of the captured function, which each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    outputs: T

    def replay(self) -> T:
        """Launch the graph on the current stream and return the outputs, without waiting for them."""
        self.graph.replay()
        return self.outputs


def capture(
    function: Callable[[], T],
    stream: torch.cuda.Stream,
    *,
    pool: Any = None,  # noqa: ANN401  (torch has no type for a pool handle)
    generators: Sequence[torch.Generator] = (),
    warm_up: int = 1,
) -> CapturedGraph[T]:
    """Warm a function up on a side stream and capture what it launches there as a CUDA graph.

    Args:
        function: Launches the work. Everything it reads and writes must stay at the same address.
        stream: The side stream to warm up and to capture on; not the current stream.
        pool: The handle of the memory pool for the graph's temporaries (default: a pool of its own). Graphs
            that share a pool overwrite each other's temporaries, so they must not run at the same time.
        generators: Random generators that the function draws from. A replay draws new numbers from them;
            capturing leaves their states unchanged, also if it fails.
        warm_up: How often to run the function first, so that libraries choose kernels and allocate memory.

    Returns:
        The captured graph with the function's return value.
    """
    device = stream.device
    states = [generator.get_state() for generator in generators]
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                function()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # Other threads may use the device during the capture, for example to load the next batch.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = function()
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    torch.cuda.synchronize(device)
    return CapturedGraph(graph, outputs)
