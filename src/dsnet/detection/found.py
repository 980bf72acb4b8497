"""From a detector's answers to boxes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsnet.detection.boxes import decode, kept_of
from dsnet.detection.metrics import Detections

__all__ = ["detections_of"]

CANDIDATES = 200  # of an image and class that are compared with each other


@torch.no_grad()
def detections_of(
    offsets: Tensor,
    logits: Tensor,
    priors: Tensor,
    *,
    score: float = 0.01,
    overlap: float = 0.45,
    most: int = 200,
) -> list[Detections]:
    """Boxes of every image as shares of it, best first: [B, p, 4], [B, p, 1 + classes] and priors [p, 4].

    Those with a probability above ``score``, of overlapping ones of a class the best, ``most`` of an image.
    """
    boxes = decode(offsets.float(), priors.float()).clamp(0, 1)
    likely = logits.float().softmax(2)[:, :, 1:].transpose(1, 2).nan_to_num(0.0)  # [B, classes, p]
    images, kinds, count = likely.shape
    best, at = likely.flatten(0, 1).topk(min(CANDIDATES, count), dim=1)  # of every image and class
    few = int((best > score).sum(1).max()) if best.numel() else 0  # the best stand first
    best, at = best[:, :few], at[:, :few]
    own = boxes.repeat_interleave(kinds, 0).gather(1, at[..., None].expand(-1, -1, 4))
    kept = kept_of(own, torch.zeros_like(at), best > score, threshold=overlap)
    classes = torch.arange(kinds, device=at.device).repeat(images)[:, None].expand(-1, few)
    scores = torch.where(kept, best, -1.0).view(images, kinds * few)
    best, order = scores.sort(stable=True, dim=1, descending=True)
    numbers = [
        own.view(images, kinds * few, 4).gather(1, order[..., None].expand(-1, -1, 4)),
        best,
        classes.reshape(images, kinds * few).gather(1, order),
    ]
    found = []
    for own_boxes, own_scores, own_classes in zip(*(part.cpu().numpy() for part in numbers), strict=True):
        end = min(most, int((own_scores >= 0).sum()))
        found.append(
            Detections(
                own_boxes[:end].astype(np.float64),
                own_scores[:end].astype(np.float64),
                own_classes[:end].astype(np.int64),
            )
        )
    return found
