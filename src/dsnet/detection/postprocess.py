"""From a detector's answers to boxes.

On a GPU a few kernels do all of it, then there is one copy to the host: many small ones, or a look at what
they found, would take as long as the detector itself.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsnet.detection.boxes import VARIANCES, decode, kept_of
from dsnet.detection.eval.metrics import Detections
from dsnet.errors import DsnetError

__all__ = ["best_boxes", "check_wanted", "detections_in", "detections_of", "unaided"]

CANDIDATES = 200  # of an image and class that are compared with each other


@torch.inference_mode()
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
    check_wanted(score, overlap, most)
    rows = _on_host(best_boxes(offsets, logits, priors, score=score, overlap=overlap, most=most))
    return detections_in(rows.numpy())


def check_wanted(score: float, overlap: float, most: int) -> None:
    """Raises an error that says what boxes can be asked for."""
    for name, value in (("score", score), ("overlap", overlap)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DsnetError(f"{name} is a number, usually from 0 to 1, not {value!r}")
    if type(most) is not int or most < 0:
        raise DsnetError(f"most is a number of boxes, at least 0, not {most!r}")


def detections_in(rows: NDArray[np.float32]) -> list[Detections]:
    """Boxes of every image, from what `best_boxes` found [B, n, 6]; a copy. Those without any share one."""
    counts = (rows[:, :, 4] >= 0).sum(1, dtype=np.int32).tolist()
    width = max(counts, default=0)
    wide = rows[:, :width].astype(np.float64).reshape(-1, 6)
    boxes, scores, classes = wide[:, :4], wide[:, 4], wide[:, 5].astype(np.int64)
    nothing = Detections(boxes[:0], scores[:0], classes[:0])
    found, start = [], 0
    for count in counts:
        own = slice(start, start + count)
        found.append(Detections(boxes[own], scores[own], classes[own]) if count else nothing)
        start += width
    return found


def best_boxes(
    offsets: Tensor, logits: Tensor, priors: Tensor, *, score: float, overlap: float, most: int
) -> Tensor:
    """Boxes of every image, best first [B, n, 6]: corners, score, class; a score of -1: there is none.

    No more than ``most``. With Triton on a GPU n depends on shapes alone, and nothing is waited for, as long
    as there are no more priors than its kernels are made for.
    """
    if len(logits) and unaided(logits.device, logits.shape[1], logits.shape[2] - 1, most):
        from dsnet.kernels.nms import select_boxes

        return select_boxes(
            offsets,
            logits,
            priors,
            score=score,
            overlap=overlap,
            max_boxes=most,
            candidates=CANDIDATES,
            variances=VARIANCES,
        )
    likely = logits.float().softmax(2)[:, :, 1:].transpose(1, 2).nan_to_num(0.0)  # [B, classes, p]
    images, kinds, count = likely.shape
    best, at = _best(likely.flatten(0, 1), min(CANDIDATES, count))  # of every image and class
    few = int((best > score).sum(1).max()) if best.numel() else 0  # the best stand first
    best, at = best[:, :few], at[:, :few]
    there, width = best > score, kinds * few
    place = at.reshape(images, width)
    moved = offsets.gather(1, place[:, :, None].expand(-1, -1, 4)).float()
    own = decode(moved, priors.float()[place]).clamp(0, 1).view(*at.shape, 4)
    kept = kept_of(own, torch.zeros_like(at), there, threshold=overlap)
    scores = best.masked_fill(~kept, -1.0)
    order = scores.view(images, width).argsort(stable=True, dim=1, descending=True)[:, :most]
    classes = torch.arange(kinds, device=at.device, dtype=torch.float32).repeat(images)
    rows = torch.cat([own, scores[:, :, None], classes[:, None, None].expand(-1, at.shape[1], 1)], 2)
    return rows.view(images, width, 6).gather(1, order[:, :, None].expand(-1, -1, 6))


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many of the best scores [n, p], none below 0, and where they are; of equal ones the first."""
    place = torch.arange(scores.shape[1], device=scores.device)
    key = (scores.contiguous().view(torch.int32).to(torch.int64) << 32) - place  # ordered as scores are
    at = key.topk(count, dim=1)[1]
    return scores.gather(1, at), at


def unaided(device: torch.device, priors: int, classes: int, most: int) -> bool:
    """Whether `best_boxes` finds some there without the host: how many rows it gives depends on shapes."""
    return min(priors, classes, most) > 0 and _kernels(device, priors)


def _kernels(device: torch.device, priors: int) -> bool:
    """Whether there are some for so many priors."""
    if device.type != "cuda":
        return False
    from dsnet.kernels import launch, nms

    return launch.AVAILABLE and priors <= nms.MAX_PRIORS


def _on_host(found: Tensor) -> Tensor:
    """A copy to pinned memory: to other memory it would go through such, in pieces."""
    if found.device.type != "cuda":
        return found
    here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    here.copy_(found, non_blocking=True)
    torch.cuda.current_stream(found.device).synchronize()
    return here
