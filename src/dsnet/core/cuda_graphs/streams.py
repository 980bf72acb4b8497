"""Programs recorded once and replayed on lanes that run side by side: CUDA graphs, each lane a stream.

`Immediate` runs the same programs one after the other, without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CudaLanes", "Immediate", "Lanes", "lanes_for"]

WARM_UP = 2  # passes before a program is recorded: libraries choose kernels and take memory


class Lanes(Protocol):
    """Where programs run. Lane 0 is the caller's own; the others run beside it."""

    def here(self) -> AbstractContextManager[object]:
        """What is launched inside is for the device of these lanes."""

    def record(self, body: Callable[[], None], lane: int) -> Callable[[], None]:
        """A program of all that ``body`` launches, on memory that it always finds at the same place."""

    def on(self, lane: int) -> AbstractContextManager[object]:
        """What is launched inside runs on that lane, behind all that the host has waited for."""

    def fork(self) -> None:
        """What lanes run next waits for the caller's own; the host does not."""

    def join(self, lanes: Iterable[int]) -> None:
        """What the caller launches next waits for these lanes; the host does not."""

    def wait(self) -> None:
        """The host waits for all that the caller's lane has launched."""

    def enter(self) -> None:
        """What the caller launches next waits for `leave`, whichever stream was its own then."""

    def leave(self) -> None:
        """All that was launched belongs to what went before."""

    def on_host(self, size: int) -> Tensor:
        """Memory of integers that the device can write to while the host does something else."""


class Immediate:
    """No lanes: everything runs when it is asked for."""

    def here(self) -> AbstractContextManager[object]:
        """There is one."""
        return contextlib.nullcontext()

    def record(self, body: Callable[[], None], lane: int) -> Callable[[], None]:
        """The body itself."""
        body()
        return body

    def on(self, lane: int) -> AbstractContextManager[object]:
        """Nothing to change."""
        return contextlib.nullcontext()

    def fork(self) -> None:
        """Done already."""

    def join(self, lanes: Iterable[int]) -> None:
        """Done already."""

    def wait(self) -> None:
        """Done already."""

    def enter(self) -> None:
        """Done already."""

    def leave(self) -> None:
        """Done already."""

    def on_host(self, size: int) -> Tensor:
        """Plain memory."""
        return torch.zeros(size, dtype=torch.long)


class CudaLanes:
    """CUDA graphs. Programs of a lane share memory for what they keep to themselves: one runs at a time."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
        self.pools = [torch.cuda.graph_pool_handle() for _ in range(count)]
        self.ends = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self.reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.left = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def here(self) -> AbstractContextManager[object]:
        """Its own, whichever is the current one."""
        return torch.cuda.device(self.device)

    def record(self, body: Callable[[], None], lane: int) -> Callable[[], None]:
        """A graph, after some passes that are not recorded."""
        torch.cuda.synchronize(self.device)
        with torch.no_grad(), torch.cuda.stream(self.streams[lane]):
            for _ in range(WARM_UP):
                body()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.no_grad(),
            torch.cuda.graph(
                graph,
                pool=self.pools[lane],
                stream=self.streams[lane],
                capture_error_mode="thread_local",
            ),
        ):
            body()
        torch.cuda.synchronize(self.device)
        return graph.replay

    def on(self, lane: int) -> AbstractContextManager[object]:
        """The lane's stream, or the caller's."""
        return torch.cuda.stream(self.streams[lane]) if lane else contextlib.nullcontext()

    def fork(self) -> None:
        """An event of the caller's stream."""
        self.reached.record(torch.cuda.current_stream(self.device))
        for stream in self.streams[1:]:
            stream.wait_event(self.reached)

    def join(self, lanes: Iterable[int]) -> None:
        """Events of their streams."""
        own = torch.cuda.current_stream(self.device)
        for lane in lanes:
            if lane:
                self.ends[lane].record(self.streams[lane])
                own.wait_event(self.ends[lane])

    def wait(self) -> None:
        """An event of the caller's stream."""
        self.reached.record(torch.cuda.current_stream(self.device))
        self.reached.synchronize()

    def enter(self) -> None:
        """Behind what left last."""
        torch.cuda.current_stream(self.device).wait_event(self.left)

    def leave(self) -> None:
        """An event of the caller's stream."""
        self.left.record(torch.cuda.current_stream(self.device))

    def on_host(self, size: int) -> Tensor:
        """Pinned memory."""
        return torch.zeros(size, dtype=torch.long, pin_memory=True)


def lanes_for(device: torch.device, count: int) -> Lanes:
    """CUDA graphs on a GPU; elsewhere the same programs without them."""
    return CudaLanes(device, count) if device.type == "cuda" else Immediate()
