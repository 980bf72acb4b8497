"""From a detector's answers to boxes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsnet.detection.boxes import decode, nms
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
    best, at = likely.flatten(1).topk(min(CANDIDATES, likely[0].numel()) if len(likely) else 0, dim=1)
    found = []
    for image in range(len(boxes)):
        good = best[image] > score
        places, scores = at[image][good], best[image][good]
        own, kinds = boxes[image][places // likely.shape[2]], places % likely.shape[2]
        kept = nms(own, scores, kinds, threshold=overlap)[:most]
        numbers = (own[kept].cpu().numpy(), scores[kept].cpu().numpy(), kinds[kept].cpu().numpy())
        found.append(
            Detections(
                numbers[0].astype(np.float64), numbers[1].astype(np.float64), numbers[2].astype(np.int64)
            )
        )
    return found
