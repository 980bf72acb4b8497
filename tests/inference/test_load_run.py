"""`dsnet.load`: all kinds of runs, their routers, and images prepared as in the test split."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import dsnet
from dsnet.data.transforms.augment import normalise
from dsnet.detection import SavedDetector
from dsnet.detection.data.transforms import Preprocessing
from dsnet.detection.io import save_detector
from dsnet.training import load_model, save_checkpoint
from tests.support import error_of
from tests.support.detectors import detector

pytestmark = pytest.mark.xdist_group("predict")


def classifier(run: Path, name: str | None = None) -> dsnet.Classifier:
    loaded = dsnet.load(run, name)
    assert isinstance(loaded, dsnet.Classifier)
    return loaded


def test_a_classifier_computes_what_its_checkpoint_holds(run: Path, files: list[str], digits: Tensor) -> None:
    loaded = classifier(run)
    assert (loaded.classes, loaded.size) == (tuple("0123456789"), 16)
    known = loaded.checkpoint.data["input"]
    x = normalise(digits, tuple(known["mean"]), tuple(known["std"]))
    assert torch.equal(loaded.prepare(files), x)
    assert torch.equal(loaded.model(x, 1), load_model(run)(x, 1))


@pytest.mark.parametrize("form", ["path", "pillow", "array", "tensor"])
def test_images_of_all_forms_are_prepared_alike(run: Path, files: list[str], form: str) -> None:
    opened = Image.open(files[0]).convert("RGB")
    image = {
        "path": Path(files[0]),
        "pillow": opened,
        "array": np.asarray(opened),
        "tensor": torch.from_numpy(np.array(opened)).permute(2, 0, 1),
    }[form]
    loaded = classifier(run)
    assert torch.equal(loaded.prepare(image), loaded.prepare(files[:1]))


def test_a_budget_gives_the_calibrated_router(run: Path) -> None:
    loaded = classifier(run, "gated")
    routed = loaded.routed("45%", router="cascade")
    assert routed.router == loaded.calibration.router("cascade")
    assert routed.budget == pytest.approx(0.45 * routed.router.costs.largest)
    assert "calibrate" in error_of(lambda: classifier(run, "final").routed("45%"))


def test_a_run_without_normalisation_prepares_no_image(tmp_path: Path, run: Path) -> None:
    save_checkpoint(tmp_path, "last", load_model(run), step=1)
    assert "dsnet recalibrate" in error_of(
        lambda: classifier(tmp_path).prepare(np.zeros((16, 16, 3), np.uint8))
    )


def test_a_run_of_a_detector_gives_the_detector(tmp_path: Path) -> None:
    model = copy.deepcopy(detector("ds_mbnet_tiny")).float()
    spec = Preprocessing(64, (0.5,) * 3, (0.2,) * 3)
    save_detector(tmp_path, "final", model, step=1, classes=("a", "b", "c"), preprocessing=spec)
    loaded = dsnet.load(tmp_path)
    assert isinstance(loaded, SavedDetector)
    assert loaded.classes == ("a", "b", "c")
    x = loaded.prepare(np.zeros((20, 30, 3), np.uint8))
    torch.testing.assert_close(loaded.detector(x, 0).logits, model(x, 0).logits)


def test_a_missing_run_is_an_error(tmp_path: Path) -> None:
    assert "does not exist" in error_of(lambda: dsnet.load(tmp_path / "missing"))
