"""Stage II of a detector: the gate learns which route an image needs, weights do not change.

CLS is the multibox loss of all routes' answers mixed by a one-hot draw. Sandwich gate sparsification sends an
image to the first route where the smallest route's loss is at most ``ratio`` times the largest's, else to the
last one; by the strategy ``give_up`` only if the largest solves it: gives the right class to at least a share
``solved`` of the priors that stand for a box. Cost counts the whole detector, as a share of the largest route
of the whole network, however few the gate decides between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import SGD

from dsnet.core.metrics_log import LossBuffer
from dsnet.core.seeding import seeded
from dsnet.detection.data.dataset import Boxes
from dsnet.detection.io import SavedDetector
from dsnet.detection.model.fssd import DetectorOutput
from dsnet.detection.train.config import DetectionConfig, DetectorGateConfig
from dsnet.detection.train.loss import PriorTargets, correct_shares, multibox_loss, prior_targets
from dsnet.gate import RoutingHead
from dsnet.training.callbacks import Callback
from dsnet.training.optim import set_learning_rate
from dsnet.training.stage1.joint import gumbel_one_hot
from dsnet.training.stage2.config import GateConfig
from dsnet.training.stage2.losses import complexity_penalty, sgs_loss, sgs_targets

__all__ = ["DetectorGateTask", "gate_terms", "mixed"]

Epoch = Callable[[int], Iterator[tuple[Tensor, Boxes]]]


def mixed(answers: list[DetectorOutput], draw: Tensor) -> DetectorOutput:
    """DetectorOutput of all routes mixed by draws [B, routes]."""
    shares = draw[:, :, None, None].unbind(1)
    offsets = sum((s * a.offsets.float() for s, a in zip(shares, answers, strict=True)), torch.tensor(0.0))
    logits = sum((s * a.logits.float() for s, a in zip(shares, answers, strict=True)), torch.tensor(0.0))
    return DetectorOutput(offsets, logits)


def gate_terms(
    scores: Tensor,
    draw: Tensor,
    answers: list[DetectorOutput],
    targets: PriorTargets,
    costs: Tensor,
    *,
    total: float,
    gate: DetectorGateConfig,
) -> dict[str, Tensor]:
    """What the gate pays, by name: of scores and a one-hot draw of them [B, routes], costs [routes].

    ``total`` is the cost of the network's largest route, which need not be one of these.
    """
    with torch.no_grad():
        small, large = (multibox_loss(*answers[at], targets).by_image() for at in (0, -1))
        easy = small <= gate.ratio * large
        solved = correct_shares(answers[-1].logits, targets) >= gate.solved
    wanted = sgs_targets(easy, solved, len(answers), gate.strategy)
    return {
        "target": multibox_loss(*mixed(answers, draw), targets).mean(),
        "complexity": complexity_penalty(draw @ costs, total),
        "sgs": sgs_loss([scores], [wanted]),
    }


class DetectorGateTask:
    """New routing heads for a detector whose weights stay."""

    def __init__(self, config: DetectionConfig, found: SavedDetector, precision: torch.dtype | None) -> None:
        self.config, self.detector, self.precision = config, found.detector, precision
        network, seed = self.detector.network, config.run.seed
        network.reset_routing(
            GateConfig(space=config.gate.space).routes(network), generator=seeded(seed, "heads")
        )
        self.routes = [network.space.of_choices((choice,)) for choice in network.gate(0).choices]
        self.device = network.head.classifier.weight.device
        size = found.preprocessing.size
        self.costs = torch.tensor(
            [float(self.detector.cost(route, size).madds()) for route in self.routes], device=self.device
        )
        self.total = float(self.detector.cost(network.space.largest, size).madds())
        self.priors = self.detector.priors(size)
        self.detector.eval().requires_grad_(False)
        self.parameters = [
            parameter.requires_grad_(True)
            for module in network.modules()
            if isinstance(module, RoutingHead)
            for parameter in module.parameters()
        ]

    def train(
        self,
        epoch: Epoch,
        steps: int,
        callback: Callback,
        said: Callable[[str], None] = lambda message: None,
    ) -> None:
        """So many steps an epoch, of its batches; ``said`` hears what every epoch paid."""
        gate = self.config.gate
        optimizer = SGD(self.parameters, lr=gate.lr, momentum=0.9, nesterov=True)
        noise = seeded(self.config.run.seed, "gate", device=self.device)
        for number in range(gate.epochs):
            set_learning_rate(optimizer, gate.lr * gate.decay**number)
            losses = LossBuffer()
            batches = callback.progress(epoch(number), steps, f"gate, epoch {number + 1}: batch")
            for place, (x, boxes) in enumerate(batches):
                terms = self.terms(x, boxes, noise)
                weights = {"target": gate.target, "complexity": gate.complexity, "sgs": gate.sgs}
                optimizer.zero_grad()
                total = torch.stack([weights[name] * value for name, value in terms.items()]).sum()
                total.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.add(number * steps + place, terms)
            paid = ", ".join(f"{name} {value:.3f}" for name, value in losses.means().items())
            said(f"gate, epoch {number + 1} of {gate.epochs}: {paid}")
        self.detector.requires_grad_(True)

    def terms(self, x: Tensor, boxes: Boxes, noise: torch.Generator) -> dict[str, Tensor]:
        """What the gate pays for these images. The prefix runs once, for the gate and all routes."""
        with torch.no_grad():
            targets = prior_targets(self.priors, boxes)
            with torch.autocast(x.device.type, self.precision, enabled=self.precision is not None):
                entered = self.detector.enter(x)
                answers = [self.detector.output_from(entered, route) for route in self.routes]
        assert entered.encoding is not None
        scores = self.detector.network.gate(0).score(entered.encoding)
        draw = gumbel_one_hot(scores, noise)
        return gate_terms(scores, draw, answers, targets, self.costs, total=self.total, gate=self.config.gate)
