"""Streams that replay captured programs side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from dsnet.core.cuda_graphs.capture import capture

__all__ = ["StreamPool", "captured_call", "stream_pool"]

WARM_UP = 2  # passes before a capture


class StreamPool:
    """Numbered streams; number 0 is the caller's. In this class every program runs at once, on the host.

    On a GPU `stream_pool` returns a subclass that overrides all methods.
    """

    def on_device(self) -> AbstractContextManager[object]:
        """Make the pool's device the current one."""
        return contextlib.nullcontext()

    def capture(self, body: Callable[[], None], stream: int) -> Callable[[], None]:
        """Return a program that repeats what ``body`` launches, on the tensors that it uses now.

        Programs captured for the same stream share memory and must not run at the same time.
        """
        body()
        return body

    def use(self, stream: int) -> AbstractContextManager[object]:
        """Launch what is inside on this stream."""
        return contextlib.nullcontext()

    def join(self, streams: Iterable[int]) -> None:
        """Make the caller's stream wait for these; the host does not wait."""

    def synchronize(self) -> None:
        """Make the host wait for what the caller has launched."""

    def acquire(self) -> None:
        """Make the caller's stream wait for the last `release`, on whichever stream that was."""

    def release(self) -> None:
        """Mark the end of the caller's work for the next `acquire`."""

    def host_buffer(self, size: int) -> Tensor:
        """Return integers in host memory that the device can write to asynchronously."""
        return torch.zeros(size, dtype=torch.long)


class _CudaStreamPool(StreamPool):
    """Streams of a CUDA device, with a memory pool for the graphs of each."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
        self.pools = [torch.cuda.graph_pool_handle() for _ in range(count)]
        self.ends = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self.reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.released = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)

    def capture(self, body: Callable[[], None], stream: int) -> Callable[[], None]:
        with torch.no_grad():
            captured = capture(body, self.streams[stream], pool=self.pools[stream], warm_up=WARM_UP)
        return captured.graph.replay

    def use(self, stream: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.streams[stream]) if stream else contextlib.nullcontext()

    def join(self, streams: Iterable[int]) -> None:
        current = torch.cuda.current_stream(self.device)
        for stream in streams:
            if stream:
                self.ends[stream].record(self.streams[stream])
                current.wait_event(self.ends[stream])

    def synchronize(self) -> None:
        self.reached.record(torch.cuda.current_stream(self.device))
        self.reached.synchronize()

    def acquire(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.released)

    def release(self) -> None:
        self.released.record(torch.cuda.current_stream(self.device))

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.long, pin_memory=True)


def stream_pool(device: torch.device, count: int) -> StreamPool:
    """Return ``count`` streams of a CUDA device; for other devices a pool that runs programs at once."""
    return _CudaStreamPool(device, count) if device.type == "cuda" else StreamPool()


def captured_call(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a call that replays what ``call`` launches as a CUDA graph; on other devices, run it."""

    def body() -> None:
        call()

    program = stream_pool(device, 1).capture(body, 0)
    return lambda: (program(), call)  # the graph works on memory that ``call`` refers to
