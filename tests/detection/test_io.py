"""Preparation of images in all forms for a saved detector; the Python examples of the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dsnet
from dsnet.core.checkpoint import Checkpoint
from dsnet.detection.io import Preprocessing, SavedDetector, load_detector, save_detector
from dsnet.detection.model.fssd import Detector
from dsnet.detection.postprocess import decode_detections
from dsnet.inference.detect import ImageDetections, detect_files
from tests.support import error_of, randomise
from tests.support.boxes import SIZE, TABLE
from tests.support.docs import code_blocks

READY = Preprocessing(SIZE, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


@pytest.fixture(scope="module")
def saved() -> SavedDetector:
    detector = randomise(Detector(dsnet.create_model("ds_mbnet_tiny"), 2, TABLE)).eval()
    return SavedDetector(detector, ("blue", "red"), READY, Checkpoint(tensors={}, data={"gate": {}}))


def test_all_kinds_of_images_are_prepared_as_predict_does(saved: SavedDetector, voc: Path) -> None:
    path = voc / "JPEGImages" / "image3.png"
    image = Image.open(path)
    pixels = np.asarray(image)
    ready = saved.prepare(path)
    assert ready.shape == (1, 3, SIZE, SIZE)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    for given in (str(path), image, pixels, pixels / 255, tensor, tensor / 255, tensor[None], [tensor]):
        assert torch.equal(saved.prepare(given), ready)
    (found,) = detect_files(saved, [path], route=0, score=0.0)
    assert isinstance(found, ImageDetections)
    with torch.no_grad():
        answers = saved.detector(ready, 0)
    (own,) = decode_detections(*answers, saved.detector.priors(SIZE), score=0.0)
    assert own.scores == pytest.approx(found.detections.scores, abs=1e-5)
    assert own.boxes[:20] == pytest.approx(found.detections.boxes[:20], abs=1e-5)  # later scores may tie
    both = saved.prepare([path, Image.new("L", (50, 20))])
    assert both.shape == (2, 3, SIZE, SIZE)
    assert torch.equal(both[:1], ready)


def test_photos_are_rotated_upright(saved: SavedDetector, tmp_path: Path) -> None:
    tag = Image.Exif()
    tag[0x0112] = 6
    Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(30, 40, 3)).save(
        tmp_path / "turned.png", exif=tag
    )
    with Image.open(tmp_path / "turned.png") as image:
        assert torch.equal(saved.prepare(image), saved.prepare(tmp_path / "turned.png"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no image to prepare"),
        (7, "not int"),
        (np.zeros((3, 8, 8), np.uint8), "shape (3, 8, 8)"),
        (np.full((8, 8, 3), 200.0), "in 0…1, not from 200 to 200"),
        (np.full((8, 8, 3), np.nan), "in 0…1"),
        (np.zeros((8, 8, 3), np.int64), "not of int64"),
    ],
)
def test_bad_images_are_errors(saved: SavedDetector, given: object, message: str) -> None:
    assert message in error_of(lambda: saved.prepare(given))


def test_the_code_of_the_docs_runs(
    saved: SavedDetector, voc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = code_blocks("docs/detection.md")
    monkeypatch.chdir(tmp_path)
    save_detector(
        Path("runs/bccd_ds_mbnet"),
        "gated",
        saved.detector,
        step=0,
        classes=saved.classes,
        preprocessing=saved.preprocessing,
    )
    Path("photos").mkdir()
    for name in ("a", "b"):
        Image.open(voc / "JPEGImages" / "image3.png").save(f"photos/{name}.jpg")
    names: dict[str, object] = {}
    assert block.count("runtime.compile(saved.detector, ") == 2
    exec(block.replace("compile(saved.detector, ", 'compile(saved.detector, backend="eager", '), names)
    assert names["images"].shape == (2, 3, SIZE, SIZE)
    assert len(names["fast"]) == 2
    assert "does not hold" in error_of(lambda: names["ends"].detect(names["images"], 1))
    assert load_detector("runs/bccd_ds_mbnet").preprocessing == READY
