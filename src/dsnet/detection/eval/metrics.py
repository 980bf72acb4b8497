"""How well boxes are found: mean average precision by the rules of Pascal VOC 2007 and 2010, and of COCO.

A detection is right where it shares enough with a true box that no better detection of its class has taken.
Precision is looked at over recall as detections are added, best first.

=========  =============================================================================================
voc2007    at 0.5; mean of the best precision at 11 recalls. A detection is held to the box that it shares
           most with: where that is taken already, it is wrong.
voc2010    the same, with the area under the precision that is still reached at a recall or above.
coco       mean over 0.5, 0.55, …, 0.95; precision at 101 recalls. A detection takes the best box that is
           still free; the best 100 of an image and class count.
=========  =============================================================================================

Boxes marked as difficult need not be found; detections of them count neither way. By COCO's rule they are
crowds, which a detection belongs to by the share of itself that lies in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from dsnet.errors import DsnetError

__all__ = ["Detections", "MeanPrecision", "Rule", "Truth", "mean_precision"]

Rule = Literal["voc2007", "voc2010", "coco"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST = 100  # detections of an image that COCO looks at


@dataclass(slots=True, eq=False)  # not frozen: that takes longer to make, and a plan makes many
class Detections:
    """What was found in an image, best first.

    Boxes are left, top, right, bottom; a detector and its plans give them as shares of the image, 0 to 1.
    Classes are places among the detector's class names: there is none for the background.
    """

    boxes: Floats  # [n, 4]
    scores: Floats  # [n]
    classes: NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What is in an image."""

    boxes: Floats  # [n, 4], corners
    classes: NDArray[np.int64]  # [n]
    difficult: Bools | None = None  # [n]; none: no box is

    def ignored(self) -> Bools:
        """[n]: which need not be found."""
        return np.zeros(len(self.boxes), dtype=bool) if self.difficult is None else self.difficult


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPrecision:
    """By a rule: of every class that is there, and their mean."""

    rule: Rule
    mean: float
    classes: dict[int, float] = field(default_factory=dict)


def mean_precision(
    found: Sequence[Detections], truths: Sequence[Truth], rule: Rule = "voc2007"
) -> MeanPrecision:
    """Of detections in images whose boxes are known, both in the same order."""
    if rule not in get_args(Rule):
        raise DsnetError(f"unknown rule {rule!r}; possible: {', '.join(get_args(Rule))}")
    if len(found) != len(truths):
        raise DsnetError(f"there are detections of {len(found)} images and boxes of {len(truths)}")
    present = sorted({int(c) for truth in truths for c in truth.classes[~truth.ignored()]})
    if not present:
        raise DsnetError("no image has a box to be found")
    thresholds = np.linspace(0.5, 0.95, 10) if rule == "coco" else np.array([0.5])
    summary: Callable[[Floats, Floats], float] = {"voc2007": _eleven, "voc2010": _area, "coco": _many}[rule]
    assign = _assign_free if rule == "coco" else _assign_best
    classes = {}
    for number in present:
        images = [_of_class(a, b, number, rule) for a, b in zip(found, truths, strict=True)]
        wanted = sum(int((~image.ignored).sum()) for image in images)
        reached = []
        for threshold in thresholds:
            judged = [assign(image, float(threshold)) for image in images]
            scores = np.concatenate([image.scores for image in images])
            right, counts = (np.concatenate(parts) for parts in zip(*judged, strict=True))
            order = np.argsort(-scores, kind="stable")
            right = right[order][counts[order]]
            hits = np.cumsum(right)
            reached.append(summary(hits / wanted, hits / np.arange(1, len(hits) + 1)))
        classes[number] = float(np.mean(reached))
    return MeanPrecision(rule=rule, mean=float(np.mean(list(classes.values()))), classes=classes)


# --- one image, one class --------------------------------------------------------------------------------
class _Image(NamedTuple):
    shared: Floats  # [detections, boxes], best detection first
    scores: Floats
    ignored: Bools  # [boxes]


def _of_class(found: Detections, truth: Truth, number: int, rule: Rule) -> _Image:
    mine, own = found.classes == number, truth.classes == number
    order = np.argsort(-found.scores[mine], kind="stable")
    boxes, ignored = truth.boxes[own], truth.ignored()[own]
    crowds = ignored if rule == "coco" else np.zeros_like(ignored)
    return _Image(_iou(found.boxes[mine][order], boxes, crowds), found.scores[mine][order], ignored)


Judged = tuple[Bools, Bools]  # [detections]: right, and whether it counts at all


def _assign_best(image: _Image, threshold: float) -> Judged:
    """Every detection to the box that it shares most with."""
    count, boxes = image.shared.shape
    right, counts, taken = np.zeros(count, bool), np.ones(count, bool), np.zeros(boxes, bool)
    for i in range(count if boxes else 0):
        best = int(image.shared[i].argmax())
        if image.shared[i, best] < threshold:
            continue
        if image.ignored[best]:
            counts[i] = False
        elif not taken[best]:
            right[i] = taken[best] = True
    return right, counts


def _assign_free(image: _Image, threshold: float) -> Judged:
    """Every detection to the best box that is free; ignored ones can be taken again and again."""
    count, boxes = image.shared.shape
    right, counts, taken = np.zeros(count, bool), np.ones(count, bool), np.zeros(boxes, bool)
    counts[MOST:] = False
    for i in range(min(count, MOST)):
        for ignored in (False, True):
            free = np.where((image.ignored == ignored) & (ignored | ~taken), image.shared[i], -1.0)
            best = boxes - 1 - int(free[::-1].argmax()) if boxes else -1  # the last of equals
            if best >= 0 and free[best] >= min(threshold, 1 - 1e-10):
                taken[best] = True
                right[i], counts[i] = not ignored, not ignored
                break
    return right, counts


def _iou(a: Floats, b: Floats, crowds: Bools) -> Floats:
    """Intersection over union; with a crowd over the box in ``a`` alone."""
    sides = np.minimum(a[:, None, 2:], b[None, :, 2:]) - np.maximum(a[:, None, :2], b[None, :, :2])
    common = np.clip(sides, 0, None).prod(2)
    areas = [np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(1) for boxes in (a, b)]
    union = np.where(crowds, areas[0][:, None], areas[0][:, None] + areas[1] - common)
    shared: Floats = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return shared


# --- from recall and precision to a number ---------------------------------------------------------------
def _envelope(precision: Floats) -> Floats:
    """The best precision at this recall or above."""
    best: Floats = np.maximum.accumulate(precision[::-1])[::-1]
    return best


def _eleven(recall: Floats, precision: Floats) -> float:
    best = [precision[recall >= step].max(initial=0.0) for step in np.linspace(0, 1, 11)]
    return float(np.mean(best))


def _area(recall: Floats, precision: Floats) -> float:
    steps = np.diff(np.concatenate([[0.0], recall]))
    return float((steps * _envelope(precision)).sum())


def _many(recall: Floats, precision: Floats) -> float:
    at = np.searchsorted(recall, np.linspace(0, 1, 101), side="left")
    best = np.concatenate([_envelope(precision), [0.0]])
    return float(best[at].mean())
