"""The steps of Stage I as CUDA graphs, so that the GPU does not wait for the host.

Each pass of a step (a network forward and backward, the shared prefix forward and backward, the teacher at a
route) is captured when it is first needed and replayed from then on, in any order. Graphs read and write
fixed addresses: inputs are copied into buffers, gradients accumulate in tensors that are never replaced, and
outputs are copied out of the memory that all graphs share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dsnet.core.cuda_graphs import CapturedPass, TrainingGraphs
from dsnet.errors import DsnetError
from dsnet.models import GateState, Supernet
from dsnet.routes import Route
from dsnet.slicing import KeyState, Mode, batch_statistics
from dsnet.training.stage1.step import NetworkTask, Passes, Stage1, StepLosses, Tensors

__all__ = ["GraphedStep"]


def _form(*tensors: Tensor) -> Hashable:
    return tuple((x.shape, x.stride(), x.dtype, x.device) for x in tensors)


def _check(stage: Stage1, device: torch.device) -> None:
    """Raise if the steps of a stage cannot be captured."""
    if device.type != "cuda":
        raise DsnetError(f"CUDA graphs need a network on a CUDA device, not on {device}; use Stage1.step")
    for mode in (stage.mode, stage.largest_mode, stage.average.mode if stage.average else None):
        if mode is not None and mode.statistics not in (None, batch_statistics):
            raise DsnetError(
                f"CUDA graphs cannot hold norm statistics made by {mode.statistics!r}; possible: those of "
                "the batch at hand, on every rank its own"
            )


class _Pass(NamedTuple):
    inputs: list[Tensor]
    captured: CapturedPass


class _Prefix(NamedTuple):
    images: Tensor
    start: GateState  # where the networks start
    forward: CapturedPass
    backward: CapturedPass


class GraphedStep(Passes):
    """The steps of a stage for one network, replayed from CUDA graphs.

    Graphs are for batches of the first batch's form; a batch of another form runs without graphs. The weights
    may change their values, not their addresses: `load_state_dict` is possible, `to` is not.

    Args:
        stage: The scheme and what its steps need.
        model: The network, on a CUDA device.

    Raises:
        DsnetError: The network is on another device, or a mode shares norm statistics between ranks.
    """

    def __init__(self, stage: Stage1, model: Supernet) -> None:
        super().__init__(stage, model)
        device = model.head.classifier.weight.device
        _check(stage, device)
        # What the prefix keeps for its backward pass must outlive the networks in between: its own memory.
        self._pool, self._prefix_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        modes = [mode for mode in (stage.mode, stage.largest_mode) if mode is not None]
        generators = {mode.generator for mode in modes if mode.generator is not None}
        modules = [model] if stage.projector is None else [model, stage.projector]
        self._graphs = TrainingGraphs(modules, device, generators=list(generators))
        self._batch_form: Hashable = None
        self._inputs: dict[Hashable, Tensor] = {}  # shared by all passes, which run one after the other
        self._captured: dict[Hashable, _Pass] = {}
        self._prefixes: dict[Hashable, _Prefix] = {}

    def step(
        self, routes: Sequence[Route], views: Sequence[Tensor], labels: Tensor, *, labels_only: bool = False
    ) -> StepLosses:
        """Run a step; for arguments see `Stage1.step`."""
        form = frozenset(_form(view, labels) for view in views)
        self._batch_form = self._batch_form or form
        if form == self._batch_form:
            return super().step(routes, views, labels, labels_only=labels_only)
        return self.stage.step(self.model, routes, views, labels, labels_only=labels_only)

    def run(self, key: Hashable, function: Callable[..., Tensors], *inputs: Tensor | Tensors) -> Tensors:
        """Replay a pass; the next replay overwrites its outputs."""
        tensors, structure = tree_flatten(inputs)
        key = (key, self.model.training, _form(*tensors))
        if key not in self._captured:
            buffers = [self._inputs.setdefault((i, _form(x)), x.clone()) for i, x in enumerate(tensors)]
            body = functools.partial(function, *tree_unflatten(buffers, structure))
            self._captured[key] = _Pass(buffers, *self._graphs.capture(self._pool, body))
        buffers, captured = self._captured[key]
        for buffer, x in zip(buffers, tensors, strict=True):
            buffer.copy_(x)
        return self._graphs.replay(captured)

    def enter(self, images: Tensor, mode: Mode | None) -> None:
        """Replay the prefix."""
        key = (mode, self.model.training)
        if key not in self._prefixes:
            self._prefixes[key] = self._capture_prefix(images.clone(), mode)
        self._prefix = self._prefixes[key]
        self._prefix.images.copy_(images)
        self._graphs.replay(self._prefix.forward)
        self._start = self._prefix.start

    def leave(self) -> None:
        """Replay the backward pass of the prefix."""
        self._graphs.replay(self._prefix.backward)

    def network(self, task: NetworkTask, images: Tensor, labels: Tensor, target: Tensors) -> Tensors:
        """Replay a network, and mark the norm statistics that it updates."""
        values, logits = super().network(task, images, labels, target)
        if self.model.training and (task.mode is None or task.mode.statistics is None):
            keep = task.mode is not None and task.mode.keep_calibrated
            for norm, number in self.model.norms(task.route.choices):
                if not (keep and norm.states[number] is KeyState.CALIBRATED):
                    norm.states[number] = KeyState.RUNNING
        return values.clone(), logits  # the step uses the logits at once, its caller the values at any time

    def _capture_prefix(self, images: Tensor, mode: Mode | None) -> _Prefix:
        start: GateState | None = None

        def forward() -> Tensors:
            nonlocal start
            Passes.enter(self, images, mode)
            if start is None:
                x = torch.empty_like(self._start.x).requires_grad_(self._start.x.requires_grad)
                x.grad = torch.zeros_like(x) if x.requires_grad else None
                start = self._start._replace(x=x)
            with torch.no_grad():
                start.x.copy_(self._start.x)
                if start.x.grad is not None:
                    start.x.grad.zero_()
            return ()

        def backward() -> Tensors:
            assert start is not None
            self._start = start
            Passes.leave(self)
            return ()

        captured = self._graphs.capture(self._prefix_pool, forward, backward)
        assert start is not None
        if start.x.grad is not None:
            self._graphs.track(start.x)
        return _Prefix(images, start, *captured)
