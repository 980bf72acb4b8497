"""The multibox loss of SSD: offsets of matched priors, and classes with hard negative mining."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.detection.boxes import encode, match_batch
from dsnet.detection.data.dataset import Boxes

__all__ = ["MultiboxLoss", "PriorTargets", "correct_shares", "multibox_loss", "prior_targets"]

NEGATIVES = 3  # for each matched prior; an image without boxes gets as many in all


class PriorTargets(NamedTuple):
    """What the priors of B images should predict."""

    offsets: Tensor  # [B, p, 4]; zeros for unmatched priors
    classes: Tensor  # [B, p]: 0 is the background, others are one above their label


class MultiboxLoss(NamedTuple):
    """Sums over the priors of each image [B], and the number of its matched priors."""

    offsets: Tensor
    classes: Tensor
    matched: Tensor

    def mean(self) -> Tensor:
        """Return the training loss: the sum over all images, divided by the number of matched priors."""
        return (self.offsets + self.classes).sum() / self.matched.sum().clamp(min=1)

    def by_image(self) -> Tensor:
        """Return the loss [B] of each image, divided by the number of its matched priors."""
        return (self.offsets + self.classes) / self.matched.clamp(min=1)


def prior_targets(priors: Tensor, boxes: Boxes) -> PriorTargets:
    """Match priors [p, 4] with the boxes of each image and encode them."""
    matched = match_batch(priors, boxes.corners, boxes.classes >= 0)
    positive = matched >= 0
    index = matched.clamp(min=0)
    corners = boxes.corners.gather(1, index[..., None].expand(-1, -1, 4))
    offsets = torch.where(positive[..., None], encode(corners, priors), 0.0)
    return PriorTargets(offsets, torch.where(positive, boxes.classes.gather(1, index) + 1, 0))


def multibox_loss(offsets: Tensor, logits: Tensor, targets: PriorTargets) -> MultiboxLoss:
    """Compute the loss of predicted offsets [B, p, 4] and logits [B, p, 1 + classes].

    The offsets of matched priors have a smooth L1 loss. Classes have a cross-entropy for the matched priors
    and for three times as many unmatched ones: those with the largest loss.
    """
    positive = targets.classes > 0
    matched = positive.sum(1)
    negatives = NEGATIVES * matched.clamp(min=1)
    with torch.no_grad():
        losses = F.cross_entropy(logits.float().transpose(1, 2), targets.classes, reduction="none")
        order = losses.masked_fill(positive, -torch.inf).argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(1)
        selected = positive | (rank < negatives[:, None])
    # Mask the inputs, not the losses: infinite predictions that do not count then have no gradient.
    predicted = torch.where(positive[..., None], offsets.float(), targets.offsets.float())
    distance = F.smooth_l1_loss(predicted, targets.offsets.float(), reduction="none").sum((1, 2))
    masked = torch.where(selected[..., None], logits.float(), 0.0).transpose(1, 2)
    entropy = F.cross_entropy(masked, targets.classes, reduction="none")
    return MultiboxLoss(distance, torch.where(selected, entropy, 0.0).sum(1), matched)


def correct_shares(logits: Tensor, targets: PriorTargets) -> Tensor:
    """Compute the share [B] of an image's matched priors whose best class is right; 1 without any."""
    positive = targets.classes > 0
    correct = positive & (logits.argmax(2) == targets.classes)
    matched = positive.sum(1)
    return torch.where(matched > 0, correct.sum(1) / matched.clamp(min=1), 1.0)
