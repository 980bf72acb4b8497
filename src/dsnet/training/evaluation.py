"""Accuracy of a supernet: at given routes, and where its gates decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsnet.cost import cost
from dsnet.errors import DsnetError
from dsnet.models import GateState, Supernet, run_gated
from dsnet.routes import Route
from dsnet.routing.cost_table import CostTable
from dsnet.slicing import KeyState

__all__ = [
    "ClassResults",
    "Confusion",
    "GatedResult",
    "OnPredictions",
    "RouteResult",
    "eval_mode",
    "evaluate",
    "evaluate_gated",
]

OnPredictions = Callable[[Route, Tensor, Tensor], None]
"""Gets a route, the predicted classes [B] and the labels [B] of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteResult:
    """Accuracy and cost of a route."""

    route: int
    correct: int
    images: int
    madds: int
    params: int
    statistics: str  # of its norms: fresh, running or calibrated
    image_size: int | None = None  # of the route, where routes differ in it

    @property
    def accuracy(self) -> float:
        """Share of images whose best class is right."""
        return self.correct / self.images

    @property
    def label(self) -> str:
        """The number of the route, with its image size where routes differ in it."""
        return f"{self.route}" if self.image_size is None else f"{self.route} ({self.image_size} px)"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types), without an image size where routes do not differ in it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedResult:
    """Accuracy and cost of a network whose gates decide."""

    correct: int
    images: int
    madds: float  # mean of an image
    taken: dict[int, int]  # route → images

    @property
    def accuracy(self) -> float:
        """Share of images whose best class is right."""
        return self.correct / self.images


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResults:
    """Results of a route by class."""

    route: int
    images: tuple[int, ...]  # of each class
    correct: tuple[int, ...]
    confused: tuple[tuple[int, int, int], ...]  # (label, prediction, images), the most frequent first


class Confusion:
    """Counts predictions by label at one route; `add` is for `evaluate`."""

    def __init__(self, route: Route, classes: int, device: torch.device) -> None:
        self.route, self.classes = route, classes
        self.counts = torch.zeros(classes, classes, dtype=torch.long, device=device)

    def add(self, route: Route, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch if it is of this route."""
        if route == self.route:
            pairs = torch.bincount(labels * self.classes + predictions, minlength=self.counts.numel())
            self.counts += pairs.view_as(self.counts)

    def results(self, counts: Tensor, max_pairs: int = 10) -> ClassResults:
        """Return results from ``counts`` [classes, classes] by label and prediction."""
        counts = counts.cpu()
        wrong = counts.clone().fill_diagonal_(0).flatten()
        frequent = wrong.sort(descending=True, stable=True).indices[:max_pairs].tolist()
        return ClassResults(
            route=self.route.number,
            images=tuple(counts.sum(1).tolist()),
            correct=tuple(counts.diag().tolist()),
            confused=tuple((*divmod(i, self.classes), int(wrong[i])) for i in frequent if wrong[i] > 0),
        )


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode, and back into its mode at the end."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def _count_correct(logits: Tensor, labels: Tensor) -> int:
    """Count images whose best class is right; NaN would be the best class, whatever it stands for."""
    return int(((logits.argmax(1) == labels) & logits.isfinite().all(1)).sum())


@torch.no_grad()
def evaluate(
    model: Supernet,
    batches: Iterable[tuple[Tensor, Tensor]],
    routes: Sequence[Route | int] | None = None,
    *,
    on_predictions: OnPredictions | None = None,
) -> list[RouteResult]:
    """Compute the accuracy of routes in one pass over the data, in eval mode.

    The prefix, and each segment that routes share, runs once per batch.

    Args:
        model: The network.
        batches: Images [B, C, H, W] and labels [B].
        routes: Routes to evaluate (default: all of the space).
        on_predictions: Called for each route and batch.

    Raises:
        DsnetError: There is no batch.
    """
    chosen = list(model.space) if routes is None else [model.space.resolve(route) for route in routes]
    correct, count, shape = dict.fromkeys(chosen, 0), 0, None
    with eval_mode(model):
        for images, labels in batches:
            states: dict[tuple[int, ...], GateState] = {(): model.run_prefix(images)}
            for route in correct:
                logits = model.run_from_states(states, route.choices)
                correct[route] += _count_correct(logits, labels)
                if on_predictions is not None:
                    on_predictions(route, logits.argmax(1), labels)
            count, shape = count + len(labels), images.shape
    if shape is None:
        raise DsnetError("no images to evaluate on: the data gave no batch")
    results = []
    for route in chosen:
        counted = cost(model, route, (shape[2], shape[3]))
        states_used = model.key_states(route) or {KeyState.CALIBRATED}  # group norms need none
        results.append(
            RouteResult(
                route=route.number,
                correct=correct[route],
                images=count,
                madds=counted.madds(),
                params=counted.params,
                statistics=min(states_used).name.lower(),
                image_size=route.image_size,
            )
        )
    return results


@torch.no_grad()
def evaluate_gated(model: Supernet, batches: Iterable[tuple[Tensor, Tensor]]) -> GatedResult:
    """Compute accuracy and mean multiply-adds where the gates decide, in eval mode.

    Args:
        model: The network.
        batches: Images [B, C, H, W] and labels [B].

    Raises:
        DsnetError: There is no batch.
    """
    correct, shape = 0, None
    taken: dict[int, int] = {}
    with eval_mode(model):
        for images, labels in batches:
            output = run_gated(model, images)
            correct += _count_correct(output.logits, labels)
            for choices in output.choices.tolist():
                number = model.space.of_choices(choices).number
                taken[number] = taken.get(number, 0) + 1
            shape = images.shape
    if shape is None:
        raise DsnetError("no images to evaluate on: the data gave no batch")
    count = sum(taken.values())
    table = CostTable.of_model(model, (shape[2], shape[3]))
    total = sum(table.gated(model.space.resolve(route).choices) * n for route, n in taken.items())
    return GatedResult(correct=correct, images=count, madds=total / count, taken=dict(sorted(taken.items())))
