"""A short recipe, a run to predict with, and digits as files."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor

from dsnet.calibration import calibrate, collect
from dsnet.cli import main
from dsnet.data import load_dataset
from dsnet.data.transforms.augment import Augment
from dsnet.inference.classify import Prediction, Predictor
from dsnet.routing import CostTable
from dsnet.training import GateConfig, open_trained, save_checkpoint, train_gate
from dsnet.training.api import train
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig

COUNT = 24
BASE = TrainConfig(
    model="ds_mbnet_tiny",
    data=DataConfig(name="digits", calibration=512),
    augment=Augment(padding=1),
    scheme=SchemeConfig(name="label"),
    optim=OptimConfig(lr=0.2, epochs=3, warmup=1, batch=64),
    run=RunConfig(device="cpu", validate_every=2),  # so that its best is not its last
)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: final, without router; fresh, with a gate; gated, calibrated; ms, a cascade in ms."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    train(BASE, folder)
    for name in ("fresh", "gated"):
        train_gate(folder, GateConfig(epochs=3, passes=1), save_as=name, device="cpu")
    assert main(["calibrate", str(folder), "--name", "gated", "--device", "cpu"]) == 0
    opened = open_trained(folder, "final", device="cpu")
    costs = CostTable(unit="ms", prefix=0.5, segments=(((1.0, 3.0, 4.0, 6.0),),))
    made = calibrate(collect(opened.model, opened.seen(opened.held_out)), costs, gate=False)
    kept = {key: opened.saved.data[key] for key in ("recipe", "input", "classes", "route")}
    save_checkpoint(folder, "ms", opened.model, step=1, data={**kept, "routing": made.to_dict()})
    return folder


@pytest.fixture(scope="session")
def digits() -> Tensor:
    return load_dataset("digits", "test").images[:COUNT]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, digits: Tensor) -> list[str]:
    """The digits as files, in the order of their names."""
    folder = tmp_path_factory.mktemp("images")
    paths = [str(folder / f"{number:02d}.png") for number in range(COUNT)]
    for path, digit in zip(paths, digits, strict=True):
        picture(digit).save(path)
    return paths


def picture(digit: Tensor) -> Image.Image:
    return Image.fromarray(digit.permute(1, 2, 0).numpy())


def predicted(predictor: Predictor, paths: list[str], **settings: int) -> list[Prediction]:
    results = list(predictor(paths, **settings))
    assert all(isinstance(result, Prediction) for result in results)
    return results  # type: ignore[return-value]
