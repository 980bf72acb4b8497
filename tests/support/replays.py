"""Recorded passes on a CPU: what surrounds a capture, with replays that run the captured passes again."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from dsnet.core.cuda_graphs.passes import Body, Recorded, Recorder


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        pass


class _Graph:
    """Runs the pass again, as a graph's replay would."""

    def __init__(self, body: Body, outputs: tuple[Tensor, ...]) -> None:
        self.body, self.outputs = body, outputs

    def replay(self) -> None:
        for buffer, value in zip(self.outputs, self.body(), strict=True):
            buffer.copy_(value)


def _record(self: Recorder, pool: object, *bodies: Body) -> list[Recorded]:
    rehearsed = zip(bodies, self._rehearse(bodies), strict=True)
    return [Recorded(_Graph(body, outputs), outputs, touched) for body, (outputs, touched) in rehearsed]


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Recorder` without a GPU."""
    monkeypatch.setattr(Recorder, "record", _record)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
