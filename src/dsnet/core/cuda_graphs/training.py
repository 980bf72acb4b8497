"""Training passes as CUDA graphs that can be replayed in any order.

A graph reads and writes fixed addresses: gradients accumulate in tensors that are never replaced, and a pass
copies its outputs out of the memory pool that several graphs share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsnet.core.cuda_graphs.capture import CapturedGraph, capture

__all__ = ["CapturedPass", "TrainingGraphs", "TrainingPass"]

TrainingPass = Callable[[], tuple[Tensor, ...]]


class CapturedPass(NamedTuple):
    """A pass that can be replayed."""

    graph: CapturedGraph[None]
    outputs: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]  # whose gradients the pass adds to


class TrainingGraphs:
    """Capture and replay forward and backward passes of modules.

    The modules' parameters may change their values, not their addresses.

    Args:
        modules: Modules whose parameters collect gradients and whose buffers the passes may update.
        device: The CUDA device of the modules.
        generators: Random generators that the passes draw from.
    """

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

    def track(self, leaf: Tensor) -> None:
        """Also collect gradients of this tensor, in its present ``grad``."""
        assert leaf.grad is not None
        self._leaves.append(leaf)
        self._gradients[leaf] = leaf.grad

    def capture(self, pool: Any, *passes: TrainingPass) -> list[CapturedPass]:  # noqa: ANN401
        """Capture passes that run one after the other; buffers, gradients and generators stay unchanged.

        Args:
            pool: The handle of the memory pool that the graphs share.
            *passes: Functions that run a pass and return the tensors that a replay is to provide.
        """
        captured = []
        for run, (outputs, leaves) in zip(passes, self._rehearse(passes), strict=True):
            self._attach(leaves)
            copy = functools.partial(_copy_outputs, run, outputs)
            graph = capture(copy, self._stream, pool=pool, generators=self.generators, warm_up=0)
            captured.append(CapturedPass(graph, outputs, leaves))
        return captured

    def replay(self, captured: CapturedPass) -> tuple[Tensor, ...]:
        """Run a pass and return its outputs, which its next replay overwrites."""
        self._attach(captured.leaves)
        captured.graph.replay()
        return captured.outputs

    def _rehearse(
        self, passes: Sequence[TrainingPass]
    ) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Warm up all passes before any is captured; return each one's output buffers and leaves."""
        rehearsed, leaves = [], list(self._leaves)
        gradients = [leaf.grad for leaf in leaves]
        with self._state_restored(), torch.cuda.stream(self._stream):
            for run in passes:
                for leaf in leaves:
                    leaf.grad = None
                outputs = tuple(torch.empty_like(value) for value in run())
                rehearsed.append((outputs, tuple(leaf for leaf in leaves if leaf.grad is not None)))
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        return rehearsed

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        """Order the side stream behind and before the current one; restore buffers and generators."""
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

    def _attach(self, leaves: Sequence[Tensor]) -> None:
        """Move gradients to the addresses that graphs add to; a gradient of None becomes zero there."""
        fresh = []
        for leaf in leaves:
            fixed = self._gradients.get(leaf)
            if fixed is None:
                fixed = self._gradients[leaf] = torch.zeros_like(leaf)
            if leaf.grad is fixed:
                continue
            if leaf.grad is None:
                fresh.append(fixed)
            else:
                fixed.copy_(leaf.grad)
            leaf.grad = fixed
        if fresh:
            torch._foreach_zero_(fresh)


def _copy_outputs(run: TrainingPass, buffers: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, run(), strict=True):
        buffer.copy_(value)
