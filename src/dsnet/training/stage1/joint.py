"""Gates and weights trained together in a single stage, the baseline of two-stage training.

Each image runs at the route that its gate draws, and the weights learn from it at that route only. The gate
learns by straight-through Gumbel-softmax (networks with one gate) or by REINFORCE with a moving baseline.

Labels are smoothed as in Stage I, for weights and gates. An image runs at one network, so ``scheme.add`` has
no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.core.distributed.ranks import Ranks
from dsnet.core.seeding import reseed
from dsnet.errors import DsnetError
from dsnet.models import GateState, Supernet
from dsnet.routing.cost_table import CostTable
from dsnet.slicing import Mode, batch_statistics
from dsnet.training.classifier_task import Objective
from dsnet.training.config import TrainConfig
from dsnet.training.optim import parameter_groups
from dsnet.training.stage1.views import Views

__all__ = ["JointObjective", "gumbel_one_hot", "image_losses", "reinforce"]

MIN_GROUP = 2  # images that batch statistics need


def gumbel_one_hot(scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one-hot rows [B, choices] from softmax(scores), with the gradient of the softmax (τ = 1)."""
    uniform = torch.rand(scores.shape, device=scores.device, generator=generator).clamp(min=1e-20)
    soft = F.softmax(scores - torch.log(-torch.log(uniform)), dim=1)
    hard = F.one_hot(soft.argmax(1), scores.shape[1]).to(soft.dtype)
    return hard + soft - soft.detach()


def image_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Compute the cross-entropy of each image with smoothed labels: class indices or probabilities."""
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)


def reinforce(losses: Tensor, log_p: Tensor, baseline: Tensor | float) -> Tensor:
    """Return a value whose gradient is that of the expected loss: the mean of (loss − baseline) log p."""
    return ((losses.detach() - baseline) * log_p).mean()


class JointObjective(Objective):
    """The single-stage baseline: gates and weights learn together, from labels."""

    def __init__(
        self, config: TrainConfig, model: Supernet, views: Views, *, ranks: Ranks, image_size: int
    ) -> None:
        method = config.scheme.joint
        assert method is not None
        model.require_gate()
        if method == "gumbel" and len(model.gates) > 1:
            raise DsnetError(
                f"joint=gumbel is for networks with one gate, {model.spec.name} has {len(model.gates)}; "
                "use joint=reinforce"
            )
        if config.scheme.drop_path or config.scheme.dropout:
            raise DsnetError(
                "joint training has no drop_path and no dropout: set scheme.drop_path and scheme.dropout to 0"
            )
        if ranks.world > 1:
            raise DsnetError("joint training runs on one rank: its groups of images differ between ranks")
        self.config, self.model, self.views, self.method = config, model, views, method
        self.space = model.space
        self.smoothing = config.scheme.smoothing
        self.device = model.head.classifier.weight.device
        self.noise = torch.Generator(self.device)
        table = CostTable.of_model(model, image_size)
        self.costs = {r.choices: table.gated(r.choices) / table.largest for r in model.space}
        self.baseline = torch.zeros((), device=self.device)
        self.steps_made = 0

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return all parameters, those of routing heads included."""
        return parameter_groups([self.model], weight_decay, routing=True)

    def step(self, images: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """Run forward and backward; return losses by name."""
        seed, scheme = self.config.run.seed, self.config.scheme
        reseed(self.noise, seed, "joint", step)
        classes = self.model.head.classifier.out_features
        (x,), targets = self.views(images, labels, count=1, step=step, classes=classes)
        state = self.model.run_prefix(x)
        if self.method == "gumbel":
            label, penalty = self._gumbel(state, targets)
            loss = label + scheme.complexity * penalty
            loss.backward()  # type: ignore[no-untyped-call]
            return {"gate/label": label.detach(), "gate/complexity": penalty.detach(), "loss": loss.detach()}
        groups = self._run_drawn(state, targets, torch.zeros(len(x), device=self.device), ())
        if not groups:
            raise DsnetError("no two images of the batch drew the same route; use larger batches")
        losses, log_p, costs = map(torch.cat, zip(*groups, strict=True))
        penalties = costs.square()
        totals = losses.detach() + scheme.complexity * penalties
        mean = totals.mean()
        baseline = self.baseline if self.steps_made else mean
        loss = losses.mean() + reinforce(totals, log_p, baseline)
        loss.backward()  # type: ignore[no-untyped-call]
        self.baseline = torch.lerp(baseline, mean, 0.1)
        self.steps_made += 1
        return {"drawn/label": losses.mean().detach(), "drawn/complexity": penalties.mean(), "loss": mean}

    def _gumbel(self, state: GateState, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the label loss and the complexity penalty.

        The gate learns from all candidates, the weights from the images that drew their route.
        """
        one_hot = gumbel_one_hot(self.model.gate_scores(state), self.noise)
        choices = [route.choices for route in self.model.space]
        with torch.no_grad():
            mode = Mode(statistics=batch_statistics)
            everyone = state.narrow(0, len(labels))  # what runs here is not what the weights learn from
            candidates = torch.stack([self.model.run_last_segment(everyone, c, mode) for c in choices])
        mixed = torch.einsum("br,rbc->bc", one_hot, candidates.float())
        costs = one_hot @ torch.tensor([self.costs[c] for c in choices], device=self.device)
        drawn = one_hot.argmax(1)
        losses = []
        for number, choice in enumerate(choices):
            index = (drawn == number).nonzero()[:, 0]
            if len(index) >= MIN_GROUP:
                logits = self.model.run_last_segment(state.take(index), choice)
                losses.append(image_losses(logits, labels[index], self.smoothing))
        weights = torch.cat(losses).sum() / len(labels) if losses else mixed.new_zeros(())
        gate = image_losses(mixed, labels, self.smoothing).mean()
        # The value is that of the drawn routes; the gate's gradient comes through the candidates.
        return weights + gate - gate.detach(), costs.square().mean()

    def _run_drawn(
        self, state: GateState, labels: Tensor, log_p: Tensor, history: tuple[int, ...]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Draw a choice for each image at a gate, and run each group to the next gate or to its losses.

        Returns:
            For each group of images at the same route their losses [n], the log-probabilities [n] of the
            decisions that led there, and their costs [n] as shares of the largest route's.
        """
        scores = self.model.gate_scores(state)
        drawn = torch.multinomial(F.softmax(scores.detach(), dim=1), 1, generator=self.noise)
        log_p = log_p + F.log_softmax(scores, dim=1).gather(1, drawn)[:, 0]
        groups: list[tuple[Tensor, Tensor, Tensor]] = []
        for position, choice in enumerate(self.model.gate(len(history)).choices):
            index = (drawn[:, 0] == position).nonzero()[:, 0]
            if len(index) < MIN_GROUP:
                continue
            choices, group = (*history, choice), state.take(index)
            if len(choices) < len(self.model.gates):
                following = self.model.run_segment(group, choices)
                groups += self._run_drawn(following, labels[index], log_p[index], choices)
                continue
            logits = self.model.run_last_segment(group, choices)
            costs = torch.full((len(index),), self.costs[choices], device=self.device)
            groups.append((image_losses(logits, labels[index], self.smoothing), log_p[index], costs))
        return groups

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the moving baseline."""
        return {"joint": {"baseline": self.baseline}}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Load the baseline."""
        self.baseline = tensors["joint"]["baseline"].to(self.device)
        self.steps_made = step
