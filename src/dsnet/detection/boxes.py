"""Box geometry: prior boxes, overlap, encoding, matching and non-maximum suppression.

Boxes are corners [n, 4]: left, top, right, bottom. Priors are centres and sizes [n, 4]: x, y, width, height.
Coordinates are continuous: a box from 0 to 2 has a side of 2, and the first pixel of an image lies from 0 to
1. Pascal VOC counts pixels from 1 and includes the last one, so left and top are one too high in
its files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = [
    "SCALES",
    "VARIANCES",
    "area",
    "decode",
    "encode",
    "iou",
    "match",
    "match_batch",
    "nms",
    "nms_mask",
    "prior_boxes",
    "priors_per_position",
    "to_centres",
    "to_corners",
]

MIN_SIDE = 1e-6  # of an encoded box: the logarithm of 0 is infinite
SCALES = (0.2, 0.9)  # of the second and of the last map, as shares of the image
VARIANCES = (0.1, 0.2)  # divisors of the offsets of centres and of sizes


def area(boxes: Tensor) -> Tensor:
    """Compute the areas [..., n] of boxes [..., n, 4]; 0 for boxes with swapped corners."""
    return (boxes[..., 2] - boxes[..., 0]).clamp(min=0) * (boxes[..., 3] - boxes[..., 1]).clamp(min=0)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Compute the intersection over union of all pairs of boxes.

    Args:
        a: Boxes [..., n, 4].
        b: Boxes [..., m, 4].

    Returns:
        Values [..., n, m]; 0 where both boxes have no area.

    Examples:
        >>> iou(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 0.0, 2.0, 2.0]])).item()
        0.5
    """
    a, b = a[..., :, None, :], b[..., None, :, :]
    left_top = torch.maximum(a[..., :2], b[..., :2])
    right_bottom = torch.minimum(a[..., 2:], b[..., 2:])
    intersection = (right_bottom - left_top).clamp(min=0).prod(-1)
    union = area(a) + area(b) - intersection
    return torch.where(union > 0, intersection / union, 0.0)


def to_corners(boxes: Tensor) -> Tensor:
    """Convert centres and sizes [..., 4] to corners."""
    half = boxes[..., 2:] / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)


def to_centres(boxes: Tensor) -> Tensor:
    """Convert corners [..., 4] to centres and sizes."""
    return torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], -1)


def encode(boxes: Tensor, priors: Tensor) -> Tensor:
    """Encode boxes as offsets from priors; `decode` inverts it.

    Args:
        boxes: Corners [..., n, 4].
        priors: Centres and sizes [n, 4], one for each box.

    Returns:
        Offsets [..., n, 4].
    """
    target = to_centres(boxes)
    shift = (target[..., :2] - priors[..., :2]) / priors[..., 2:] / VARIANCES[0]
    scale = (target[..., 2:].clamp(min=MIN_SIDE) / priors[..., 2:]).log() / VARIANCES[1]
    return torch.cat([shift, scale], -1)


def decode(offsets: Tensor, priors: Tensor) -> Tensor:
    """Decode offsets [..., n, 4] from priors [n, 4] into boxes (corners) [..., n, 4]."""
    centre = priors[..., :2] + offsets[..., :2] * VARIANCES[0] * priors[..., 2:]
    size = priors[..., 2:] * (offsets[..., 2:] * VARIANCES[1]).exp()
    return to_corners(torch.cat([centre, size], -1))


def match(priors: Tensor, boxes: Tensor, threshold: float = 0.5) -> Tensor:
    """Match priors with the boxes of one image, as `match_batch` does for many."""
    present = torch.ones(1, len(boxes), dtype=torch.bool, device=boxes.device)
    return match_batch(priors, boxes[None], present, threshold)[0]


def match_batch(priors: Tensor, boxes: Tensor, present: Tensor, threshold: float = 0.5) -> Tensor:
    """Match each prior with a box of its image.

    Each box that overlaps any prior gets a prior of its own: the pairs with the largest overlap come first.
    Every other prior gets the box that it overlaps most, if their overlap is at least ``threshold``.

    Args:
        priors: Centres and sizes [p, 4].
        boxes: Corners [B, n, 4], padded.
        present: Which of the boxes are no padding [B, n].
        threshold: Intersection over union.

    Returns:
        The index of the box of each prior [B, p]; -1 for none.

    Raises:
        DsnetError: There are more boxes than priors.
    """
    images, max_boxes = present.shape
    if max_boxes > len(priors):
        raise DsnetError(f"{max_boxes} boxes cannot have a prior each of {len(priors)}")
    if not max_boxes:
        return torch.full((images, len(priors)), -1, dtype=torch.long, device=priors.device)
    overlap = iou(to_corners(priors), boxes).masked_fill(~present[:, None], -1.0)
    best, matched = overlap.max(2)
    matched = torch.where(best >= threshold, matched, -1)
    for _ in range(max_boxes):
        value, index = overlap.flatten(1).max(1, keepdim=True)
        prior, box = index // max_boxes, index % max_boxes
        matched.scatter_(1, prior, torch.where(value > 0, box, matched.gather(1, prior)))
        overlap.scatter_(1, prior[:, :, None].expand(-1, 1, max_boxes), -1.0)
        overlap.scatter_(2, box[:, None].expand(-1, len(priors), 1), -1.0)
    return matched


