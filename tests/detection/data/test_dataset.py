"""Images that are decoded into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from dsnet.detection.data.dataset import load_detection_dataset
from dsnet.detection.data.voc import AnnotatedImage, VocAnnotations
from dsnet.detection.eval.metrics import GroundTruth
from tests.support import error_of


def with_damaged(folder: Path, count: int) -> VocAnnotations:
    """The annotations of one image that can be read, after ``count`` that cannot."""
    Image.new("RGB", (8, 8)).save(folder / "fine.png")
    truth = GroundTruth(np.array([[1.0, 1, 5, 5]]), np.array([0]))
    names = [*(f"gone{number}.png" for number in range(1, count + 1)), "fine.png"]
    items = tuple(AnnotatedImage(folder / name, 8, 8, truth) for name in names)
    return VocAnnotations(classes=("cat",), items=items, problems=(), listed=len(items))


def test_at_most_100_images_are_left_out(tmp_path: Path) -> None:
    pictures, problems = load_detection_dataset(with_damaged(tmp_path, 100), 4)
    assert [path.name for path in pictures.paths] == ["fine.png"]
    assert [problem.file.name for problem in problems] == [f"gone{number}.png" for number in range(1, 101)]
    message = error_of(lambda: load_detection_dataset(with_damaged(tmp_path, 101), 4))
    assert message == f"more than 100 images cannot be used, the last: {tmp_path / 'gone101.png'}"
