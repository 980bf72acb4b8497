"""Mean average precision of handmade detections, and against other implementations."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsnet.detection import Detections, GroundTruth, mean_average_precision
from tests.support import error_of

Pairs = tuple[list[Detections], list[GroundTruth]]


def drawn(seed: int, *, difficult: bool) -> Pairs:
    """Images with boxes of three classes; detections that are near them, or anywhere."""
    draw = np.random.default_rng(seed)
    found, truths = [], []
    for _ in range(int(draw.integers(1, 5))):
        count = int(draw.integers(0, 6))
        boxes = _boxes(draw, count)
        near = boxes[draw.integers(0, count, int(draw.integers(0, 9)))] if count else boxes
        near = near + draw.normal(0, draw.choice([0.5, 4.0]), near.shape)
        both = np.concatenate([near, _boxes(draw, int(draw.integers(0, 4)))])
        both = np.concatenate([np.minimum(both[:, :2], both[:, 2:] - 1), both[:, 2:]], 1)
        found.append(Detections(both, draw.random(len(both)), draw.integers(0, 3, len(both))))
        hard = draw.random(count) < 0.3 if difficult else np.zeros(count, bool)
        truths.append(GroundTruth(boxes, draw.integers(0, 3, count), hard))
    boxes = _boxes(draw, 3)  # every class is there
    truths.append(GroundTruth(boxes, np.arange(3), None))
    found.append(Detections(boxes[:1] + 1, np.array([0.5]), np.array([0])))
    return found, truths


def _boxes(draw: np.random.Generator, count: int) -> NDArray[np.float64]:
    start = draw.random((count, 2)) * 100
    return np.concatenate([start, start + 5 + draw.random((count, 2)) * 60], 1)


def by_pycocotools(found: list[Detections], truths: list[GroundTruth]) -> float:
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    boxes: list[dict[str, Any]] = []
    for image, truth in enumerate(truths):
        for box, number, crowd in zip(truth.boxes, truth.classes, truth.ignored(), strict=True):
            size = box[2:] - box[:2]
            boxes.append(
                {
                    "id": len(boxes) + 1,
                    "image_id": image + 1,
                    "category_id": int(number) + 1,
                    "bbox": [*box[:2], *size],
                    "area": float(size.prod()),
                    "iscrowd": int(crowd),
                }
            )
    results = [
        {
            "image_id": image + 1,
            "category_id": int(number) + 1,
            "bbox": [*box[:2], *(box[2:] - box[:2])],
            "score": float(score),
        }
        for image, own in enumerate(found)
        for box, score, number in zip(own.boxes, own.scores, own.classes, strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        dataset = coco.COCO()
        dataset.dataset = {
            "info": {},
            "images": [{"id": image + 1} for image in range(len(truths))],
            "annotations": boxes,
            "categories": [{"id": number + 1} for number in range(3)],
        }
        dataset.createIndex()
        run = evaluation.COCOeval(dataset, dataset.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return float(run.stats[0])


def by_mean_average_precision(found: list[Detections], truths: list[GroundTruth], recalls: Any) -> float:  # noqa: ANN401
    package = pytest.importorskip("mean_average_precision")
    last = np.array([0, 0, 1, 1])  # it counts pixels from the first to the last, both included
    metric = package.MetricBuilder.build_evaluation_metric("map_2d", async_mode=False, num_classes=3)
    for own, truth in zip(found, truths, strict=True):
        extra = [truth.classes[:, None], truth.ignored()[:, None], np.zeros((len(truth.boxes), 1))]
        metric.add(
            np.concatenate([own.boxes - last, own.classes[:, None], own.scores[:, None]], 1),
            np.concatenate([truth.boxes - last, *extra], 1),
        )
    return float(metric.value(iou_thresholds=0.5, recall_thresholds=recalls)["mAP"])


@given(st.integers(0, 100_000), st.booleans())
@settings(max_examples=60, deadline=None)
def test_coco_equals_pycocotools(seed: int, difficult: bool) -> None:
    found, truths = drawn(seed, difficult=difficult)
    assert mean_average_precision(found, truths, "coco").mean == pytest.approx(
        by_pycocotools(found, truths), abs=1e-9
    )


@given(st.integers(0, 100_000))
@settings(max_examples=60, deadline=None)
def test_voc_equals_mean_average_precision(seed: int) -> None:
    found, truths = drawn(seed, difficult=False)
    eleven = by_mean_average_precision(found, truths, np.arange(0.0, 1.1, 0.1))
    area = by_mean_average_precision(found, truths, None)
    assert mean_average_precision(found, truths, "voc2007").mean == pytest.approx(eleven, abs=1e-6)
    assert mean_average_precision(found, truths, "voc2010").mean == pytest.approx(area, abs=1e-6)


def test_handmade_detections() -> None:
    """Two boxes; the first detection right, the second a repetition, the third right."""
    box = np.array([[0.0, 0, 10, 10], [50, 50, 60, 60]])
    truth = GroundTruth(box, np.zeros(2, int))
    found = Detections(box[[0, 0, 1]] + [[0], [1], [0]], np.array([0.9, 0.8, 0.7]), np.zeros(3, int))
    assert mean_average_precision([found], [truth], "voc2010").mean == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert mean_average_precision([found], [truth], "voc2007").mean == pytest.approx((6 + 5 * 2 / 3) / 11)
    hard = GroundTruth(box, np.zeros(2, int), np.array([True, False]))
    assert mean_average_precision([found], [hard], "voc2010").mean == pytest.approx(
        1.0
    )  # only the third counts
    nothing = Detections(box[:0], np.zeros(0), np.zeros(0, int))
    assert mean_average_precision([nothing], [truth], "coco").mean == 0


def test_a_detection_matches_the_box_of_largest_overlap() -> None:
    """By VOC's rule, even if that is taken; by COCO's it takes another that shares enough."""
    truth = GroundTruth(np.array([[0.0, 0, 10, 10], [0, 0, 10, 7]]), np.zeros(2, int))
    found = Detections(np.array([[0.0, 0, 10, 10], [0, 0, 10, 9.5]]), np.array([0.9, 0.8]), np.zeros(2, int))
    assert mean_average_precision([found], [truth], "voc2010").mean == pytest.approx(0.5)
    assert mean_average_precision([found], [truth], "coco").mean > 0.5


def test_bad_input_is_an_error() -> None:
    truth = GroundTruth(np.zeros((0, 4)), np.zeros(0, int))
    found = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, int))
    assert "no image has a box" in error_of(lambda: mean_average_precision([found], [truth]))
    assert "1 images and boxes of 2" in error_of(lambda: mean_average_precision([found], [truth] * 2))
    assert "voc2007, voc2010, coco" in error_of(lambda: mean_average_precision([found], [truth], "voc"))  # type: ignore[arg-type]
