"""Gate and weights trained together, in a single stage: the baseline that two stages are compared with.

Every image runs at the route that its gate draws, and the weights learn from it there alone. The gate learns
by straight-through Gumbel-softmax (networks with one gate) or by REINFORCE with a moving baseline.

Labels are smoothed as in Stage I, for weights and gate alike. An image runs at a single network, so the sum
of its networks' losses is their mean: ``scheme.add`` changes nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.core.distributed.ranks import Ranks
from dsnet.core.seeding import reseed
from dsnet.cost import madds
from dsnet.errors import DsnetError
from dsnet.models import GateState, Supernet
from dsnet.slicing import Mode, batch_statistics
from dsnet.training.classifier_task import Objective
from dsnet.training.config import TrainConfig
from dsnet.training.optim import parameter_groups
from dsnet.training.stage1.views import Views

__all__ = ["JointObjective", "gumbel_one_hot", "image_losses", "reinforce"]

LEAST = 2  # images of a group that batch statistics can be made from


def gumbel_one_hot(scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One-hot draws [B, choices] from softmax(scores), with the gradient of the softmax (τ = 1)."""
    uniform = torch.rand(scores.shape, device=scores.device, generator=generator).clamp(min=1e-20)
    soft = F.softmax(scores - torch.log(-torch.log(uniform)), dim=1)
    hard = F.one_hot(soft.argmax(1), scores.shape[1]).to(soft.dtype)
    return hard + soft - soft.detach()


def image_losses(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every image with smoothed labels, which are class numbers or probabilities."""
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)


def reinforce(losses: Tensor, log_p: Tensor, baseline: Tensor | float) -> Tensor:
    """A value whose gradient is that of the expected loss: mean of (loss − baseline) log p."""
    return ((losses.detach() - baseline) * log_p).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """Images that ran at a drawn route."""

    losses: Tensor  # [n]
    log_p: Tensor  # [n], of the decisions that led there
    costs: Tensor  # [n], share of the largest route's multiply-adds


class JointObjective(Objective):
    """The single-stage baseline: gates and weights learn together, from labels."""

    def __init__(
        self, config: TrainConfig, model: Supernet, views: Views, *, ranks: Ranks, image_size: int
    ) -> None:
        method = config.scheme.joint
        assert method is not None
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
        largest = madds(model, model.space.largest, image_size)
        self.costs = {r.choices: madds(model, r, image_size) / largest for r in model.space}
        self.baseline = torch.zeros((), device=self.device)
        self.steps_made = 0

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Weights and routing heads alike."""
        return parameter_groups([self.model], weight_decay, routing=True)

    def step(self, images: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """Forward and backward; losses by name."""
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
        ran = self._walk(state, targets, torch.zeros(len(x), device=self.device), ())
        if not ran:
            raise DsnetError("no two images of the batch drew the same route; use larger batches")
        losses = torch.cat([r.losses for r in ran])
        penalties = torch.cat([r.costs for r in ran]).square()
        paid = losses.detach() + scheme.complexity * penalties
        baseline = self.baseline if self.steps_made else paid.mean()
        gate = reinforce(paid, torch.cat([r.log_p for r in ran]), baseline)
        (losses.mean() + gate).backward()  # type: ignore[no-untyped-call]
        self.baseline = torch.lerp(baseline, paid.mean(), 0.1)
        self.steps_made += 1
        return {
            "drawn/label": losses.mean().detach(),
            "drawn/complexity": penalties.mean(),
            "loss": paid.mean(),
        }

    def _gumbel(self, state: GateState, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The gate learns from all candidates, the weights from the images that drew their route."""
        one_hot = gumbel_one_hot(self.model.gate_scores(state), self.noise)
        choices = [route.choices for route in self.model.space]
        with torch.no_grad():
            still = Mode(statistics=batch_statistics)
            candidates = torch.stack([self.model.run_last_segment(state, c, still) for c in choices])
        mixed = torch.einsum("br,rbc->bc", one_hot, candidates.float())
        costs = one_hot @ torch.tensor([self.costs[c] for c in choices], device=self.device)
        drawn = one_hot.argmax(1)
        losses = []
        for number, choice in enumerate(choices):
            at = (drawn == number).nonzero()[:, 0]
            if len(at) >= LEAST:
                logits = self.model.run_last_segment(state.take(at), choice)
                losses.append(image_losses(logits, labels[at], self.smoothing))
        weights = torch.cat(losses).sum() / len(labels) if losses else mixed.new_zeros(())
        gate = image_losses(mixed, labels, self.smoothing).mean()
        # The value is that of the drawn routes; the gate's gradient comes through the candidates.
        return weights + gate - gate.detach(), costs.square().mean()

    def _walk(self, state: GateState, labels: Tensor, log_p: Tensor, history: tuple[int, ...]) -> list[_Ran]:
        """Draws for what stands at a gate, and runs every group to the next gate or to its loss."""
        scores = self.model.gate_scores(state)
        drawn = torch.multinomial(F.softmax(scores.detach(), dim=1), 1, generator=self.noise)
        log_p = log_p + F.log_softmax(scores, dim=1).gather(1, drawn)[:, 0]
        ran: list[_Ran] = []
        for position, choice in enumerate(self.model.gate(state.gate).choices):
            at = (drawn[:, 0] == position).nonzero()[:, 0]
            if len(at) < LEAST:
                continue
            made, group = (*history, choice), state.take(at)
            if len(made) < len(self.model.gates):
                ran += self._walk(self.model.run_segment(group, made), labels[at], log_p[at], made)
                continue
            losses = image_losses(self.model.run_last_segment(group, made), labels[at], self.smoothing)
            costs = torch.full((len(at),), self.costs[made], device=self.device)
            ran.append(_Ran(losses=losses, log_p=log_p[at], costs=costs))
        return ran

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The moving baseline."""
        return {"joint": {"baseline": self.baseline}}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Takes up the baseline."""
        self.baseline = tensors["joint"]["baseline"].to(self.device)
        self.steps_made = step
