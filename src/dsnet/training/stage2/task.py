"""The objective of Stage II: routing heads are trained, the network is frozen."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.core.cuda_graphs import GraphedFunction
from dsnet.core.seeding import reseed
from dsnet.errors import DsnetError
from dsnet.gate import RoutingHead
from dsnet.models import Supernet
from dsnet.routes import Route
from dsnet.routing.cost_table import CostTable
from dsnet.training.classifier_task import Objective
from dsnet.training.stage1.joint import gumbel_one_hot
from dsnet.training.stage1.views import Views
from dsnet.training.stage2._gate_signals import Signals, one_gate, several_gates
from dsnet.training.stage2.config import GateConfig
from dsnet.training.stage2.losses import (
    complexity_penalty,
    even_weights,
    expected_costs,
    mixed_loss,
    sgs_loss,
    sgs_targets,
    value_loss,
)

__all__ = ["GateObjective", "freeze_all_but_heads"]

Terms = dict[str, Tensor]  # losses and statistics by name
Gradients = tuple[Tensor, ...]  # of the routing heads' parameters


class GateObjective(Objective):
    """Trains the routing heads of a network by the outputs of its frozen routes.

    Args:
        config: Settings of Stage II.
        model: The network, on its device.
        views: Makes the views of each step.
        costs: Costs of the network's segments.
        precision: Precision of the network's passes; None: that of its weights.

    Raises:
        DsnetError: The costs or the goal do not fit the network.
    """

    def __init__(
        self,
        config: GateConfig,
        model: Supernet,
        views: Views,
        *,
        costs: CostTable,
        precision: torch.dtype | None = None,
    ) -> None:
        if not costs.fits(model):
            raise DsnetError(f"these costs do not fit {model.spec.name}; use CostTable.of_model")
        if config.goal == "value" and len(model.gates) > 1:
            raise DsnetError(f"goal=value is for networks with one gate, not with {len(model.gates)}")
        self.config, self.model, self.views, self.costs = config, model, views, costs
        self.weights = config.weights(model)
        self.precision = precision
        self.options = [model.gate(stage).choices for stage in range(len(model.gates))]
        candidates = set(itertools.product(*self.options))
        self.space = model.space.narrow([route for route in model.space if route.choices in candidates])
        for route in self.space if len(self.options) > 1 else ():
            model.require_statistics(route)  # norms of single images do not check them
        self.noise = torch.Generator(model.head.classifier.weight.device)
        # A network with one gate runs the same kernels in each step, so that a GPU can replay graphs.
        self._graphed_signals = GraphedFunction(self._compute_signals)
        self._graphed_losses = GraphedFunction(self._losses_of_signals, generators=[self.noise])
        self.parameters = freeze_all_but_heads(model)

    # --- interface of the loop -----------------------------------------------------------------------
    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return the parameters of the routing heads, without decay."""
        return [{"params": self.parameters, "weight_decay": 0.0}]

    def begin_epoch(self) -> None:
        """Put the network into eval mode: its weights and statistics do not change."""
        self.model.eval()

    def step(self, images: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """Run forward and backward; return losses by name."""
        if len(self.options) == 1:
            return self.learn(self.signals(images, labels, step), step)
        reseed(self.noise, self.config.seed, "gate", self.views.rank, step)
        x = self._view(images, labels, step)
        with torch.autocast(x.device.type, self.precision, enabled=self.precision is not None):
            walk = several_gates(self.model, x, self.space, self.noise)
        easy, solved = (logits.argmax(1) == labels for logits in walk.ends)
        label = F.cross_entropy(walk.logits.float(), labels)
        return self._add_gradients(*self._losses(label, walk.scores, walk.draws, easy, solved))

    def validation_routes(self) -> list[Route]:
        """Return no routes: single routes do not change in this stage."""
        return []

    def _view(self, images: Tensor, labels: Tensor, step: int) -> Tensor:
        (x,), _ = self.views(
            images, labels, count=1, step=step, classes=self.model.head.classifier.out_features
        )
        return x

    # --- one gate ------------------------------------------------------------------------------------
    def signals(self, images: Tensor, labels: Tensor, step: int) -> Signals:
        """Compute the signals of a step's view of images [1, B, 3, H, W]."""
        return self._graphed_signals(self._view(images, labels, step), labels)

    def learn(self, signals: Signals, step: int) -> dict[str, Tensor]:
        """Run forward and backward of the routing head; return losses by name."""
        reseed(self.noise, self.config.seed, "gate", self.views.rank, step)
        return self._add_gradients(*self._graphed_losses(signals))

    def _compute_signals(self, x: Tensor, labels: Tensor) -> Signals:
        return one_gate(self.model, x, labels, self.space, self.precision)

    def _losses_of_signals(self, signals: Signals) -> tuple[Terms, Gradients]:
        scores = self.model.gate(0).score(signals.encoding)
        easy, solved = signals.right[:, 0], signals.right[:, -1]
        if self.config.goal == "value":
            value = value_loss(scores, signals.right)
            return self._with_gradients({"gate/value": value}, value, [scores], easy, solved)
        draw = gumbel_one_hot(scores, self.noise)
        label = mixed_loss(draw, signals.losses, signals.pull)
        return self._losses(label, [scores], [draw], easy, solved)

    # --- losses --------------------------------------------------------------------------------------
    def _losses(
        self, label: Tensor, scores: list[Tensor], draws: list[Tensor], easy: Tensor, solved: Tensor
    ) -> tuple[Terms, Gradients]:
        config = self.config
        penalty = complexity_penalty(expected_costs(draws, self.costs, self.options), self.costs.largest)
        targets = [sgs_targets(easy, solved, len(choices), config.strategy) for choices in self.options]
        weights = even_weights(targets[0]) if config.even else None
        sgs = sgs_loss(scores, targets, weights)
        loss = self.weights.target * label + self.weights.complexity * penalty + self.weights.sgs * sgs
        terms = {"gate/target": label, "gate/complexity": penalty, "gate/sgs": sgs}
        return self._with_gradients(terms, loss, scores, easy, solved)

    def _with_gradients(
        self, terms: Terms, loss: Tensor, scores: list[Tensor], easy: Tensor, solved: Tensor
    ) -> tuple[Terms, Gradients]:
        """Return the terms, statistics of the decisions and the loss; then the gradients of the heads."""
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        values = {**terms, **self._decision_statistics(scores, easy, solved), "loss": loss}
        return {name: value.detach() for name, value in values.items()}, gradients

    def _add_gradients(self, terms: Terms, gradients: Gradients) -> Terms:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return terms

    def _decision_statistics(self, scores: list[Tensor], easy: Tensor, solved: Tensor) -> Terms:
        """Compute the shares of the gates' decisions without noise, their entropy, and bits on difficulty."""
        difficulties = torch.stack([easy, solved & ~easy, ~(easy | solved)], 1).float()
        statistics = {}
        for gate, (gate_scores, options) in enumerate(zip(scores, self.options, strict=True)):
            decided = F.one_hot(gate_scores.detach().argmax(1), len(options)).float()
            joint = difficulties.T @ decided / len(difficulties)
            shares = joint.sum(0)
            entropy = _entropy(shares)
            information = entropy + _entropy(joint.sum(1)) - _entropy(joint.flatten())
            statistics[f"entropy/gate_{gate}"] = entropy
            statistics[f"information/gate_{gate}"] = information
            statistics |= {f"taken/gate_{gate}/{c}": share for c, share in zip(options, shares, strict=True)}
        return statistics


def freeze_all_but_heads(model: nn.Module) -> list[Tensor]:
    """Put a model into eval mode, freeze all but its routing heads, and return their parameters."""
    model.eval().requires_grad_(False)
    heads = [module for module in model.modules() if isinstance(module, RoutingHead)]
    return [parameter.requires_grad_(True) for head in heads for parameter in head.parameters()]


def _entropy(shares: Tensor) -> Tensor:
    """Compute the entropy in bits: 0 if a gate always decides the same."""
    return -(shares * shares.clamp(min=1e-12).log2()).sum()
