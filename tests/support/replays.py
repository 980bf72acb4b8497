"""Stand-ins for CUDA graphs on the CPU: a replay runs the captured function again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from dsnet.core.cuda_graphs import CapturedGraph


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        pass


class _Graph:
    def __init__(self, function: Callable[[], object]) -> None:
        self.replay = function


def _capture(function: Callable[[], None], stream: object, **options: object) -> CapturedGraph[None]:
    """Unlike a capture this runs nothing: the function's first run is its first replay."""
    return CapturedGraph(_Graph(function), None)  # type: ignore[arg-type]


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `TrainingGraphs` work without a GPU."""
    monkeypatch.setattr("dsnet.core.cuda_graphs.training.capture", _capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
