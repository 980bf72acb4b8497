"""From a detector's raw predictions to boxes: scores, decoding, suppression and order.

On a GPU this takes a few kernels and one copy to the host. Many small kernels, or a synchronisation in
between, would take as long as the detector itself.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsnet.detection.boxes import VARIANCES, decode, nms_mask
from dsnet.detection.eval.metrics import Detections
from dsnet.errors import DsnetError

__all__ = ["best_boxes", "check_thresholds", "decode_detections", "has_static_shape", "split_detections"]

CANDIDATES = 200  # boxes of an image and class that enter suppression


@torch.inference_mode()
def decode_detections(
    offsets: Tensor,
    logits: Tensor,
    priors: Tensor,
    *,
    score: float = 0.01,
    overlap: float = 0.45,
    max_detections: int = 200,
) -> list[Detections]:
    """Turn raw predictions into the boxes of each image, as shares of the image, by descending score.

    Args:
        offsets: Offsets from the priors [B, p, 4].
        logits: Class logits [B, p, 1 + classes]; the first is the background.
        priors: Centres and sizes [p, 4].
        score: Boxes with at most this probability are dropped.
        overlap: Intersection over union above which the better of two boxes of a class suppresses the other.
        max_detections: The number of boxes that an image has at most.

    Returns:
        The detections of each image.

    Raises:
        DsnetError: A threshold is not finite, or ``max_detections`` is negative.
    """
    check_thresholds(score, overlap, max_detections)
    rows = best_boxes(offsets, logits, priors, score=score, overlap=overlap, max_detections=max_detections)
    return split_detections(_to_host(rows).numpy())


def check_thresholds(score: float, overlap: float, max_detections: int) -> None:
    """Raise an error for values that `decode_detections` does not take."""
    for name, value in (("score", score), ("overlap", overlap)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DsnetError(f"{name} is a number, usually from 0 to 1, not {value!r}")
    if type(max_detections) is not int or max_detections < 0:
        raise DsnetError(f"max_detections is a number of boxes, at least 0, not {max_detections!r}")


def split_detections(rows: NDArray[np.float32]) -> list[Detections]:
    """Copy the rows [B, n, 6] of `best_boxes` into the detections of each image."""
    counts = (rows[:, :, 4] >= 0).sum(1, dtype=np.int32).tolist()
    width = max(counts, default=0)
    flat = rows[:, :width].astype(np.float64).reshape(-1, 6)
    boxes, scores, classes = flat[:, :4], flat[:, 4], flat[:, 5].astype(np.int64)
    empty = Detections(boxes[:0], scores[:0], classes[:0])
    detections, start = [], 0
    for count in counts:
        part = slice(start, start + count)
        detections.append(Detections(boxes[part], scores[part], classes[part]) if count else empty)
        start += width
    return detections


def best_boxes(
    offsets: Tensor, logits: Tensor, priors: Tensor, *, score: float, overlap: float, max_detections: int
) -> Tensor:
    """Find the boxes of each image by descending score, with the arguments of `decode_detections`.

    Returns:
        Rows [B, n, 6] with n up to ``max_detections``: corners, score, class. A score of -1 marks padding.
        Where `has_static_shape`, n depends on shapes alone and the host does not wait for the device.
    """
    if len(logits) and has_static_shape(logits.device, logits.shape[1], logits.shape[2] - 1, max_detections):
        from dsnet.kernels.nms import select_boxes

        return select_boxes(
            offsets,
            logits,
            priors,
            score=score,
            overlap=overlap,
            max_boxes=max_detections,
            candidates=CANDIDATES,
            variances=VARIANCES,
        )
    probabilities = logits.float().softmax(2)[:, :, 1:].transpose(1, 2).nan_to_num(0.0)  # [B, classes, p]
    images, classes, count = probabilities.shape
    top, index = _top_scores(probabilities.flatten(0, 1), min(CANDIDATES, count))  # [B · classes, candidates]
    used = int((top > score).sum(1).max()) if top.numel() else 0
    top, index = top[:, :used], index[:, :used]
    present, width = top > score, classes * used
    prior = index.reshape(images, width)
    chosen = offsets.gather(1, prior[:, :, None].expand(-1, -1, 4)).float()
    boxes = decode(chosen, priors.float()[prior]).clamp(0, 1).view(*index.shape, 4)
    kept = nms_mask(boxes, torch.zeros_like(index), present, threshold=overlap)
    scores = top.masked_fill(~kept, -1.0)
    order = scores.view(images, width).argsort(stable=True, dim=1, descending=True)[:, :max_detections]
    labels = torch.arange(classes, device=index.device, dtype=torch.float32).repeat(images)
    rows = torch.cat([boxes, scores[:, :, None], labels[:, None, None].expand(-1, index.shape[1], 1)], 2)
    return rows.view(images, width, 6).gather(1, order[:, :, None].expand(-1, -1, 6))


def _top_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest scores [n, p], none below 0, and their indices; ties: the first."""
    index = torch.arange(scores.shape[1], device=scores.device)
    key = (scores.contiguous().view(torch.int32).to(torch.int64) << 32) - index  # ordered as scores are
    top = key.topk(count, dim=1)[1]
    return scores.gather(1, top), top


def has_static_shape(device: torch.device, priors: int, classes: int, max_detections: int) -> bool:
    """Return whether `best_boxes` needs no host, so that the shape of its result is known in advance."""
    return min(priors, classes, max_detections) > 0 and _has_kernels(device, priors)


def _has_kernels(device: torch.device, priors: int) -> bool:
    if device.type != "cuda":
        return False
    from dsnet.kernels import launch, nms

    return launch.AVAILABLE and priors <= nms.MAX_PRIORS


def _to_host(rows: Tensor) -> Tensor:
    """Copy to pinned memory, which takes one transfer. A copy to pageable memory takes several."""
    if rows.device.type != "cuda":
        return rows
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()
    return host
