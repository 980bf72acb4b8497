"""Mean average precision by the rules of Pascal VOC 2007 and 2010, and of COCO.

A detection is correct where it overlaps a true box enough and no better detection of its class matched it.
Precision is evaluated over recall as detections are added by descending score.

=========  =============================================================================================
voc2007    At overlap 0.5: mean of the best precision at 11 recalls. A detection is matched with the box
           that it overlaps most. It is wrong if that box is matched already.
voc2010    The same matching; area under the precision envelope.
coco       Mean over overlaps 0.5, 0.55, …, 0.95; precision at 101 recalls. A detection is matched with the
           best box that is still free. The best 100 of an image and class count.
=========  =============================================================================================

Difficult boxes need not be found, and detections of them do not count. The COCO rule treats them as crowds:
the overlap of a detection with a crowd is relative to the detection's own area.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from dsnet.errors import DsnetError

__all__ = ["Detections", "GroundTruth", "MeanAveragePrecision", "Rule", "mean_average_precision"]

Rule = Literal["voc2007", "voc2010", "coco"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

COCO_MAX_DETECTIONS = 100  # of an image and class


@dataclass(slots=True, eq=False)  # not frozen: plans create many, and freezing makes that slower
class Detections:
    """The boxes found in an image, by descending score.

    Boxes are left, top, right, bottom; detectors and their plans return them as shares of the image. Classes
    are indices into the detector's class names, without a background.
    """

    boxes: Floats  # [n, 4]
    scores: Floats  # [n]
    classes: NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class GroundTruth:
    """The true boxes of an image."""

    boxes: Floats  # [n, 4], corners
    classes: NDArray[np.int64]  # [n]
    difficult: Bools | None = None  # [n]; None: no box is difficult

    def ignored(self) -> Bools:
        """Return which boxes [n] need not be found."""
        return np.zeros(len(self.boxes), dtype=bool) if self.difficult is None else self.difficult


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanAveragePrecision:
    """The mean over the classes that occur, and the average precision of each."""

    rule: Rule
    mean: float
    classes: dict[int, float] = field(default_factory=dict)


def mean_average_precision(
    detections: Sequence[Detections], truths: Sequence[GroundTruth], rule: Rule = "voc2007"
) -> MeanAveragePrecision:
    """Compute the mean average precision.

    Args:
        detections: Detections of each image.
        truths: True boxes of each image, in the same order and units.
        rule: ``voc2007``, ``voc2010`` or ``coco``.

    Raises:
        DsnetError: The rule is unknown, the lengths differ, or no image has a box to be found.
    """
    if rule not in get_args(Rule):
        raise DsnetError(f"unknown rule {rule!r}; possible: {', '.join(get_args(Rule))}")
    if len(detections) != len(truths):
        raise DsnetError(f"there are detections of {len(detections)} images and boxes of {len(truths)}")
    present = sorted({int(label) for truth in truths for label in truth.classes[~truth.ignored()]})
    if not present:
        raise DsnetError("no image has a box to be found")
    thresholds = np.linspace(0.5, 0.95, 10) if rule == "coco" else np.array([0.5])
    average: Callable[[Floats, Floats], float] = {
        "voc2007": _eleven_points,
        "voc2010": _area,
        "coco": _coco_points,
    }[rule]
    judge = _match_free if rule == "coco" else _match_best
    classes = {}
    for label in present:
        images = [_of_class(*pair, label, rule) for pair in zip(detections, truths, strict=True)]
        positives = sum(int((~image.ignored).sum()) for image in images)
        scores = np.concatenate([image.scores for image in images])
        order = np.argsort(-scores, kind="stable")
        values = []
        for threshold in thresholds:
            judged = [judge(image, float(threshold)) for image in images]
            correct, counts = (np.concatenate(parts)[order] for parts in zip(*judged, strict=True))
            hits = np.cumsum(correct[counts])
            values.append(average(hits / positives, hits / np.arange(1, len(hits) + 1)))
        classes[label] = float(np.mean(values))
    return MeanAveragePrecision(rule=rule, mean=float(np.mean(list(classes.values()))), classes=classes)


# --- one image, one class --------------------------------------------------------------------------------
class _ClassOverlaps(NamedTuple):
    overlap: Floats  # [detections, boxes], by descending score
    scores: Floats
    ignored: Bools  # [boxes]


def _of_class(detections: Detections, truth: GroundTruth, label: int, rule: Rule) -> _ClassOverlaps:
    predicted, actual = detections.classes == label, truth.classes == label
    scores = detections.scores[predicted]
    order = np.argsort(-scores, kind="stable")
    boxes, ignored = truth.boxes[actual], truth.ignored()[actual]
    crowds = ignored if rule == "coco" else np.zeros_like(ignored)
    return _ClassOverlaps(_iou(detections.boxes[predicted][order], boxes, crowds), scores[order], ignored)


Judged = tuple[Bools, Bools]  # [detections]: correct, and whether it counts at all


def _match_best(image: _ClassOverlaps, threshold: float) -> Judged:
    """Match each detection with the box that it overlaps most."""
    count, boxes = image.overlap.shape
    correct, counts, matched = np.zeros(count, bool), np.ones(count, bool), np.zeros(boxes, bool)
    for i in range(count if boxes else 0):
        best = int(image.overlap[i].argmax())
        if image.overlap[i, best] < threshold:
            continue
        if image.ignored[best]:
            counts[i] = False
        elif not matched[best]:
            correct[i] = matched[best] = True
    return correct, counts


def _match_free(image: _ClassOverlaps, threshold: float) -> Judged:
    """Match each detection with the best free box. Ignored boxes match any number of detections."""
    count, boxes = image.overlap.shape
    correct, counts, matched = np.zeros(count, bool), np.ones(count, bool), np.zeros(boxes, bool)
    counts[COCO_MAX_DETECTIONS:] = False
    for i in range(min(count, COCO_MAX_DETECTIONS)):
        for ignored in (False, True):
            free = np.where((image.ignored == ignored) & (ignored | ~matched), image.overlap[i], -1.0)
            best = boxes - 1 - int(free[::-1].argmax()) if boxes else -1  # the last of equals
            if best >= 0 and free[best] >= min(threshold, 1 - 1e-10):
                matched[best] = True
                correct[i], counts[i] = not ignored, not ignored
                break
    return correct, counts


def _iou(a: Floats, b: Floats, crowds: Bools) -> Floats:
    """Compute intersection over union [n, m]; for boxes of ``b`` that are crowds, over the area of ``a``."""
    sides = np.minimum(a[:, None, 2:], b[None, :, 2:]) - np.maximum(a[:, None, :2], b[None, :, :2])
    intersection = np.clip(sides, 0, None).prod(2)
    areas = [np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(1) for boxes in (a, b)]
    union = np.where(crowds, areas[0][:, None], areas[0][:, None] + areas[1] - intersection)
    overlap: Floats = np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0)
    return overlap


# --- from recall and precision to a number ---------------------------------------------------------------
def _envelope(precision: Floats) -> Floats:
    """Return the best precision at each recall or above."""
    best: Floats = np.maximum.accumulate(precision[::-1])[::-1]
    return best


def _eleven_points(recall: Floats, precision: Floats) -> float:
    best = [precision[recall >= step].max(initial=0.0) for step in np.linspace(0, 1, 11)]
    return float(np.mean(best))


def _area(recall: Floats, precision: Floats) -> float:
    steps = np.diff(np.concatenate([[0.0], recall]))
    return float((steps * _envelope(precision)).sum())


def _coco_points(recall: Floats, precision: Floats) -> float:
    index = np.searchsorted(recall, np.linspace(0, 1, 101), side="left")
    best = np.concatenate([_envelope(precision), [0.0]])
    return float(best[index].mean())
