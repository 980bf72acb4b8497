"""The steps of Stage I as CUDA graphs: a GPU that no longer waits for the host.

Every pass of a step (a network forward and backward, the shared prefix there and back, the teacher at a
route) is captured the first time it is needed and replayed from then on, in any order. Graphs work on fixed
memory: inputs are copied into buffers, gradients add up in tensors that stay where they are, and what a pass
gives is copied out of the memory that all graphs share.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet.core.cuda_graphs import CapturedPass, TrainingGraphs, TrainingPass
from dsnet.errors import DsnetError
from dsnet.models import GateState, Supernet
from dsnet.routes import Route
from dsnet.slicing import KeyState, Mode, batch_statistics
from dsnet.slicing import functional as SF
from dsnet.training.stage1.step import Passes, Stage1, StepLosses, Target, Task, run_step

__all__ = ["GraphedStep"]

Form = tuple[Any, ...]


class GraphedStep:
    """`Stage1.step` for one network, from graphs.

    The first batch says which sizes graphs are made for; one of other sizes runs as it does without graphs.
    Weights may change their values, not their place: `load_state_dict` is fine, `to` is not.
    """

    def __init__(self, stage: Stage1, model: Supernet) -> None:
        device = model.head.classifier.weight.device
        if device.type != "cuda":
            raise DsnetError(f"CUDA graphs need a network on a CUDA device, not on {device}; use Stage1.step")
        modes = [stage.mode, stage.largest_mode, stage.average.mode if stage.average else None]
        for mode in modes:
            if mode is not None and mode.statistics not in (None, batch_statistics):
                raise DsnetError(
                    f"CUDA graphs cannot hold norm statistics made by {mode.statistics!r}; possible: those "
                    "of the batch at hand, on every rank its own"
                )
        self.stage, self.model = stage, model
        self._passes = _Replays(stage, model)
        self._form: Form | None = None

    def step(
        self,
        model: Supernet,
        routes: Sequence[Route],
        views: Sequence[Tensor],
        labels: Tensor,
        *,
        label_share: float | None = None,
    ) -> StepLosses:
        """As `Stage1.step`."""
        if model is not self.model:
            raise DsnetError("these graphs were made for another network; make a GraphedStep for this one")
        forms = {_form(view, labels) for view in views}
        if self._form is None and len(forms) == 1:
            (self._form,) = forms
            self._passes.make_buffers(views[0], labels)
        if forms != {self._form}:
            return self.stage.step(model, routes, views, labels, label_share=label_share)
        self._passes.begin(labels)
        return run_step(self._passes, routes, views, labels, label_share)


def _form(*tensors: Tensor) -> Form:
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


class _Network(NamedTuple):
    recorded: CapturedPass
    target: Target
    weights: tuple[Tensor, ...]
    given: list[float]  # what the weights hold


class _Prefix:
    """The shared prefix: its two graphs, and the copy of its end that networks begin at."""

    start: GateState | None = None
    forward: CapturedPass
    backward: CapturedPass


class _Replays(Passes):
    """The passes of a step from graphs; what is captured is what `Passes` does."""

    def __init__(self, stage: Stage1, model: Supernet) -> None:
        super().__init__(stage, model)
        self._device = model.head.classifier.weight.device
        # What the prefix keeps for its way back must outlive the networks in between: memory of its own.
        self._pool, self._prefix_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        drawn = {mode.generator for mode in (stage.mode, stage.largest_mode) if mode is not None} - {None}
        self._graphs = TrainingGraphs(
            [model] if stage.projector is None else [model, stage.projector],
            self._device,
            generators=[generator for generator in drawn if generator is not None],
        )
        self._networks: dict[Hashable, _Network] = {}
        self._prefixes: dict[Hashable, _Prefix] = {}
        self._teachers: dict[Hashable, CapturedPass] = {}

    # --- inputs --------------------------------------------------------------------------------------
    def make_buffers(self, images: Tensor, labels: Tensor) -> None:
        """Fixed memory for inputs of this form."""
        self._images, self._labels = torch.empty_like(images), torch.empty_like(labels)

    def begin(self, labels: Tensor) -> None:
        """Begins a step with these labels."""
        self._labels.copy_(labels)
        self._loaded: Tensor | None = None

    def _load(self, images: Tensor) -> None:
        if images is not self._loaded:
            self._images.copy_(images)
            self._loaded = images

    # --- passes --------------------------------------------------------------------------------------
    def enter(self, images: Tensor, mode: Mode | None) -> None:
        """Replays the prefix."""
        self._load(images)
        key = (mode, self.model.training)
        if key not in self._prefixes:
            self._prefixes[key] = self._record_prefix(mode)
        self._prefix = self._prefixes[key]
        self._graphs.replay(self._prefix.forward)
        assert self._prefix.start is not None
        self._start = self._prefix.start

    def leave(self) -> None:
        """Replays the prefix backward."""
        self._graphs.replay(self._prefix.backward)

    def network(
        self, task: Task, images: Tensor, labels: Tensor, target: Target, weights: Sequence[float | Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Replays a network."""
        if not task.entered:
            self._load(images)
        given = [float(weight) for weight in weights]
        key = (task, self.model.training, _form(*_tensors(target)))
        if key not in self._networks:
            self._networks[key] = self._record_network(task, target, given)
        network = self._networks[key]
        for buffer, new in zip(_tensors(network.target), _tensors(target), strict=True):
            buffer.copy_(new)
        for at, weight in enumerate(given):
            if network.given[at] != weight:
                network.weights[at].fill_(weight)  # a kernel's argument: no copy that the host waits for
                network.given[at] = weight
        self._graphs.replay(network.recorded)
        if self.model.training and (task.mode is None or task.mode.statistics is None):
            for norm, number in self.model.norms(task.route.choices):
                norm.states[number] = KeyState.RUNNING
        paid, logits = network.recorded.outputs
        return paid.clone(), logits  # the step reads logits at once; losses are read whenever someone likes

    def teacher_stages(self, images: Tensor, route: Route) -> tuple[Tensor, ...]:
        """Replays the teacher with its features."""
        self._load(images)
        return self._teach(("stages", route), lambda: Passes.teacher_stages(self, self._images, route))

    def teacher_enter(self, images: Tensor) -> None:
        """Replays the teacher's prefix."""

        def enter() -> tuple[Tensor, ...]:
            Passes.teacher_enter(self, self._images)
            return (self._taught.x,)

        self._load(images)
        (x,) = self._teach("enter", enter)
        self._taught = self._taught._replace(x=x)

    def teacher_finish(self, route: Route) -> Tensor:
        """Replays the teacher behind its prefix."""
        (logits,) = self._teach(route, lambda: (Passes.teacher_finish(self, route),))
        return logits

    # --- graphs --------------------------------------------------------------------------------------
    def _teach(self, key: Hashable, body: TrainingPass) -> tuple[Tensor, ...]:
        if key not in self._teachers:
            (self._teachers[key],) = self._graphs.capture(self._pool, body)
        self._graphs.replay(self._teachers[key])
        return self._teachers[key].outputs

    def _record_network(self, task: Task, target: Target, weights: list[float]) -> _Network:
        own = Target(
            None if target.logits is None else target.logits.clone(),
            tuple(feature.clone() for feature in target.features),
        )
        dtype = SF.at_least_float32(self.model.head.classifier.weight.dtype)
        numbers = torch.tensor(weights, dtype=dtype, device=self._device).unbind()
        body = functools.partial(Passes.network, self, task, self._images, self._labels, own, numbers)
        (recorded,) = self._graphs.capture(self._pool, body)
        return _Network(recorded, own, numbers, list(weights))

    def _record_prefix(self, mode: Mode | None) -> _Prefix:
        prefix = _Prefix()

        def forward() -> tuple[Tensor, ...]:
            Passes.enter(self, self._images, mode)
            if prefix.start is None:
                x = torch.empty_like(self._start.x).requires_grad_(self._start.x.requires_grad)
                x.grad = torch.zeros_like(x) if x.requires_grad else None
                prefix.start = self._start._replace(x=x)
            with torch.no_grad():
                prefix.start.x.copy_(self._start.x)
                if prefix.start.x.grad is not None:
                    prefix.start.x.grad.zero_()
            return ()

        def backward() -> tuple[Tensor, ...]:
            assert prefix.start is not None
            self._start = prefix.start
            Passes.leave(self)
            return ()

        prefix.forward, prefix.backward = self._graphs.capture(self._prefix_pool, forward, backward)
        del self._end  # autograd's side of it: a replay needs none
        assert prefix.start is not None
        if prefix.start.x.grad is not None:
            self._graphs.track(prefix.start.x)
        return prefix


def _tensors(target: Target) -> tuple[Tensor, ...]:
    return (() if target.logits is None else (target.logits,)) + target.features
