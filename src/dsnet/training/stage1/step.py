"""One step of Stage I: the sandwich's networks one after the other, each from forward to backward.

Only one network's graph lives at a time, so a step needs the memory of its largest network. Networks that see
the same images share what lies in front of the first gate: it runs forward once, its end collects their
gradients, and it runs backward once, after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.gate import GateEncoding
from dsnet.models import GateState, Supernet
from dsnet.routes import Route
from dsnet.slicing import Mode
from dsnet.training.stage1.ema import Average
from dsnet.training.stage1.losses import ensemble, hard_labels, hierarchical, label_loss
from dsnet.training.stage1.projector import Projector
from dsnet.training.stage1.scheme import Scheme

__all__ = ["NetworkLoss", "Passes", "Stage1", "StepLosses", "Target", "Task", "run_step"]

Teacher = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLoss:
    """What one network of a step paid, term by term; tensors without gradient, still on the device."""

    route: int
    terms: tuple[tuple[str, Tensor], ...]  # name → value before its weight
    total: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    """What a step paid: one entry a network, and their mean (or sum), which was minimised."""

    networks: tuple[NetworkLoss, ...]
    total: Tensor


class Target(NamedTuple):
    """What a network learns from beside the labels."""

    logits: Tensor | None = None
    features: tuple[Tensor, ...] = ()  # for h-ib


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one network of a step does; equal tasks are the same computation on other tensors."""

    route: Route
    mode: Mode | None
    terms: tuple[str, ...]  # of its loss, by name
    entered: bool  # begins at the first gate, behind the prefix that it shares; else at the images


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage1:
    """A scheme with all it needs to make a step.

    ``views`` of a step are one batch of images for all, or, with views of their own, one for every network in
    the order of the routes and a last one for an external teacher.
    """

    scheme: Scheme
    average: Average | None = None  # for ib, e-ib, h-ib
    projector: Projector | None = None  # for h-ib
    teacher: Teacher | None = None  # for ed: images → logits
    smoothing: float = 0.0  # of labels
    temperature: float = 1.0  # of soft targets
    add: bool = False  # add the networks' losses instead of taking their mean
    mode: Mode | None = None
    largest_mode: Mode | None = None  # of the largest network, where it differs
    autocast: torch.dtype | None = None  # of forward passes, the teacher's too; losses stay in float32

    def __post_init__(self) -> None:
        needs = {
            "average": (self.scheme.uses_average, self.average),
            "projector": (self.scheme.hierarchical, self.projector),
            "teacher": (self.scheme.external is not None, self.teacher),
        }
        for name, (needed, given) in needs.items():
            if needed != (given is not None):
                raise DsnetError(f"this scheme {'needs' if needed else 'has no use for'} the argument {name}")

    def step(
        self,
        model: Supernet,
        routes: Sequence[Route],
        views: Sequence[Tensor],
        labels: Tensor,
        *,
        label_share: float | None = None,
    ) -> StepLosses:
        """Forward and backward of every network; gradients add up in the parameters.

        ``label_share`` takes the place of the scheme's in this step; at 1 no teacher runs.
        """
        return run_step(Passes(self, model), routes, views, labels, label_share)

    # --- what a step is made of ----------------------------------------------------------------------
    def share(self, label_share: float | None) -> float:
        """How much of a taught network's loss comes from the labels in this step."""
        if label_share is None:
            return self.scheme.label_share
        if not 0 <= label_share <= 1:
            raise DsnetError(f"label_share must lie between 0 and 1, not {label_share}")
        if label_share != 1 and self.scheme.target is None and self.scheme.external is None:
            raise DsnetError(
                f"label_share {label_share} needs a scheme with a teacher; this one has labels only"
            )
        return label_share

    def tasks(self, routes: Sequence[Route], share: float) -> list[Task]:
        """What every network does."""
        tasks = []
        for position, route in enumerate(routes):
            mode = self.largest_mode if position == 0 and self.largest_mode is not None else self.mode
            task = Task(route=route, mode=mode, terms=self._terms(position, share), entered=False)
            tasks.append(task)
        alike = [task for task in tasks if _prefix_mode(task.mode) == _prefix_mode(tasks[-1].mode)]
        if len(alike) < 2 or self.scheme.own_views or self.projector is not None:
            return tasks
        return [replace(task, entered=task in alike) for task in tasks]

    def _terms(self, position: int, share: float) -> tuple[str, ...]:
        scheme = self.scheme
        if share == 1 or (scheme.external is None and (scheme.target is None or position == 0)):
            return ("label",)
        label = ("label",) if share > 0 else ()
        if scheme.external is not None:
            return (*label, "ed")
        assert scheme.target is not None
        return (*label, scheme.target, *(("h-ib",) if scheme.hierarchical else ()))

    def weights(self, terms: tuple[str, ...], share: float) -> tuple[float, ...]:
        """The weight of every term of a network's loss."""
        if terms == ("label",):
            return (1.0,)
        rest = (1 - share) / (2 if self.scheme.hierarchical else 1)
        return tuple(share if term == "label" else rest for term in terms)

    def value(
        self, term: str, logits: Tensor, features: Sequence[Tensor], labels: Tensor, target: Target
    ) -> Tensor:
        """A term of a network's loss."""
        if term == "label":
            return label_loss(logits, labels, self.smoothing)
        if term == "h-ib":
            return hierarchical(features, target.features)
        assert target.logits is not None
        if (term == "ed" and self.scheme.external == "hard") or self.scheme.hard:
            return label_loss(logits, hard_labels(target.logits))
        return self.scheme.soft_loss(logits, target.logits, self.temperature)

    def precision(self, at: Tensor) -> torch.autocast:
        """What forward passes run under; casts are not kept, since a step uses every weight once a pass."""
        return torch.autocast(
            at.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )


