"""Accuracy of a supernet's routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsnet.cost import cost
from dsnet.errors import DsnetError
from dsnet.models import State, Supernet, run_gated
from dsnet.routes import Route
from dsnet.slicing import KeyState

__all__ = ["GatedResult", "RouteResult", "evaluate", "evaluate_gated"]


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


@torch.no_grad()
def evaluate(
    model: Supernet, batches: Iterable[tuple[Tensor, Tensor]], routes: Sequence[Route | int] | None = None
) -> list[RouteResult]:
    """Top-1 accuracy of routes (all by default) on batches of (images, labels), in eval mode.

    One pass over the data; the prefix, and every part of the way that routes share, runs once a batch.
    """
    chosen = list(model.space) if routes is None else [model.space.resolve(route) for route in routes]
    training = model.training
    model.eval()
    correct, count, size = {route.choices: 0 for route in chosen}, 0, None
    try:
        for images, labels in batches:
            states: dict[tuple[int, ...], State] = {(): model.enter(images)}
            for choices in correct:
                logits = model.finish_from(states, choices)
                correct[choices] += int((logits.argmax(1) == labels).sum())
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
