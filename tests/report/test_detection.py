"""The page of a detector's run: warnings about its data."""

from __future__ import annotations

from pathlib import Path

from dsnet.detection.data.summary import SplitCounts, describe_run
from dsnet.detection.data.voc import FileProblem
from dsnet.detection.eval.evaluate import DetectionResult
from dsnet.detection.train.config import DetectionConfig, DetectionOptimConfig
from dsnet.report.detection import LISTED, detection_page

RESULT = DetectionResult(
    route=0,
    madds=10.0,
    mean={"voc2007": 0.5, "voc2010": 0.5, "coco": 0.2},
    classes={"red": 0.5},
    images=6,
    route_counts={0: 6},
)


def page(train: SplitCounts, test: SplitCounts, problems: list[FileProblem]) -> str:
    return detection_page(
        "net", Path("run"), ["red"], [RESULT], [], train=train, test=test, problems=problems
    )


def test_warnings_come_first() -> None:
    problems = [FileProblem(Path("a.xml"), "is <missing>")] * (LISTED + 3)
    train = SplitCounts(listed=33, images=20, boxes={"red": 3, "blue": 40})
    text = page(train, SplitCounts(listed=6, images=6, boxes={"red": 7, "blue": 0}), problems)
    assert text.index("Look at this first") < text.index("Precision against cost")
    for part in (
        "13 of 33 training images could not be used",
        "20 training images are few",
        "1 of 2 classes has fewer than 20 boxes to train with (red)",
        "No test image shows blue",
        "With 6 test images every figure here is a rough one",
        "a.xml: is &lt;missing&gt;",
        "And 3 more, in problems.txt",
    ):
        assert part in text


def test_without_problems_there_are_no_warnings() -> None:
    part = SplitCounts(listed=200, images=200, boxes={"red": 300})
    text = page(part, part, [])
    assert "Look at this first" not in text
    assert "Problems with files" not in text
    assert "There are 1 problem" not in text


def test_results_survive_plain_data() -> None:
    assert DetectionResult.from_dict(RESULT.to_dict()) == RESULT


def test_a_run_is_described_before_it_starts() -> None:
    config = DetectionConfig(optim=DetectionOptimConfig(epochs=2, batch=8))
    train = SplitCounts(listed=33, images=20, boxes={"red": 3, "blue": 1040}, difficult=2)
    text = describe_run(config, train, SplitCounts(listed=6, images=6, boxes={"red": 7, "blue": 0}), routes=4)
    for line in (
        "images    20 to train with, 6 to test with; none are held out",
        "left out  13 of 33 training images",
        "boxes     to train with 1,043: 3 red, 1,040 blue; 2 more are marked as difficult",
        "          to test with 7: 7 red, 0 blue",
        "training  2 epochs of 2 steps with 8 images: 4 steps",
        "pixels, 4 routes",
        "the gate (10 epochs of 1 step)",
    ):
        assert line in text
    assert "the gate" not in describe_run(config, train, train, routes=1)
