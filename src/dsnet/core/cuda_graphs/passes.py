"""Passes with gradients as CUDA graphs, replayed in any order.

Graphs work on fixed memory: gradients add up in tensors that stay where they are, and what a pass gives is
copied out of the memory that all graphs of a pool share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Body", "Recorded", "Recorder"]

Body = Callable[[], tuple[Tensor, ...]]


class Recorded(NamedTuple):
    """A pass that can be replayed."""

    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]
    touched: tuple[Tensor, ...]  # whose gradients it adds to


class Recorder:
    """Captures passes of modules whose weights may change their values, not their place."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        *,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.modules, self.device, self.generators = tuple(modules), device, tuple(generators)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaves: list[Tensor] = [p for m in modules for p in m.parameters() if p.requires_grad]
        self._gradients: dict[Tensor, Tensor] = {}

    def adopt(self, leaf: Tensor) -> None:
        """A further tensor that collects gradients, where its own are now."""
        assert leaf.grad is not None
        self._leaves.append(leaf)
        self._gradients[leaf] = leaf.grad

    def record(self, pool: Any, *bodies: Body) -> list[Recorded]:  # noqa: ANN401  (torch has no type)
        """Captures passes that run one after the other; nothing that they change stays changed."""
        recorded = []
        for body, (outputs, touched) in zip(bodies, self._rehearse(bodies), strict=True):
            self._attach(touched)
            graph = torch.cuda.CUDAGraph()
            for generator in self.generators:
                graph.register_generator_state(generator)
            # Another thread may use the device meanwhile, to load the next batch for instance.
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                for buffer, value in zip(outputs, body(), strict=True):
                    buffer.copy_(value)
            recorded.append(Recorded(graph, outputs, touched))
        return recorded

    def replay(self, recorded: Recorded) -> None:
        """Runs a pass; its outputs are in ``recorded.outputs``."""
        self._attach(recorded.touched)
        recorded.graph.replay()

    def _rehearse(self, bodies: Sequence[Body]) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Runs them once, as captures need it: what they give, and whose gradients they touch."""
        rehearsed, leaves = [], list(self._leaves)
        gradients = [leaf.grad for leaf in leaves]
        with self._undone(), torch.cuda.stream(self._stream):
            for body in bodies:
                for leaf in leaves:
                    leaf.grad = None
                outputs = tuple(torch.empty_like(value) for value in body())
                rehearsed.append((outputs, tuple(leaf for leaf in leaves if leaf.grad is not None)))
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        return rehearsed

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """On the side stream; statistics and generators are afterwards what they were before."""
        buffers = [(buffer, buffer.clone()) for module in self.modules for buffer in module.buffers()]
        generators = [*self.generators, torch.cuda.default_generators[self.device.index or 0]]
        states = [generator.get_state() for generator in generators]
        main = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(main)
        yield
        main.wait_stream(self._stream)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # `data`: autograd must not see a change where nothing changed
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def _attach(self, touched: Sequence[Tensor]) -> None:
        """Gradients where graphs add to them; those that someone set to None begin at zero."""
        fresh = []
        for leaf in touched:
            held = self._gradients.get(leaf)
            if held is None:
                held = self._gradients[leaf] = torch.zeros_like(leaf)
            if leaf.grad is held:
                continue
            if leaf.grad is None:
                fresh.append(held)
            else:
                held.copy_(leaf.grad)
            leaf.grad = held
        if fresh:
            torch._foreach_zero_(fresh)
