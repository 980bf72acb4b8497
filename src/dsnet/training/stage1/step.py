"""One step of Stage I: each network of the sandwich runs forward and backward before the next one starts.

Only one network's autograd graph exists at a time, so a step needs the memory of its largest network.
Networks that see the same images share the prefix: it runs forward once, the gradients of all networks add up
at its output, and it runs backward once, after the last of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.gate import GateEncoding
from dsnet.models import GateState, Supernet
from dsnet.routes import Route
from dsnet.slicing import Mode
from dsnet.training.stage1._losses import ensemble, hard_labels, hierarchical, label_loss
from dsnet.training.stage1.ema import Average
from dsnet.training.stage1.projector import Projector
from dsnet.training.stage1.scheme import Scheme

__all__ = ["NetworkLoss", "NetworkTask", "Passes", "Stage1", "StepLosses", "Tensors"]

Teacher = Callable[[Tensor], Tensor]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLoss:
    """The losses of one network of a step: detached tensors on the device."""

    route: int
    terms: tuple[tuple[str, Tensor], ...]  # name and value of each term, without its weight
    total: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    """The losses of a step: those of each network, and their mean (or sum), which was minimized."""

    networks: tuple[NetworkLoss, ...]
    total: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTask:
    """The work of one network in a step; equal tasks are the same computation on other tensors."""

    route: Route
    mode: Mode | None
    terms: tuple[tuple[str, float], ...]  # name and weight of each term of its loss
    weight: float  # of its loss in the loss of the step
    shares_prefix: bool  # start at the first gate, after the shared prefix; else at the images


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage1:
    """A scheme with everything that its steps need.

    Args:
        scheme: Which networks run, and what each of them learns from.
        average: The moving average of the weights, for ``ib``, ``e-ib`` and ``h-ib``.
        projector: Maps features to those of the largest network, for ``h-ib``.
        teacher: Function from images to logits, for ``ed``.
        smoothing: Label smoothing.
        temperature: Temperature of soft targets.
        add: Add the losses of the networks instead of taking their mean.
        mode: How the networks run.
        largest_mode: How the largest network runs, if it differs.
        autocast: Precision of all forward passes; losses stay in float32.

    Raises:
        DsnetError: The scheme needs another of these arguments, or does not use one of them.
    """

    scheme: Scheme
    average: Average | None = None
    projector: Projector | None = None
    teacher: Teacher | None = None
    smoothing: float = 0.0
    temperature: float = 1.0
    add: bool = False
    mode: Mode | None = None
    largest_mode: Mode | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        needs = {
            "average": (self.scheme.uses_average, self.average),
            "projector": (self.scheme.hierarchical, self.projector),
            "teacher": (self.scheme.external is not None, self.teacher),
        }
        for name, (needed, given) in needs.items():
            if needed != (given is not None):
                raise DsnetError(f"this scheme {'needs' if needed else 'does not take'} the argument {name}")

    def step(
        self,
        model: Supernet,
        routes: Sequence[Route],
        views: Sequence[Tensor],
        labels: Tensor,
        *,
        labels_only: bool = False,
    ) -> StepLosses:
        """Run forward and backward of each network; gradients accumulate in the parameters.

        Args:
            model: The network, in training mode.
            routes: Routes of the step, the largest first.
            views: One batch of images [B, C, H, W] for all networks. If the scheme shows each network its own
                view, one batch per route, and a last one for an external teacher.
            labels: Class indices [B], or probabilities [B, classes].
            labels_only: Train all networks by the labels in this step; no teacher runs.
        """
        return Passes(self, model).step(routes, views, labels, labels_only=labels_only)

    def tasks(self, routes: Sequence[Route], *, labels_only: bool) -> list[NetworkTask]:
        """Return the task of each network."""
        modes = [self.largest_mode or self.mode, *[self.mode] * (len(routes) - 1)]
        same_prefix = [_prefix_mode(mode) == _prefix_mode(modes[-1]) for mode in modes]
        share = sum(same_prefix) > 1 and not self.scheme.own_views and self.projector is None
        share = share and all(route.image_size is None for route in routes)  # each size has its own prefix
        return [
            NetworkTask(
                route=route,
                mode=mode,
                terms=(("label", 1.0),) if labels_only else self.scheme.terms(index),
                weight=1.0 if self.add else 1 / len(routes),
                shares_prefix=share and same,
            )
            for index, (route, mode, same) in enumerate(zip(routes, modes, same_prefix, strict=True))
        ]

    def value(
        self, term: str, logits: Tensor, features: Sequence[Tensor], labels: Tensor, target: Tensors
    ) -> Tensor:
        """Compute a term of a network's loss.

        Args:
            term: Name of the term.
            logits: Logits [B, classes] of the network.
            features: Features predicted by the projector, for ``h-ib``.
            labels: Labels of the step.
            target: The teacher's logits, followed by its features for ``h-ib``.
        """
        if term == "label":
            return label_loss(logits, labels, self.smoothing)
        if term == "h-ib":
            return hierarchical(features, target[1:])
        if (term == "ed" and self.scheme.external == "hard") or self.scheme.hard:
            return label_loss(logits, hard_labels(target[0]))
        return self.scheme.soft_loss(logits, target[0], self.temperature)

    def precision(self, images: Tensor) -> torch.autocast:
        """Return the context of forward passes. Casts are not cached: a pass uses each weight once."""
        return torch.autocast(
            images.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )


def _prefix_mode(mode: Mode | None) -> Mode | None:
    """Return the mode of the prefix, which has no branch and no classifier to drop."""
    if mode is None or (mode.statistics is None and not mode.keep_calibrated):
        return None
    return Mode(statistics=mode.statistics, keep_calibrated=mode.keep_calibrated)


class Passes:
    """The steps of a stage for one network, as passes that a subclass may run in another way."""

    _prefix_end: GateState  # output of the shared prefix
    _start: GateState  # the same, detached: where the networks start
    _teacher_start: GateState  # output of the teacher's prefix

    def __init__(self, stage: Stage1, model: Supernet) -> None:
        self.stage, self.model = stage, model

    def step(
        self, routes: Sequence[Route], views: Sequence[Tensor], labels: Tensor, *, labels_only: bool = False
    ) -> StepLosses:
        """Run a step; for arguments see `Stage1.step`."""
        stage, scheme = self.stage, self.stage.scheme
        expected = scheme.views(len(routes))
        if len(views) != expected:
            raise DsnetError(
                f"a step of {len(routes)} networks needs {expected} views here, not {len(views)}"
            )
        labels_only = labels_only or scheme.label_share == 1
        tasks = stage.tasks(routes, labels_only=labels_only)
        targets: list[Tensors] = [()] * len(routes)
        if not labels_only:
            targets = self._targets(routes, views)
        losses: list[NetworkLoss] = []
        entered = False
        for index, task in enumerate(tasks):
            images = views[index] if scheme.own_views else views[0]
            if task.shares_prefix and not entered:
                self.enter(images, task.mode)
                entered = True
            values, logits = self.network(task, images, labels, targets[index])
            if scheme.target == "id" and index == 0:  # the largest network's own output teaches the others
                targets = [(logits,)] * len(routes)
            *terms, total = values.unbind()
            named = tuple((name, value) for (name, _), value in zip(task.terms, terms, strict=True))
            losses.append(NetworkLoss(route=task.route.number, terms=named, total=total))
        if entered:
            self.leave()
        total = tasks[0].weight * torch.stack([loss.total for loss in losses]).sum()
        return StepLosses(networks=tuple(losses), total=total)

    def _targets(self, routes: Sequence[Route], views: Sequence[Tensor]) -> list[Tensors]:
        """Return what each network learns from besides the labels, as far as it is known before they run."""
        stage = self.stage
        if stage.teacher is not None:
            with torch.no_grad(), stage.precision(views[-1]):
                return [(stage.teacher(views[-1]),)] * len(routes)
        if stage.average is None:
            return [()] * len(routes)
        ensembled = stage.scheme.target == "e-ib"
        outputs, features = self.teach(stage.average, views[0], routes[:-1] if ensembled else routes[:1])
        target = (outputs[0], *features)
        last = (ensemble(outputs), *features) if ensembled else target
        return [(), *[target] * (len(routes) - 2), last][: len(routes)]

    def run(self, key: Hashable, function: Callable[..., Tensors], *inputs: Tensor | Tensors) -> Tensors:
        """Run a pass. Calls with the same key are the same computation on other inputs."""
        return function(*inputs)

    def enter(self, images: Tensor, mode: Mode | None) -> None:
        """Run the shared prefix."""
        with self.stage.precision(images):
            self._prefix_end = self.model.run_prefix(images, _prefix_mode(mode))
        x, encoding, gate, _ = self._prefix_end
        start = x.detach().requires_grad_(x.requires_grad)
        self._start = GateState(start, GateEncoding(encoding.pooled.detach(), encoding.hidden.detach()), gate)

    def leave(self) -> None:
        """Run the shared prefix backward with the gradients of its networks, and release its graph."""
        if self._start.x.requires_grad:
            self._prefix_end.x.backward(self._start.x.grad)  # type: ignore[no-untyped-call]
        del self._prefix_end

    def network(self, task: NetworkTask, images: Tensor, labels: Tensor, target: Tensors) -> Tensors:
        """Run a network forward and backward; return the values of its terms with their total, and logits."""
        inputs = () if task.shares_prefix else (images,)
        return self.run(task, functools.partial(self._network, task), inputs, labels, target)

    def _network(self, task: NetworkTask, images: Tensors, labels: Tensor, target: Tensors) -> Tensors:
        stage, projector = self.stage, self.stage.projector
        features: Sequence[Tensor] = ()
        with stage.precision(labels):
            if task.shares_prefix:
                logits = self.model.run_from_states({(): self._start}, task.route.choices, task.mode)
            elif len(target) > 1 and projector is not None:
                logits, stages = self.model.run_stages(images[0], task.route, task.mode)
                features = projector(stages)
            else:
                logits = self.model(images[0], task.route, mode=task.mode)
        values = [stage.value(term, logits, features, labels, target) for term, _ in task.terms]
        weighted = [weight * value for (_, weight), value in zip(task.terms, values, strict=True)]
        total = torch.stack(weighted).sum()
        (task.weight * total).backward()  # type: ignore[no-untyped-call]
        return torch.stack([*values, total]).detach(), logits.detach()

    def teach(
        self, average: Average, images: Tensor, routes: Sequence[Route]
    ) -> tuple[list[Tensor], Tensors]:
        """Return the average's logits at routes and, for ``h-ib``, its features at the first of them."""
        model, mode, projector = average.model, average.mode, self.stage.projector

        def stages(images: Tensor) -> Tensors:
            assert projector is not None
            logits, stages = model.run_stages(images, routes[0], mode)
            return logits, *projector.select(stages)

        def prefix(images: Tensor) -> Tensors:
            self._teacher_start = model.run_prefix(images, mode)
            return (self._teacher_start.x,)

        def logits(route: Route) -> Tensors:
            return (model.run_from_states({(): self._teacher_start}, route.choices, mode),)

        outputs: list[Tensor] = []
        features: Tensors = ()

        def alone(route: Route, images: Tensor) -> Tensors:
            return (model.run_route(images, route, mode),)

        with torch.no_grad(), self.stage.precision(images):
            if projector is not None:
                output, *rest = self.run(("stages", routes[0]), stages, images)
                outputs, features = [output], tuple(rest)
            if routes[0].image_size is not None:
                for route in routes[len(outputs) :]:
                    outputs += self.run(("alone", route), functools.partial(alone, route), images)
                return outputs, features
            if len(outputs) < len(routes):
                (x,) = self.run("prefix", prefix, images)
                self._teacher_start = self._teacher_start._replace(x=x)
            for route in routes[len(outputs) :]:
                outputs += self.run(("logits", route), functools.partial(logits, route))
        return outputs, features
