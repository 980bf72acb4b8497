"""One step of Stage I: the sandwich's networks one after the other, each from forward to backward.

Only one network's graph lives at a time, so a step needs the memory of its largest network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routes import Route
from dsnet.slicing import Mode
from dsnet.training.average import Average
from dsnet.training.losses import ensemble, hard_labels, hierarchical, label_loss, soft_loss
from dsnet.training.projector import Projector
from dsnet.training.schemes import Scheme

__all__ = ["NetworkLoss", "Stage1", "StepLosses"]

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
        self, model: Supernet, routes: Sequence[Route], views: Sequence[Tensor], labels: Tensor
    ) -> StepLosses:
        """Forward and backward of every network; gradients add up in the parameters."""
        expected = self.scheme.views(len(routes))
        if len(views) != expected:
            raise DsnetError(
                f"a step of {len(routes)} networks needs {expected} views here, not {len(views)}"
            )
        targets = _Targets(self, model, routes, views)
        scale = 1.0 if self.add else 1 / len(routes)
        paid = []
        for position, route in enumerate(routes):
            images = views[position] if self.scheme.own_views else views[0]
            logits, features = self._forward(model, images, route, targets)
            terms = self._terms(logits, features, labels, targets, position, len(routes))
            loss = torch.stack([weight * value for _, weight, value in terms]).sum()
            (scale * loss).backward()  # type: ignore[no-untyped-call]
            targets.seen(position, logits)
            named = tuple((name, value.detach()) for name, _, value in terms)
            paid.append(NetworkLoss(route=route.number, terms=named, total=loss.detach()))
        total = scale * torch.stack([network.total for network in paid]).sum()
        return StepLosses(networks=tuple(paid), total=total)

    def _forward(
        self, model: Supernet, images: Tensor, route: Route, targets: _Targets
    ) -> tuple[Tensor, Sequence[Tensor]]:
        if self.projector is None or route == targets.largest:
            return model(images, route, mode=self.mode), ()
        logits, stages = model.run_stages(images, route, self.mode)
        return logits, self.projector(stages)

    def _terms(
        self,
        logits: Tensor,
        features: Sequence[Tensor],
        labels: Tensor,
        targets: _Targets,
        position: int,
        networks: int,
    ) -> list[tuple[str, float, Tensor]]:
        """(name, weight, value) of every term of one network's loss."""
        scheme = self.scheme
        label = label_loss(logits, labels, self.smoothing)
        if scheme.external is not None:
            return [
                ("label", scheme.label_share, label),
                ("ed", 1 - scheme.label_share, targets.external(logits)),
            ]
        if scheme.target is None or position == 0:
            return [("label", 1.0, label)]
        soft = soft_loss(logits, targets.soft(smallest=position == networks - 1), self.temperature)
        rest = 1 - scheme.label_share
        terms: list[tuple[str, float, Tensor]] = [(scheme.target, rest, soft)]
        if scheme.hierarchical:
            terms = [
                (scheme.target, rest / 2, soft),
                ("h-ib", rest / 2, hierarchical(features, targets.features)),
            ]
        return terms if scheme.label_share == 0 else [("label", scheme.label_share, label), *terms]


class _Targets:
    """What the networks of one step learn from, beside the labels."""

    def __init__(
        self, stage: Stage1, model: Supernet, routes: Sequence[Route], views: Sequence[Tensor]
    ) -> None:
        self.stage, self.largest = stage, routes[0]
        self.features: Sequence[Tensor] = ()
        self._outputs: list[Tensor] = []  # of the teachers, the largest first
        average, projector = stage.average, stage.projector
        if average is not None:
            others = routes[1:-1] if stage.scheme.target == "e-ib" else ()
            if projector is None:
                self._outputs.append(average.logits(views[0], self.largest))
            else:
                logits, stages = average.stages(views[0], self.largest)
                self._outputs.append(logits)
                self.features = projector.select(stages)
            self._outputs += [average.logits(views[0], route) for route in others]
        if stage.teacher is not None:
            with torch.no_grad():
                self._outputs.append(stage.teacher(views[-1]))

    def seen(self, position: int, logits: Tensor) -> None:
        """In-place distillation: the largest network's own output is the target of the others."""
        if self.stage.scheme.target == "id" and position == 0:
            self._outputs.append(logits.detach())

    def soft(self, *, smallest: bool) -> Tensor:
        """Logits of the target of a network below the largest."""
        if self.stage.scheme.target == "e-ib" and smallest:
            return ensemble(self._outputs)
        return self._outputs[0]

    def external(self, logits: Tensor) -> Tensor:
        """The loss towards the external teacher."""
        (output,) = self._outputs
        if self.stage.scheme.external == "hard":
            return label_loss(logits, hard_labels(output))
        return soft_loss(logits, output, self.stage.temperature)