def _prefix_mode(mode: Mode | None) -> Mode | None:
    """A mode in front of the first gate, where there is neither a branch nor a classifier to drop from."""
    return None if mode is None or mode.statistics is None else Mode(statistics=mode.statistics)


class Passes:
    """The passes of a step, run as they come; `GraphedStep` replays the same ones."""

    _end: GateState  # of the prefix that networks share
    _start: GateState  # where they begin: the same, cut off from the prefix
    _taught: GateState  # the teacher's

    def __init__(self, stage: Stage1, model: Supernet) -> None:
        self.stage, self.model = stage, model

    def enter(self, images: Tensor, mode: Mode | None) -> None:
        """Runs the prefix for the networks that share it."""
        with self.stage.precision(images):
            self._end = self.model.run_prefix(images, _prefix_mode(mode))
        x, encoding, gate, _ = self._end
        start = x.detach().requires_grad_(x.requires_grad)
        self._start = GateState(start, GateEncoding(encoding.pooled.detach(), encoding.hidden.detach()), gate)

    def leave(self) -> None:
        """Runs the prefix backward with what those networks sent back."""
        if self._start.x.requires_grad:
            self._end.x.backward(self._start.x.grad)  # type: ignore[no-untyped-call]

    def network(
        self, task: Task, images: Tensor, labels: Tensor, target: Target, weights: Sequence[float | Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Runs a network forward and backward: what it paid, term by term and in sum, and its logits.

        The last of ``weights`` is the network's own in the step.
        """
        stage, projector, choices = self.stage, self.stage.projector, task.route.choices
        features: Sequence[Tensor] = ()
        with stage.precision(images):
            if task.entered:
                state = self._start
                for gates in range(1, len(choices)):
                    state = self.model.run_segment(state, choices[:gates], task.mode)
                logits = self.model.run_last_segment(state, choices, task.mode)
            elif "h-ib" in task.terms and projector is not None:
                logits, stages = self.model.run_stages(images, task.route, task.mode)
                features = projector(stages)
            else:
                logits = self.model(images, task.route, mode=task.mode)
        values = [stage.value(term, logits, features, labels, target) for term in task.terms]
        *each, own = weights
        total = torch.stack([weight * value for weight, value in zip(each, values, strict=True)]).sum()
        (own * total).backward()  # type: ignore[no-untyped-call]
        return torch.stack([*values, total]).detach(), logits.detach()

    def teach(self, images: Tensor, routes: Sequence[Route]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """The average's logits at routes, and for h-ib its features at the first of them."""
        outputs: list[Tensor] = []
        features: tuple[Tensor, ...] = ()
        if self.stage.projector is not None:
            logits, *features_of_first = self.teacher_stages(images, routes[0])
            outputs, features = [logits], tuple(features_of_first)
        if len(outputs) < len(routes):
            self.teacher_enter(images)
        return [*outputs, *(self.teacher_finish(route) for route in routes[len(outputs) :])], features

    def teacher_stages(self, images: Tensor, route: Route) -> tuple[Tensor, ...]:
        """The average's logits and its supervised stages' features."""
        assert self.stage.average is not None
        assert self.stage.projector is not None
        with self.stage.precision(images):
            logits, stages = self.stage.average.stages(images, route)
        return logits, *self.stage.projector.select(stages)

    def teacher_enter(self, images: Tensor) -> None:
        """The average's prefix, once for all its routes."""
        assert self.stage.average is not None
        with self.stage.precision(images):
            self._taught = self.stage.average.run_prefix(images)

    def teacher_finish(self, route: Route) -> Tensor:
        """The average's logits at a route, from its prefix on."""
        assert self.stage.average is not None
        with self.stage.precision(self._taught.x):
            return self.stage.average.run_last_segment(self._taught, route)

    @torch.no_grad()
    def external(self, images: Tensor) -> Tensor:
        """The external teacher's logits."""
        assert self.stage.teacher is not None
        with self.stage.precision(images):
            return self.stage.teacher(images)


def run_step(
    passes: Passes,
    routes: Sequence[Route],
    views: Sequence[Tensor],
    labels: Tensor,
    label_share: float | None = None,
) -> StepLosses:
    """A step as a sequence of passes."""
    stage, scheme = passes.stage, passes.stage.scheme
    expected = scheme.views(len(routes))
    if len(views) != expected:
        raise DsnetError(f"a step of {len(routes)} networks needs {expected} views here, not {len(views)}")
    share = stage.share(label_share)
    tasks = stage.tasks(routes, share)
    targets = _targets(passes, routes, views, share)
    own = 1.0 if stage.add else 1 / len(routes)
    sharing = [position for position, task in enumerate(tasks) if task.entered]
    paid = []
    for position, task in enumerate(tasks):
        images = views[position] if scheme.own_views else views[0]
        if sharing and position == sharing[0]:
            passes.enter(images, task.mode)
        weights = (*stage.weights(task.terms, share), own)
        values, logits = passes.network(task, images, labels, targets[position], weights)
        if scheme.target == "id" and position == 0:  # the largest network's own output teaches the others
            targets = [Target(logits)] * len(routes)
        *terms, total = values.unbind()
        named = tuple(zip(task.terms, terms, strict=True))
        paid.append(NetworkLoss(route=task.route.number, terms=named, total=total))
    if sharing:
        passes.leave()
    total = own * torch.stack([network.total for network in paid]).sum()
    return StepLosses(networks=tuple(paid), total=total)


def _targets(passes: Passes, routes: Sequence[Route], views: Sequence[Tensor], share: float) -> list[Target]:
    """What every network learns from beside the labels, as far as it is known before they run."""
    scheme = passes.stage.scheme
    if share < 1 and scheme.external is not None:
        return [Target(passes.external(views[-1]))] * len(routes)
    if share == 1 or not scheme.uses_average:
        return [Target()] * len(routes)
    every = scheme.target == "e-ib"
    outputs, features = passes.teach(views[0], routes[:-1] if every else routes[:1])
    target = Target(outputs[0], features)
    last = Target(ensemble(outputs), features) if every else target
    return [Target(), *[target] * (len(routes) - 2), last][: len(routes)]
