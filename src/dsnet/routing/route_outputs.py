"""Outputs of a network at every route and gate, recorded once, and what a policy would do with them.

Weights are frozen in Stage II, so every budget, threshold and comparison can be computed from these.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsnet.errors import DsnetError, shorten
from dsnet.models import GateState, Supernet
from dsnet.routes import Route, RouteSpace
from dsnet.routing.policies import Policy, margin

__all__ = ["Array", "RouteOutputs", "Simulation", "collect", "simulate"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteOutputs:
    """Predictions for N images at R routes, and gate scores for every history of choices."""

    space: RouteSpace  # of the network
    routes: tuple[Route, ...]  # one per column
    labels: Tensor  # [N]
    predicted: Tensor  # [N, R]: the most probable class
    margins: Tensor  # [N, R]: its confidence, see `dsnet.routing.policies.margin`
    options: tuple[tuple[int, ...], ...]  # choices of every gate
    scores: tuple[Tensor, ...]  # of every gate: [histories, N, options], histories in order of the choices
    image_size: tuple[int, int]
    digest: str  # of images and labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def correct(self) -> Tensor:
        """Whether each route's prediction is correct, [N, R]."""
        return self.predicted == self.labels[:, None]

    def column(self, number: int) -> int:
        """Return the column of a route."""
        for column, route in enumerate(self.routes):
            if route.number == number:
                return column
        raise DsnetError(
            f"route {number} was not recorded; recorded: {[route.number for route in self.routes]}"
        )

    def histories(self, gate: int) -> list[tuple[int, ...]]:
        """Return the choices that lead to a gate, in the order of its scores."""
        return list(itertools.product(*self.options[:gate]))


@torch.no_grad()
def collect(
    model: Supernet, batches: Iterable[tuple[Tensor, Tensor]], routes: Sequence[Route | int] = ()
) -> RouteOutputs:
    """Record the outputs of a network in eval mode.

    Every segment that routes share runs once per batch.

    Args:
        model: A supernet with trained gates or without.
        batches: Pairs of images [B, C, H, W] and labels [B].
        routes: Routes to record beside all that the gates can take.

    Raises:
        DsnetError: If there is no image, or logits are not finite.
    """
    options = tuple(model.gate(stage).choices for stage in range(len(model.gates)))
    gated = {model.space.of_choices(choices) for choices in itertools.product(*options)}
    given = {model.space.resolve(route) for route in routes}
    recorded = tuple(sorted(gated | given, key=lambda route: route.number))
    nodes = [list(itertools.product(*options[:gate])) for gate in range(len(options))]
    labels, predicted, margins = [], [], []
    scores: list[list[Tensor]] = [[] for _ in options]
    digest, size, count = hashlib.sha256(), None, 0
    training = model.training
    model.eval()
    try:
        for images, targets in batches:
            if len(images) != len(targets):
                raise DsnetError(f"{len(images)} images with {len(targets)} labels")
            if not len(images):
                continue
            count += len(images)
            states: dict[tuple[int, ...], GateState] = {(): model.run_prefix(images)}
            logits = [model.run_from_states(states, route.choices) for route in recorded]
            for gate, histories in enumerate(nodes):
                at_gate = [model.gate_scores(states[history]).float() for history in histories]
                scores[gate].append(torch.stack(at_gate).cpu())
            predicted.append(torch.stack([z.argmax(1) for z in logits], 1).cpu())
            margins.append(torch.stack([margin(z) for z in logits], 1).cpu())
            if not bool(torch.stack([z.isfinite().all() for z in logits]).all()):
                where = [r.number for r, z in zip(recorded, logits, strict=True) if not z.isfinite().all()]
                raise DsnetError(
                    f"{model.name} gives logits that are not finite for some of the images "
                    f"{count - len(images)} to {count - 1}, at the routes {shorten(where)}: its weights, its "
                    "norm statistics or these images are damaged, or the precision does not suffice"
                )
            labels.append(targets.cpu())
            sums = images.double().flatten(1).sum(1).cpu()
            digest.update(sums.numpy().tobytes() + targets.cpu().long().numpy().tobytes())
            size = (images.shape[2], images.shape[3])
    finally:
        model.train(training)
    if size is None:
        raise DsnetError("no images to calibrate on: the data gave no batch")
    return RouteOutputs(
        space=model.space,
        routes=recorded,
        labels=torch.cat(labels),
        predicted=torch.cat(predicted),
        margins=torch.cat(margins),
        options=options,
        scores=tuple(torch.cat(parts, 1) for parts in scores),
        image_size=size,
        digest=digest.hexdigest(),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """What a policy would do with images whose outputs are recorded."""

    columns: Tensor  # [N]: the column of the route that answers
    costs: Tensor  # [N], float64
    correct: Tensor  # [N]

    @property
    def cost(self) -> float:
        """Mean cost of an image."""
        return float(self.costs.mean())

    @property
    def cost_error(self) -> float:
        """Standard error of the mean cost."""
        return float(self.costs.std() / len(self.costs) ** 0.5) if len(self.costs) > 1 else 0.0

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return float(self.correct.double().mean())


def simulate(policy: Policy, outputs: RouteOutputs) -> Simulation:
    """Return routes, costs and correctness of a policy without running the network.

    Computed by numpy: calibration simulates a thousand small batches, on which threads of torch wait for each
    other longer than they work.
    """
    columns = policy.replay(outputs)
    costs = np.zeros(len(outputs.routes))
    for column in np.flatnonzero(np.bincount(columns)).tolist():
        costs[column] = policy.cost(outputs.space, outputs.routes[column].number)
    correct = outputs.predicted.numpy()[np.arange(len(outputs)), columns] == outputs.labels.numpy()
    return Simulation(
        columns=torch.from_numpy(columns),
        costs=torch.from_numpy(costs[columns]),
        correct=torch.from_numpy(correct),
    )
