"""From a detector's answers to boxes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsnet.detection.boxes import decode, kept_of
from dsnet.detection.metrics import Detections

__all__ = ["detections_of"]

CANDIDATES = 400  # of an image, over all classes, that are compared with each other


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
    likely = logits.float().softmax(2)[:, :, 1:]
    kinds = likely.shape[2]
    best, at = likely.flatten(1).topk(min(CANDIDATES, likely[0].numel()) if len(likely) else 0, dim=1)
    few = int((best > score).sum(1).max()) if best.numel() else 0  # the best stand first
    best, at = best[:, :few], at[:, :few]
    own = boxes.gather(1, (at // kinds)[..., None].expand(-1, -1, 4))
    kept = kept_of(own, at % kinds, best > score, threshold=overlap)
    numbers = [part.cpu().numpy() for part in (own, best, at % kinds, kept)]
    return [
        Detections(
            boxes[keep][:most].astype(np.float64),
            scores[keep][:most].astype(np.float64),
            classes[keep][:most].astype(np.int64),
        )
        for boxes, scores, classes, keep in zip(*numbers, strict=True)
    ]
