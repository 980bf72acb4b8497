"""What executors of captured programs share: chunks of a batch, one thread at a time, cost penalties."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized

import torch
from torch import Tensor

from dsnet.core.cuda_graphs import StreamPool
from dsnet.routing.cost_table import CostPenalties
from dsnet.routing.policies import RoutedOutput
from dsnet.runtime.executors.buffers import GateBuffers

__all__ = ["GraphExecutor"]


class GraphExecutor:
    """Base of executors whose programs take at most `max_batch` images and work on fixed memory."""

    asynchronous = True
    max_batch: int
    streams: StreamPool
    lock: threading.Lock
    programs: Sized
    gates: Sequence[GateBuffers]
    penalties: CostPenalties | None = None  # those in the memory of the gates
    outputs: Tensor  # [max_batch, outputs]

    @property
    def num_programs(self) -> int:
        """The number of captured programs."""
        return len(self.programs)

    @torch.no_grad()
    def in_chunks(self, x: Tensor, run: Callable[[slice | None], RoutedOutput]) -> RoutedOutput:
        """Run images in chunks of at most `max_batch`, or all at once (None); one thread at a time."""
        if not len(x):
            return RoutedOutput(self.outputs[:0].clone(), self.outputs.new_zeros(0, dtype=torch.long))
        with self.lock, self.streams.on_device():
            try:
                if len(x) <= self.max_batch:
                    return run(None)
                starts = range(0, len(x), self.max_batch)
                chunks = [run(slice(start, start + self.max_batch)) for start in starts]
            except BaseException:
                self.streams.release()  # what was launched so far belongs to what went before
                raise
        return RoutedOutput(torch.cat([c.logits for c in chunks]), torch.cat([c.routes for c in chunks]))

    def set_penalties(self, penalties: CostPenalties | None) -> None:
        """Write penalties to the memory that programs read, if they have changed."""
        if penalties == self.penalties:
            return
        previous: Sequence[int] = (0,)
        for number, gate in enumerate(self.gates):
            if penalties is None:
                gate.penalties.zero_()
            else:
                rows = [penalties[number][choice] for choice in previous]
                gate.penalties.copy_(torch.tensor(rows, dtype=torch.float64))
            previous = gate.choices
        self.penalties = penalties
