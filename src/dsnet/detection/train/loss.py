"""The multibox loss: where boxes are, and what they hold, against the hardest of what holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.detection.boxes import encode, match, match_all
from dsnet.detection.data.dataset import Boxes

__all__ = ["MultiboxLoss", "Targets", "multibox_loss", "right_shares", "targets_in", "targets_of"]

NEGATIVES = 3  # for every prior that stands for a box; for an image without boxes in all


class Targets(NamedTuple):
    """What priors stand for in B images."""

    offsets: Tensor  # [B, p, 4]; of those that stand for nothing: zeros
    classes: Tensor  # [B, p]: 0 is nothing, the others are one higher than their class


class MultiboxLoss(NamedTuple):
    """Sums of every image [B], and the number of its priors that stand for a box."""

    place: Tensor
    kind: Tensor
    matched: Tensor

    def mean(self) -> Tensor:
        """What is minimised: the loss of all images by all their matched priors."""
        return (self.place + self.kind).sum() / self.matched.sum().clamp(min=1)

    def by_image(self) -> Tensor:
        """[B]: every image by its own."""
        return (self.place + self.kind) / self.matched.clamp(min=1)


def targets_of(priors: Tensor, boxes: Sequence[Tensor], classes: Sequence[Tensor]) -> Targets:
    """Matches priors [p, 4] with the boxes [n, 4] of every image, both as shares of the image."""
    offsets, kinds = [], []
    for own, labels in zip(boxes, classes, strict=True):
        own, labels = own.to(priors), labels.to(priors.device, torch.long)
        which = match(priors, own)
        some = which >= 0
        offset = torch.zeros_like(priors)
        kind = torch.zeros(len(priors), dtype=torch.long, device=priors.device)
        offset[some] = encode(own[which[some]], priors[some])
        kind[some] = labels[which[some]] + 1
        offsets.append(offset)
        kinds.append(kind)
    if not offsets:
        return Targets(priors.new_zeros(0, *priors.shape), priors.new_zeros(0, len(priors), dtype=torch.long))
    return Targets(torch.stack(offsets), torch.stack(kinds))


def targets_in(priors: Tensor, boxes: Boxes) -> Targets:
    """`targets_of` for boxes that are padded to one number."""
    which = match_all(priors, boxes.corners, boxes.classes >= 0)
    some = which >= 0
    at = which.clamp(min=0)
    own = boxes.corners.gather(1, at[..., None].expand(-1, -1, 4))
    offsets = torch.where(some[..., None], encode(own, priors), 0.0)
    return Targets(offsets, torch.where(some, boxes.classes.gather(1, at) + 1, 0))


def multibox_loss(offsets: Tensor, logits: Tensor, targets: Targets) -> MultiboxLoss:
    """Of answers [B, p, 4] and [B, p, 1 + classes].

    Smooth L1 of the offsets where there is a box; cross-entropy there and at three times as many priors that
    stand for nothing, those that a detector is most wrong about.
    """
    there = targets.classes > 0
    matched = there.sum(1)
    wanted = NEGATIVES * matched.clamp(min=1)
    with torch.no_grad():
        surprise = F.cross_entropy(logits.float().transpose(1, 2), targets.classes, reduction="none")
        order = surprise.masked_fill(there, -torch.inf).argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(1)
        seen = there | (rank < wanted[:, None])
    # What does not count is cut off before, not after: infinite answers there have no gradient.
    near = torch.where(there[..., None], offsets.float(), targets.offsets.float())
    distance = F.smooth_l1_loss(near, targets.offsets.float(), reduction="none").sum((1, 2))
    kinds = torch.where(seen[..., None], logits.float(), 0.0).transpose(1, 2)
    paid = F.cross_entropy(kinds, targets.classes, reduction="none")
    return MultiboxLoss(distance, torch.where(seen, paid, 0.0).sum(1), matched)


def right_shares(logits: Tensor, targets: Targets) -> Tensor:
    """Share [B] of the priors that stand for a box whose likeliest class is right; 1 without any box."""
    there = targets.classes > 0
    right = there & (logits.argmax(2) == targets.classes)
    matched = there.sum(1)
    return torch.where(matched > 0, right.sum(1) / matched.clamp(min=1), 1.0)
