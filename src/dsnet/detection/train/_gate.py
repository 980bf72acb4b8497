"""Stage II of a detector: the gate learns which route an image needs, the weights stay frozen.

The target loss is the multibox loss of all routes' outputs mixed by a one-hot draw. Sandwich gate
sparsification sends an image to the first route if the smallest route's loss is at most ``ratio`` times the
largest's, else to the last one; with the strategy ``give_up`` only if the largest route solves it, that is,
finds the class of at least a share ``solved`` of the image's matched priors. Costs are those of the whole
detector, as shares of the largest route of the whole network, whatever routes the gate decides between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dsnet.core.seeding import seeded
from dsnet.detection.data.dataset import Boxes
from dsnet.detection.io import SavedDetector
from dsnet.detection.model.fssd import DetectorOutput
from dsnet.detection.train._loss import PriorTargets, correct_shares, multibox_loss, prior_targets
from dsnet.detection.train.config import DetectionConfig, DetectorGateConfig
from dsnet.training.loop import TrainingTask
from dsnet.training.optim import make_optimizer, scheduled_rate
from dsnet.training.stage1.joint import gumbel_one_hot
from dsnet.training.stage2.config import GateConfig
from dsnet.training.stage2.losses import complexity_penalty, sgs_loss, sgs_targets
from dsnet.training.stage2.task import freeze_all_but_heads

__all__ = ["DetectorGateTask", "gate_losses", "mix_outputs"]

Batch = tuple[Tensor, Boxes]


def mix_outputs(outputs: Sequence[DetectorOutput], draw: Tensor) -> DetectorOutput:
    """Mix the outputs of all routes by draws [B, routes]."""
    shares = draw[:, :, None, None].unbind(1)
    offsets = sum((s * o.offsets.float() for s, o in zip(shares, outputs, strict=True)), torch.tensor(0.0))
    logits = sum((s * o.logits.float() for s, o in zip(shares, outputs, strict=True)), torch.tensor(0.0))
    return DetectorOutput(offsets, logits)


def gate_losses(
    scores: Tensor,
    draw: Tensor,
    outputs: Sequence[DetectorOutput],
    targets: PriorTargets,
    costs: Tensor,
    *,
    total: float,
    gate: DetectorGateConfig,
) -> dict[str, Tensor]:
    """Compute the gate's losses by name.

    Args:
        scores: The gate's scores [B, routes].
        draw: A one-hot draw of them [B, routes].
        outputs: What the detector predicts at each route.
        targets: Targets of the priors.
        costs: Costs [routes].
        total: The cost of the network's largest route, which need not be one of these.
        gate: Settings of Stage II.
    """
    with torch.no_grad():
        small, large = (multibox_loss(*outputs[route], targets).by_image() for route in (0, -1))
        easy = small <= gate.ratio * large
        solved = correct_shares(outputs[-1].logits, targets) >= gate.solved
    sparse_targets = sgs_targets(easy, solved, len(outputs), gate.strategy)
    return {
        "target": multibox_loss(*mix_outputs(outputs, draw), targets).mean(),
        "complexity": complexity_penalty(draw @ costs, total),
        "sgs": sgs_loss([scores], [sparse_targets]),
    }


class DetectorGateTask(TrainingTask[Batch]):
    """Trains a new routing head for a detector whose weights stay frozen.

    Args:
        config: Settings of the run.
        saved: The detector and its preprocessing.
        images: Number of training images.
        epoch: Returns the batches of an epoch by its number.
        precision: Precision of the detector's passes; None: that of its weights.
    """

    def __init__(
        self,
        config: DetectionConfig,
        saved: SavedDetector,
        images: int,
        epoch: Callable[[int], Iterable[Batch]],
        precision: torch.dtype | None = None,
    ) -> None:
        self.config, self.detector, self.epoch, self.precision = config, saved.detector, epoch, precision
        network, gate, seed = self.detector.network, config.gate, config.run.seed
        candidates = GateConfig(space=gate.space).routes(network)
        network.reset_routing(candidates, generator=seeded(seed, "heads"))
        self.routes = [network.space.of_choices((choice,)) for choice in network.gate(0).choices]
        device, size = network.head.classifier.weight.device, saved.preprocessing.size
        costs = [float(self.detector.cost(route, size).madds()) for route in self.routes]
        self.costs = torch.tensor(costs, device=device)
        self.total = float(self.detector.cost(network.space.largest, size).madds())
        self.priors = self.detector.priors(size)
        self.noise = seeded(seed, "gate", device=device)
        self.batch_size, self.epoch_steps = gate.batch, -(-images // gate.batch)
        groups = [{"params": freeze_all_but_heads(self.detector), "weight_decay": 0.0}]
        self.optimizer = make_optimizer("sgd", groups, lr=gate.lr)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        gate = self.config.gate
        epoch = step // self.epoch_steps
        steps = gate.epochs * self.epoch_steps
        return scheduled_rate(gate.lr, step, steps=steps, factor=gate.decay**epoch)

    def batches(self, epoch: int, first_step: int) -> Iterable[Batch]:
        """Return all training images of an epoch; this task is not resumed within one."""
        return self.epoch(epoch)

    def step(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """Run forward and backward; return losses by name."""
        gate, terms = self.config.gate, self.losses(*batch)
        weights = {"target": gate.target, "complexity": gate.complexity, "sgs": gate.sgs}
        loss = torch.stack([weights[name] * value for name, value in terms.items()]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return {"loss": loss.detach(), **{name: value.detach() for name, value in terms.items()}}

    def losses(self, x: Tensor, boxes: Boxes) -> dict[str, Tensor]:
        """Compute the gate's losses on images. The prefix runs once, for the gate and all routes."""
        with torch.no_grad():
            targets = prior_targets(self.priors, boxes)
            with torch.autocast(x.device.type, self.precision, enabled=self.precision is not None):
                prefix = self.detector.enter(x)
                outputs = [self.detector.output_from(prefix, route) for route in self.routes]
        assert prefix.encoding is not None
        scores = self.detector.network.gate(0).score(prefix.encoding)
        draw = gumbel_one_hot(scores, self.noise)
        return gate_losses(
            scores, draw, outputs, targets, self.costs, total=self.total, gate=self.config.gate
        )
