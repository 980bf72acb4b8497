"""What a network says of the same images at every route and at every gate: made once, asked often.

Weights are frozen in Stage II, so every budget, threshold and comparison can be answered from these.
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
from dsnet.routes import Route
from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import CascadePolicy, GatePolicy, margin, unsure

__all__ = ["RouteOutputs", "Simulation", "collect", "simulate", "walk"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteOutputs:
    """N images at R routes, and their scores at every gate behind every history that leads there."""

    routes: tuple[Route, ...]  # the columns
    labels: Tensor  # [N]
    predicted: Tensor  # [N, R]: the best class
    margins: Tensor  # [N, R]: how sure
    options: tuple[tuple[int, ...], ...]  # what every gate decides between
    scores: tuple[Tensor, ...]  # of every gate: [histories, N, options], histories in order of the choices
    image_size: tuple[int, int]
    digest: str  # of images and labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def correct(self) -> Tensor:
        """[N, R]: whether the route is right."""
        return self.predicted == self.labels[:, None]

    def column(self, number: int) -> int:
        """Where a route's answers are."""
        for column, route in enumerate(self.routes):
            if route.number == number:
                return column
        raise DsnetError(f"nothing is known of route {number}; known: {[r.number for r in self.routes]}")

    def histories(self, gate: int) -> list[tuple[int, ...]]:
        """The choices that lead to a gate, in the order of its scores."""
        return list(itertools.product(*self.options[:gate]))


@torch.no_grad()
def collect(
    model: Supernet, batches: Iterable[tuple[Tensor, Tensor]], routes: Sequence[Route | int] = ()
) -> RouteOutputs:
    """One pass over (images, labels) in eval mode: all routes that the gates can take, and ``routes``.

    Every part of the way that routes share runs once a batch.
    """
    options = tuple(model.gate(stage).choices for stage in range(len(model.gates)))
    taken = {model.space.of_choices(choices) for choices in itertools.product(*options)}
    asked = {model.space.resolve(route) for route in routes}
    chosen = tuple(sorted(taken | asked, key=lambda route: route.number))
    nodes = [list(itertools.product(*options[:gate])) for gate in range(len(options))]
    labels, predicted, margins = [], [], []
    scores: list[list[Tensor]] = [[] for _ in options]
    digest, size, seen = hashlib.sha256(), None, 0
    training = model.training
    model.eval()
    try:
        for images, targets in batches:
            if len(images) != len(targets):
                raise DsnetError(f"{len(images)} images with {len(targets)} labels")
            if not len(images):
                continue
            seen += len(images)
            states: dict[tuple[int, ...], GateState] = {(): model.run_prefix(images)}
            answers = [model.run_from_states(states, route.choices) for route in chosen]
            for gate, histories in enumerate(nodes):
                at_gate = [model.gate_scores(states[history]).float() for history in histories]
                scores[gate].append(torch.stack(at_gate).cpu())
            predicted.append(torch.stack([a.argmax(1) for a in answers], 1).cpu())
            margins.append(torch.stack([margin(a) for a in answers], 1).cpu())
            if not bool(torch.stack([a.isfinite().all() for a in answers]).all()):
                where = [
                    route.number for route, a in zip(chosen, answers, strict=True) if not a.isfinite().all()
                ]
                raise DsnetError(
                    f"{model.name} gives logits that are not finite for some of the images "
                    f"{seen - len(images)} to {seen - 1}, at the routes {shorten(where)}: its weights, its "
                    "norm statistics or these images are damaged, or the precision does not suffice"
                )
            labels.append(targets.cpu())
            sums = images.double().flatten(1).sum(1).cpu()
            digest.update(sums.numpy().tobytes() + targets.cpu().long().numpy().tobytes())
            size = (images.shape[2], images.shape[3])
    finally:
        model.train(training)
    if size is None:
        raise DsnetError("no images to learn from: the data gave no batch")
    return RouteOutputs(
        routes=chosen,
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
    """What a policy would have done with images whose outputs are known."""

    columns: Tensor  # [N]: of the outputs, the route that answered
    costs: Tensor  # [N], float64
    correct: Tensor  # [N]

    @property
    def cost(self) -> float:
        """Mean over the images."""
        return float(self.costs.mean())

    @property
    def cost_error(self) -> float:
        """Standard error of that mean."""
        return float(self.costs.std() / len(self.costs) ** 0.5) if len(self.costs) > 1 else 0.0

    @property
    def accuracy(self) -> float:
        """Share of images that are right."""
        return float(self.correct.double().mean())


def simulate(policy: GatePolicy | CascadePolicy, outputs: RouteOutputs) -> Simulation:
    """Routes, costs and answers of a policy, without running the network.

    By numpy: calibration asks a thousand times for something small, where threads of torch would wait for
    each other longer than they work.
    """
    if isinstance(policy, GatePolicy):
        columns = walk(outputs, policy.costs, policy.weight)
        costs = np.array([policy.costs.of(route.choices) for route in outputs.routes])[columns]
    else:
        columns, costs = _cascade(policy, outputs)
    right = outputs.predicted.numpy()[np.arange(len(outputs)), columns] == outputs.labels.numpy()
    return Simulation(
        columns=torch.from_numpy(columns), costs=torch.from_numpy(costs), correct=torch.from_numpy(right)
    )


def walk(outputs: RouteOutputs, costs: CostTable, weight: float) -> Array:
    """The column [N] that the gates lead every image to, by score − weight · cost / largest cost."""
    every, node = np.arange(len(outputs)), np.zeros(len(outputs), dtype=np.int64)
    penalties = costs.penalties(weight, outputs.options)
    for gate, (options, scores) in enumerate(zip(outputs.options, outputs.scores, strict=True)):
        seen = scores.numpy()[node, every]
        if weight != 0:
            rows = [penalties[gate][history[-1] if history else 0] for history in outputs.histories(gate)]
            seen = seen.astype(np.float64) - np.array(rows)[node]
        node = node * len(options) + seen.argmax(1)
    column_of = {route.choices: column for column, route in enumerate(outputs.routes)}
    leaves = itertools.product(*outputs.options)
    return np.array([column_of[leaf] for leaf in leaves])[node]


def _cascade(policy: CascadePolicy, outputs: RouteOutputs) -> tuple[Array, Array]:
    at = [outputs.column(number) for number in policy.routes]
    ways = [outputs.routes[column].choices for column in at]
    paid = [policy.costs.of_several(ways[: step + 1]) for step in range(len(ways))]
    margins = outputs.margins.numpy()
    columns, costs = np.full(len(outputs), at[0]), np.full(len(outputs), paid[0])
    going = np.ones(len(outputs), dtype=bool)
    for step, threshold in enumerate(policy.thresholds):
        going &= unsure(margins[:, at[step]], threshold)
        columns[going], costs[going] = at[step + 1], paid[step + 1]
    return columns, costs