def nms_mask(boxes: Tensor, classes: Tensor, present: Tensor, *, threshold: float = 0.45) -> Tensor:
    """Find the boxes that `nms` keeps in each of many images.

    All images iterate together until none changes.

    Args:
        boxes: Corners [B, n, 4], sorted by descending score.
        classes: Labels [B, n]; boxes suppress only boxes of their class.
        present: Which of the boxes are no padding [B, n].
        threshold: A box is removed where it overlaps a kept one by more.

    Returns:
        Which of the boxes are kept [B, n].
    """
    suppresses = (iou(boxes, boxes) > threshold) & present[:, :, None]
    suppresses &= classes[:, :, None] == classes[:, None]
    suppresses = suppresses.triu(1)  # [better, worse]
    kept = present
    for _ in range(boxes.shape[1]):
        settled = present & ~(suppresses & kept[:, :, None]).any(1)
        if torch.equal(settled, kept):
            break
        kept = settled
    return kept


def nms(boxes: Tensor, scores: Tensor, classes: Tensor | None = None, *, threshold: float = 0.45) -> Tensor:
    """Suppress boxes that overlap a better one.

    Args:
        boxes: Corners [n, 4].
        scores: Values [n]; of equal scores the first box counts as better.
        classes: Labels [n]; boxes suppress only boxes of their class. Without it, all boxes are of one.
        threshold: A box is removed where its overlap with a kept one is larger.

    Returns:
        Indices of the kept boxes, by descending score.
    """
    order = scores.argsort(descending=True, stable=True)
    labels = torch.zeros_like(order) if classes is None else classes[order]
    present = torch.ones(1, len(order), dtype=torch.bool, device=boxes.device)
    return order[nms_mask(boxes[order][None], labels[None], present, threshold=threshold)[0]]


def priors_per_position(ratios: Sequence[float]) -> int:
    """Count the priors of a position: two squares, and two boxes for each further ratio."""
    return 2 + 2 * len(ratios)


def prior_boxes(
    sizes: Sequence[tuple[int, int]],
    ratios: Sequence[Sequence[float]],
    scales: tuple[float, float] = SCALES,
) -> Tensor:
    """Make the prior boxes of some maps.

    Scales grow linearly from the second map to the last; the first map has half the scale of the second, for
    small objects. Each position has a square of the map's scale, a square between this scale and the next
    map's, and for each ratio r two boxes of the first square's area: one r times as wide as high, and one r
    times as high as wide.

    Args:
        sizes: Heights and widths of the maps, the finest first.
        ratios: Aspect ratios for each map, without 1.
        scales: Scales of the second and of the last map, as shares of the image. A single map has half the
            first one.

    Returns:
        Centres and sizes [p, 4] as shares of the image: map by map, row by row, position by position.

    Raises:
        DsnetError: The numbers of sizes and of ratios differ, or a scale or ratio is not above 0.
    """
    if len(sizes) != len(ratios) or not sizes:
        raise DsnetError(f"expected ratios for each of {len(sizes)} maps (at least 1), got {len(ratios)}")
    if not 0 < scales[0] <= scales[1] or any(ratio <= 0 for of_map in ratios for ratio in of_map):
        raise DsnetError(f"scales {scales} and ratios {ratios} must be above 0, the smaller scale first")
    step = (scales[1] - scales[0]) / max(1, len(sizes) - 2)
    map_scales = [scales[0] / 2, *(scales[0] + step * level for level in range(len(sizes)))]
    boxes = []
    for (height, width), of_map, (scale, next_scale) in zip(
        sizes, ratios, itertools.pairwise(map_scales), strict=True
    ):
        between = math.sqrt(scale * next_scale)
        shapes = [(scale, scale), (between, between)]
        for ratio in of_map:
            long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
            shapes += [(long, short), (short, long)]
        for i, j in itertools.product(range(height), range(width)):
            boxes += [((j + 0.5) / width, (i + 0.5) / height, *shape) for shape in shapes]
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
