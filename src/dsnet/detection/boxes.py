"""Boxes as corners [n, 4]: left, top, right, bottom; priors as centres and sizes [n, 4]: x, y, width, height.

Coordinates are continuous: a box from 0 to 2 has a side of 2, and the first pixel of an image lies between
0 and 1. In files that count pixels from 1 and include the last one, as those of Pascal VOC, left and top are
one too high.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = [
    "VARIANCES",
    "area",
    "centres",
    "corners",
    "decode",
    "encode",
    "iou",
    "kept_of",
    "match",
    "match_all",
    "nms",
]

TINY = 1e-6  # the least side of a box that is encoded: of none the logarithm is infinite
VARIANCES = (0.1, 0.2)  # of centres and of sizes: offsets are divided by them


def area(boxes: Tensor) -> Tensor:
    """[n], nothing where right is left of left or bottom above top."""
    return (boxes[..., 2] - boxes[..., 0]).clamp(min=0) * (boxes[..., 3] - boxes[..., 1]).clamp(min=0)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of every box with every other: [n, 4], [m, 4] → [n, m]; 0 where it is 0 / 0."""
    left_top = torch.maximum(a[:, None, :2], b[None, :, :2])
    right_bottom = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (right_bottom - left_top).clamp(min=0).prod(2)
    union = area(a)[:, None] + area(b) - common
    return torch.where(union > 0, common / union, 0.0)


def corners(boxes: Tensor) -> Tensor:
    """From centres and sizes."""
    half = boxes[..., 2:] / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)


def centres(boxes: Tensor) -> Tensor:
    """Centres and sizes, from corners."""
    return torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], -1)


def encode(boxes: Tensor, priors: Tensor) -> Tensor:
    """Offsets [n, 4] that lead from priors to boxes (corners), one by one."""
    own = centres(boxes)
    moved = (own[..., :2] - priors[..., :2]) / priors[..., 2:] / VARIANCES[0]
    return torch.cat([moved, (own[..., 2:].clamp(min=TINY) / priors[..., 2:]).log() / VARIANCES[1]], -1)


def decode(offsets: Tensor, priors: Tensor) -> Tensor:
    """Boxes (corners) that offsets [..., n, 4] lead to from priors [n, 4]."""
    centre = priors[..., :2] + offsets[..., :2] * VARIANCES[0] * priors[..., 2:]
    size = priors[..., 2:] * (offsets[..., 2:] * VARIANCES[1]).exp()
    return corners(torch.cat([centre, size], -1))


def match(priors: Tensor, boxes: Tensor, threshold: float = 0.5) -> Tensor:
    """Which box [m, 4] each prior stands for [p]; -1: none.

    Every box that shares anything with priors gets one of its own, the best pairs first. Every other
    prior stands for the box that it shares most with, if that is at least ``threshold``.
    """
    if not len(boxes):
        return torch.full((len(priors),), -1, dtype=torch.long, device=priors.device)
    if len(boxes) > len(priors):
        raise DsnetError(f"{len(boxes)} boxes cannot have a prior each of {len(priors)}")
    shared = iou(corners(priors), boxes)
    best, found = shared.max(1)
    found = torch.where(best >= threshold, found, -1)
    for _ in range(len(boxes)):
        at = shared.argmax()
        prior, box = at // len(boxes), at % len(boxes)
        found[prior] = torch.where(shared[prior, box] > 0, box, found[prior])
        shared[prior] = -1
        shared[:, box] = -1
    return found


def match_all(priors: Tensor, boxes: Tensor, there: Tensor, threshold: float = 0.5) -> Tensor:
    """`match` for many images: boxes [B, n, 4], of which some are ``there`` [B, n] → [B, p]."""
    count, most = there.shape
    if most > len(priors):
        raise DsnetError(f"{most} boxes cannot have a prior each of {len(priors)}")
    own = corners(priors)
    low = torch.maximum(own[None, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(own[None, :, None, 2:], boxes[:, None, :, 2:])
    common = (high - low).clamp(min=0).prod(3)
    union = area(own)[None, :, None] + area(boxes)[:, None] - common
    shared = torch.where(union > 0, common / union, 0.0).masked_fill(~there[:, None], -1.0)
    if not most:
        return torch.full((count, len(priors)), -1, dtype=torch.long, device=priors.device)
    best, found = shared.max(2)
    found = torch.where(best >= threshold, found, -1)
    for _ in range(most):
        value, at = shared.flatten(1).max(1, keepdim=True)
        prior, box = at // most, at % most
        found.scatter_(1, prior, torch.where(value > 0, box, found.gather(1, prior)))
        shared.scatter_(1, prior[:, :, None].expand(-1, 1, most), -1.0)
        shared.scatter_(2, box[:, None].expand(-1, len(priors), 1), -1.0)
    return found


def kept_of(boxes: Tensor, classes: Tensor, there: Tensor, *, threshold: float = 0.45) -> Tensor:
    """`nms` for many images whose boxes [B, n, 4] stand best first: which of those ``there`` [B, n] are kept.

    Images settle side by side: as many rounds as the slowest needs.
    """
    low = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    common = (high - low).clamp(min=0).prod(3)
    union = area(boxes)[:, :, None] + area(boxes)[:, None] - common
    over = (torch.where(union > 0, common / union, 0.0) > threshold) & there[:, :, None]
    over &= classes[:, :, None] == classes[:, None]
    over = over.triu(1)  # [better, worse]
    keep = there
    for _ in range(boxes.shape[1]):
        settled = there & ~(over & keep[:, :, None]).any(1)
        if torch.equal(settled, keep):
            break
        keep = settled
    return keep


def nms(boxes: Tensor, scores: Tensor, classes: Tensor | None = None, *, threshold: float = 0.45) -> Tensor:
    """Places of the boxes that are kept, best first.

    A box goes where a better one that is kept, of the same class, shares more than ``threshold`` with it. Of
    equal scores the first counts as better.
    """
    order = scores.argsort(descending=True, stable=True)
    kinds = torch.zeros_like(order) if classes is None else classes[order]
    everyone = torch.ones(1, len(order), dtype=torch.bool, device=boxes.device)
    return order[kept_of(boxes[order][None], kinds[None], everyone, threshold=threshold)[0]]
