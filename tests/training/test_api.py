"""Runs on folders of images, in memory or decoded while training, and their errors."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dsnet.core.metrics_log import MetricsFile
from dsnet.data.transforms.augment import Augment
from dsnet.models.convert import load_pretrained, register_network
from dsnet.models.loading import build_network
from dsnet.models.registry import unregister
from dsnet.training import load_checkpoint, train
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from tests.support import error_of


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes told apart by their colour, 24 to 40 pixels a side."""
    root = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 10)):
        for label, name in enumerate(("blue", "red")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = generator.integers(24, 40, 2)
                pixels = generator.integers(0, 120, (height, width, 3))
                pixels[..., 2 - 2 * label] += 120
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


def config(pictures: Path, **data: object) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(name=str(pictures), hold_out=0.2, **data),
        augment=Augment(crop=(0.4, 1.0), flip=True),
        scheme=SchemeConfig(name="ib+mvco", random=1, alpha=0.9),
        optim=OptimConfig(lr=0.2, epochs=4, batch=32),
        run=RunConfig(device="cpu"),
    )


@pytest.mark.parametrize("lazy", [False, True])
def test_folders_of_images_train_in_memory_and_decoded_on_demand(
    pictures: Path, tmp_path: Path, lazy: bool
) -> None:
    outcome = train(config(pictures, lazy=lazy, workers=0), tmp_path)
    assert outcome.test[-1].images == 20
    assert outcome.test[-1].accuracy >= 0.9
    saved = load_checkpoint(tmp_path)
    assert saved.data["classes"] == ["blue", "red"]
    assert build_network(saved).head.classifier.out_features == 2


def test_a_lazy_run_does_not_depend_on_its_workers(pictures: Path, tmp_path: Path) -> None:
    weights = []
    for workers in (0, 2):
        chosen = config(pictures, lazy=True, workers=workers)
        chosen = replace(chosen, optim=replace(chosen.optim, epochs=1))
        train(chosen, tmp_path / str(workers))
        weights.append(load_checkpoint(tmp_path / str(workers)).tensors["model"])
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]), key


def test_a_test_split_with_other_classes_is_an_error(pictures: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "test").mkdir(parents=True)
    (root / "train").symlink_to(pictures / "train")
    (root / "test" / "green").symlink_to(pictures / "test" / "red")
    (root / "test" / "blue").symlink_to(pictures / "test" / "blue")
    told = error_of(lambda: train(config(root), tmp_path / "run"))
    assert "classes that the training split does not have: green" in told
    assert not (tmp_path / "run" / "recipe.json").exists()  # found out before training, not after


def test_metrics_go_to_tensorboard_if_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            seen.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

        def close(self) -> None:
            seen.append(("closed",))

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    file = MetricsFile(tmp_path, after=6)
    file.write("train", 7, {"loss": 0.5, "note": "text"})
    file.close()
    assert seen == [("tensorboard", 7), ("train/loss", 0.5, 7), ("closed",)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    MetricsFile(tmp_path, after=7).close()  # without it there are the JSON lines alone


def test_a_pretrained_network_is_sorted_by_activations_on_the_training_images(
    pictures: Path, tmp_path: Path
) -> None:
    """The weights that read a channel rise with its number, the activations fall: activations win."""

    def activations_fall(num_classes: int = 2) -> nn.Module:
        layers = (nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1))
        rest = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
        return nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())), *rest)

    name = register_network(activations_fall).__name__
    try:
        network: Any = activations_fall()
        with torch.no_grad():
            network[2].weight.zero_()
            network[2].bias.copy_(torch.arange(8, 0, -1))
            network[4].weight.copy_(torch.linspace(1, 1.1, 8)[:, None, None].expand_as(network[4].weight))
        torch.save(network.state_dict(), tmp_path / "weights.pth")
        config = TrainConfig(
            model=name,
            options={"widths": (0.5, 1.0), "image_size": 16},
            weights=str(tmp_path / "weights.pth"),
            data=DataConfig(name=str(pictures), size=16),
            scheme=SchemeConfig(name="id", random=0),
            optim=OptimConfig(lr=1e-12, epochs=1, batch=8),
            run=RunConfig(device="cpu"),
        )
        train(config, tmp_path / "run")
        weights = load_checkpoint(tmp_path / "run", "final").tensors["model"]
        (bias,) = (value for value in weights.values() if value.shape == (8,) and float(value.max()) == 8)
        assert bias.tolist() == list(range(8, 0, -1))
        by_weights = load_pretrained(name, tmp_path / "weights.pth", widths=(0.5, 1.0), image_size=16)
        assert any(value.tolist() == list(range(1, 9)) for value in by_weights.parameters())
    finally:
        unregister(name)
