"""Accuracy of a supernet's routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsnet.cost import cost
from dsnet.errors import DsnetError
from dsnet.models import GateState, Supernet, run_gated
from dsnet.routes import Route
from dsnet.slicing import KeyState

__all__ = ["ClassResults", "Confusion", "GatedResult", "RouteResult", "Seen", "evaluate", "evaluate_gated"]

Seen = Callable[[Route, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteResult:
    """What a route reached, and what it costs."""

    route: int
    correct: int
    images: int
    madds: int
    params: int
    statistics: str  # fresh, running or calibrated: where its norms' statistics come from

    @property
    def accuracy(self) -> float:
        """Share of images whose best class is right."""
        return self.correct / self.images


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResults:
    """What a route reached class by class, and what it takes for what."""

    route: int
    images: tuple[int, ...]  # of every class
    correct: tuple[int, ...]
    confused: tuple[tuple[int, int, int], ...]  # (class, taken for, images), the most frequent first


class Confusion:
    """Counts answers by label at one route; `add` is for `evaluate`."""

    def __init__(self, route: Route, classes: int, device: torch.device) -> None:
        self.route, self.classes = route, classes
        self.counts = torch.zeros(classes, classes, dtype=torch.long, device=device)

    def add(self, route: Route, answers: Tensor, labels: Tensor) -> None:
        """Takes a batch in, if it is of this route."""
        if route == self.route:
            pairs = torch.bincount(labels * self.classes + answers, minlength=self.counts.numel())
            self.counts += pairs.view_as(self.counts)

    def results(self, counts: Tensor, most: int = 10) -> ClassResults:
        """What ``counts`` [classes, classes], by label and answer, say; so many pairs at most."""
        counts = counts.cpu()
        wrong = counts.clone().fill_diagonal_(0).flatten()
        best = wrong.sort(descending=True, stable=True).indices[:most].tolist()
        pairs = [(*divmod(at, self.classes), int(wrong[at])) for at in best if wrong[at] > 0]
        return ClassResults(
            route=self.route.number,
            images=tuple(counts.sum(1).tolist()),
            correct=tuple(counts.diag().tolist()),
            confused=tuple(pairs),
        )


@torch.no_grad()
def evaluate(
    model: Supernet,
    batches: Iterable[tuple[Tensor, Tensor]],
    routes: Sequence[Route | int] | None = None,
    *,
    seen: Seen | None = None,
) -> list[RouteResult]:
    """Top-1 accuracy of routes (all by default) on batches of (images, labels), in eval mode.

    One pass over the data; the prefix, and every part of the way that routes share, runs once a batch. Who
    wants to know more is called with the route, its answers [B] and the labels [B] of every batch (``seen``).
    """
    chosen = list(model.space) if routes is None else [model.space.resolve(route) for route in routes]
    training = model.training
    model.eval()
    correct, count, size = {route.choices: 0 for route in chosen}, 0, None
    different = {route.choices: route for route in chosen}.values()
    try:
        for images, labels in batches:
            states: dict[tuple[int, ...], GateState] = {(): model.run_prefix(images)}
            for route in different:
                answers = model.run_from_states(states, route.choices).argmax(1)
                correct[route.choices] += int((answers == labels).sum())
                if seen is not None:
                    seen(route, answers, labels)
            count += len(labels)
            size = (images.shape[2], images.shape[3])
    finally:
        model.train(training)
    if size is None:
        raise DsnetError("no images to evaluate on: the data gave no batch")
    results = []
    for route in chosen:
        counted = cost(model, route, size)
        states_used = model.key_states(route) or {KeyState.CALIBRATED}  # group norms need none
        results.append(
            RouteResult(
                route=route.number,
                correct=correct[route.choices],
                images=count,
                madds=counted.madds(),
                params=counted.params,
                statistics=min(states_used).name.lower(),
            )
        )
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedResult:
    """What a network reached where its gates decided, and what that cost."""

    correct: int
    images: int
    madds: float  # mean of an image
    taken: dict[int, int]  # route → images

    @property
    def accuracy(self) -> float:
        """Share of images whose best class is right."""
        return self.correct / self.images


@torch.no_grad()
def evaluate_gated(model: Supernet, batches: Iterable[tuple[Tensor, Tensor]]) -> GatedResult:
    """Top-1 accuracy and mean multiply-adds with the gates' own decisions, in eval mode."""
    training = model.training
    model.eval()
    correct, count, size = 0, 0, None
    taken: dict[int, int] = {}
    try:
        for images, labels in batches:
            output = run_gated(model, images)
            correct += int((output.logits.argmax(1) == labels).sum())
            for choices in output.choices.tolist():
                number = model.space.of_choices(choices).number
                taken[number] = taken.get(number, 0) + 1
            count += len(labels)
            size = (images.shape[2], images.shape[3])
    finally:
        model.train(training)
    if size is None:
        raise DsnetError("no images to evaluate on: the data gave no batch")
    total = sum(cost(model, number, size).madds() * images for number, images in taken.items())
    return GatedResult(correct=correct, images=count, madds=total / count, taken=dict(sorted(taken.items())))
