"""Stage II: gates learn, weights do not change by a bit."""

from __future__ import annotations

from contextlib import AbstractContextManager
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
from dsnet.training.stage2.config import GateConfig
from dsnet.training.stage2.gate_signals import Signals, one_gate, several_gates
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

Terms = dict[str, Tensor]  # losses and what is told, by name
Gradients = tuple[Tensor, ...]  # of the routing heads' parameters


class GateObjective(Objective):
    """Stage II: the routing heads learn, the frozen network tells them what each route makes of an image."""

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
            raise DsnetError(f"these costs are of another network than {model.spec.name}")
        if config.goal == "value" and len(model.gates) > 1:
            raise DsnetError(f"goal=value is for networks with one gate, not with {len(model.gates)}")
        self.config, self.model, self.views, self.costs = config, model, views, costs
        self.weights = config.weights(model)
        self.precision = precision
        self.options = [model.gate(stage).choices for stage in range(len(model.gates))]
        reached = (
            r for r in model.space if all(c in o for c, o in zip(r.choices, self.options, strict=True))
        )
        self.space = model.space.narrow(list(reached))
        for route in self.space if len(self.options) > 1 else ():
            model.require_statistics(route)  # several gates read them by image, where nothing else checks
        self.noise = torch.Generator(model.head.classifier.weight.device)
        # A network with one gate runs the same kernels in every step: graphs, where there is a GPU.
        self._look = GraphedFunction(self._signals)
        self._learn = GraphedFunction(self._learned, generators=[self.noise])
        self.parameters = freeze_all_but_heads(model)

    # --- what the loop asks for ----------------------------------------------------------------------
    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The routing heads, without decay."""
        return [{"params": self.parameters, "weight_decay": 0.0}]

    def begin_epoch(self) -> None:
        """Eval mode: weights and statistics stay what they are."""
        self.model.eval()

    def step(self, images: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """Forward and backward; losses by name."""
        if len(self.options) == 1:
            return self.learn(self.signals(images, labels, step), step)
        reseed(self.noise, self.config.seed, "gate", self.views.rank, step)
        (x,), _ = self._seen(images, labels, step)
        with self._autocast():
            walk = several_gates(self.model, x, self.space, self.noise)
        easy, solved = (logits.argmax(1) == labels for logits in walk.ends)
        label = F.cross_entropy(walk.logits.float(), labels)
        return self._taken_up(*self._pay(label, walk.scores, walk.draws, easy, solved))

    def validation_routes(self) -> list[Route]:
        """None: single routes do not change in this stage."""
        return []

    # --- one gate ------------------------------------------------------------------------------------
    def signals(self, images: Tensor, labels: Tensor, step: int) -> Signals:
        """What the frozen network says of the view of images [1, B, 3, H, W] that belongs to a step."""
        (x,), _ = self._seen(images, labels, step)
        return self._look(x, labels)

    def learn(self, found: Signals, step: int) -> dict[str, Tensor]:
        """Forward and backward of the head alone."""
        reseed(self.noise, self.config.seed, "gate", self.views.rank, step)
        return self._taken_up(*self._learn(found))

    def _signals(self, x: Tensor, labels: Tensor) -> Signals:
        return one_gate(self.model, x, labels, self.space, self.precision)

    def _learned(self, found: Signals) -> tuple[Terms, Gradients]:
        scores = self.model.gate(0).score(found.encoding)
        easy, solved = found.right[:, 0], found.right[:, -1]
        if self.config.goal == "value":
            value = value_loss(scores, found.right)
            told = {
                "gate/value": value.detach(),
                **self._told([scores], easy, solved),
                "loss": value.detach(),
            }
            return told, self._gradients(value)
        draw = gumbel_one_hot(scores, self.noise)
        label = mixed_loss(draw, found.losses, found.pull)
        return self._pay(label, [scores], [draw], easy, solved)

    # --- both ----------------------------------------------------------------------------------------
    def _pay(
        self, label: Tensor, scores: list[Tensor], draws: list[Tensor], easy: Tensor, solved: Tensor
    ) -> tuple[Terms, Gradients]:
        config = self.config
        penalty = complexity_penalty(expected_costs(draws, self.costs, self.options), self.costs.largest)
        targets = [sgs_targets(easy, solved, len(own), config.strategy) for own in self.options]
        weights = even_weights(targets[0]) if config.even else None
        sgs = sgs_loss(scores, targets, weights)
        loss = self.weights.target * label + self.weights.complexity * penalty + self.weights.sgs * sgs
        terms = {"gate/target": label, "gate/complexity": penalty, "gate/sgs": sgs}
        paid = {name: value.detach() for name, value in terms.items()}
        return {**paid, **self._told(scores, easy, solved), "loss": loss.detach()}, self._gradients(loss)

    def _gradients(self, loss: Tensor) -> Gradients:
        return torch.autograd.grad(loss, self.parameters, materialize_grads=True)

    def _taken_up(self, told: Terms, gradients: Gradients) -> Terms:
        """As a backward pass does: gradients are added to those that are there."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return told

    def _told(self, scores: list[Tensor], easy: Tensor, solved: Tensor) -> dict[str, Tensor]:
        """What gates would decide in this batch without noise: shares, entropy, bits about difficulty."""
        kinds = torch.stack([easy, solved & ~easy, ~(easy | solved)], 1).float()
        told = {}
        for gate, (own, options) in enumerate(zip(scores, self.options, strict=True)):
            decided = F.one_hot(own.detach().argmax(1), len(options)).float()
            joint = kinds.T @ decided / len(kinds)
            shares = joint.sum(0)
            entropy = _entropy(shares)
            told[f"entropy/gate_{gate}"] = entropy
            told[f"information/gate_{gate}"] = entropy + _entropy(joint.sum(1)) - _entropy(joint.flatten())
            told |= {f"taken/gate_{gate}/{c}": share for c, share in zip(options, shares, strict=True)}
        return told

    def _seen(self, images: Tensor, labels: Tensor, step: int) -> tuple[list[Tensor], Tensor]:
        classes = self.model.head.classifier.out_features
        return self.views(images, labels, count=1, step=step, classes=classes)

    def _autocast(self) -> AbstractContextManager[object]:
        device = self.model.head.classifier.weight.device.type
        return torch.autocast(device, self.precision, enabled=self.precision is not None)


def freeze_all_but_heads(model: nn.Module) -> list[Tensor]:
    """Put a model into eval mode, freeze all but its routing heads, and return their parameters."""
    model.eval().requires_grad_(False)
    heads = [module for module in model.modules() if isinstance(module, RoutingHead)]
    return [parameter.requires_grad_(True) for head in heads for parameter in head.parameters()]


def _entropy(shares: Tensor) -> Tensor:
    """In bits: 0 where a gate always says the same."""
    return -(shares * shares.clamp(min=1e-12).log2()).sum()
