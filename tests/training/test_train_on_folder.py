"""Runs on a folder of images, from training to prediction: preparation of images, unusual names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dsnet.cli import build_parser, main
from dsnet.cli.options import open_run
from dsnet.core.settings import from_plain
from dsnet.data.transforms.augment import normalise
from dsnet.inference.classify import Prediction, open_predictor
from dsnet.recipes import get_recipe, list_recipes
from dsnet.training import load_checkpoint
from dsnet.training.config import TrainConfig
from dsnet.training.results import read_outcome
from dsnet.training.stage2.trained_run import open_trained
from tests.support.image_files import picture, resized_then_cropped

CLASSES = ("a", os.fsdecode(b"caf\xe9 \x1b[2J"))  # not UTF-8, and an escape sequence


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch on files that are resized to 20 pixels and cropped to 16."""
    base = tmp_path_factory.mktemp("folder")
    for label, name in enumerate(CLASSES):
        folder = base / "data" / name
        folder.mkdir(parents=True)
        for number in range(20):
            (folder / f"{number}\x07.png").write_bytes(picture(100 * label + number))
    settings = ("data.size=16", "data.crop_ratio=0.8", "optim.epochs=1", "run.device=cpu")
    chosen = [word for setting in settings for word in ("--set", setting)]
    command = ["train", "--data", str(base / "data"), "--out", str(base / "run"), *chosen]
    assert main([*command, "--set", "model=ds_mbnet_tiny"]) == 0
    return base / "run"


def test_all_commands_prepare_images_alike(run: Path) -> None:
    """Training's test split, `evaluate`, the routers' calibration and `predict`, against Pillow."""
    assert load_checkpoint(run, "final").data["input"]["crop_ratio"] == 0.8
    opened = open_run(build_parser().parse_args(["evaluate", str(run), "--device", "cpu"]), "test")
    trained, predictor = open_trained(run, device="cpu"), open_predictor(run, route=0, device="cpu")
    files = sorted(
        path
        for path in (run.parent / "data").glob("*/*.png")
        if any(resized_then_cropped(path.read_bytes(), 16, 20).tobytes() == x for x in _bytes(opened.images))
    )
    assert len(files) == len(opened.images) == 8
    assert _bytes(trained.test) == _bytes(opened.images)
    for path in files:
        pixels = torch.from_numpy(resized_then_cropped(path.read_bytes(), 16, 20).copy())[None]
        expected = (
            predictor.model(normalise(pixels, *predictor.preprocessing[1:3]), 0).softmax(1).max().item()
        )
        (found,) = predictor([path])
        assert isinstance(found, Prediction)
        assert found.best.probability == pytest.approx(expected, abs=1e-5)


def test_the_default_crop_ratio_is_1_except_for_imagenet(run: Path) -> None:
    recipe = json.loads((run / "recipe.json").read_text())
    del recipe["data"]["crop_ratio"]
    assert from_plain(TrainConfig, recipe).data.crop_ratio == 1.0  # what earlier versions wrote
    ratios = {name: get_recipe(name).config.data.crop_ratio for name in list_recipes()}
    assert all(ratio == (0.875 if name.startswith("imagenet_") else 1.0) for name, ratio in ratios.items())


@pytest.fixture
def plain_output(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """The text that was written to the terminal, without control characters."""

    def read() -> str:
        out, err = capfd.readouterr()
        assert all(c.isprintable() or c == "\n" for c in out + err)
        return out

    return read


def test_classes_and_files_of_any_name_are_reported(run: Path, plain_output: Callable[[], str]) -> None:
    report = (run / "report.html").read_text(encoding="utf-8")
    assert r"caf\udce9 \x1b[2J" in report
    assert "\x1b" not in report
    assert load_checkpoint(run, "final").data["classes"] == list(CLASSES)
    outcome = read_outcome(run)
    assert outcome is not None
    assert outcome.images is not None
    assert outcome.images.classes == CLASSES
    assert main(["evaluate", str(run), "--device", "cpu", "--plot", str(run / "routes.html")]) == 0
    assert main(["train", "--data", str(run.parent / "data"), "--dry-run"]) == 0
    plain_output()


def test_images_in_folders_of_any_name_are_predicted(run: Path, plain_output: Callable[[], str]) -> None:
    files = sorted((run.parent / "data" / CLASSES[1]).iterdir())[:3]
    names = [str(path) for path in files]
    damaged = run.parent / os.fsdecode(b"\xff\x1b[2J.png")
    damaged.write_bytes(b"")
    command = ["predict", "--route", "0", "--device", "cpu", str(run), *names]
    assert main(command) == 0
    assert r"caf\udce9 \x1b[2J" in plain_output()
    assert main([*command, "--json"]) == 0
    lines = [json.loads(line) for line in plain_output().splitlines()]
    assert [line["path"] for line in lines] == names
    assert {line["class"] for line in lines} <= set(CLASSES)
    assert main([*command, str(damaged)]) == 1
    plain_output()


def _bytes(images: object) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in next(images.epoch(99))[0]]
