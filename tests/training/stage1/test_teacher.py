"""External teachers see images as they were trained on, and are checked before training begins."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import dsnet
from dsnet.models.convert.sources import import_timm
from dsnet.recipes import get_recipe, list_recipes
from dsnet.training import save_checkpoint
from dsnet.training.stage1.teacher import load_teacher
from tests.support import assert_close, error_of, images, need_timm, randomise

SEEN = ((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
OWN = ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def normalised(pixels: torch.Tensor, channels: tuple) -> torch.Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in channels)
    return (pixels - mean) / std


def test_a_run_teaches_with_its_largest_route_and_normalisation(tmp_path: Path) -> None:
    model = randomise(dsnet.create_model("ds_mbnet_tiny"))
    data = {"input": {"mean": list(OWN[0]), "std": list(OWN[1])}}
    save_checkpoint(tmp_path, "last", model, step=1, data=data)
    teacher = load_teacher(str(tmp_path), classes=10, seen=SEEN, device="cpu")
    pixels = torch.rand(images(model, 4).shape)
    expected = model(normalised(pixels, OWN), model.space.largest)
    assert_close(teacher(normalised(pixels, SEEN)), expected, 1e-4)
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())
    assert not teacher(normalised(pixels, SEEN)).requires_grad
    assert "has 10 classes, the data has 7" in error_of(
        lambda: load_teacher(str(tmp_path), classes=7, seen=SEEN, device="cpu")
    )


def test_a_stand_alone_run_teaches_with_the_route_it_was_trained_at(tmp_path: Path) -> None:
    model = randomise(dsnet.create_model("ds_mbnet_tiny"))
    data = {"input": {"mean": [0.0] * 3, "std": [1.0] * 3}, "route": 1}
    save_checkpoint(tmp_path, "last", model, step=1, data=data)
    teacher = load_teacher(str(tmp_path), classes=10, seen=((0.0,) * 3, (1.0,) * 3), device="cpu")
    x = images(model, 4).float()
    assert_close(teacher(x), model(x, 1), 1e-5)


def test_unusable_teachers_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        return load_teacher(name, classes=10, seen=SEEN, device="cpu")

    assert "no checkpoint 'last'" in error_of(lambda: load(str(tmp_path)))
    save_checkpoint(tmp_path, "last", dsnet.create_model("ds_mbnet_tiny"), step=1)
    assert "how its images were normalised" in error_of(lambda: load(str(tmp_path)))
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "pip install 'dsnet-pytorch[timm]'" in error_of(lambda: load("timm:regnety_160"))


def test_a_network_of_timm_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake timm: the arguments it gets, and the use of its network."""
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10))
    network.pretrained_cfg = {"mean": OWN[0], "std": OWN[1], "num_classes": 10}
    stand_in: Any = types.ModuleType("timm")
    stand_in.is_model = lambda name: True

    def create_model(name: str, *, pretrained: bool, in_chans: int) -> torch.nn.Module:
        if name != "small" or not pretrained:
            raise RuntimeError(f"Unknown model ({name})")
        return network

    stand_in.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    teacher = load_teacher("timm:small", classes=10, seen=SEEN, device="cpu")
    pixels = torch.rand(2, 3, 8, 8)
    assert_close(teacher(normalised(pixels, SEEN)), network(normalised(pixels, OWN)).detach(), 1e-5)
    assert "timm cannot create large: Unknown model (large)" in error_of(
        lambda: load_teacher("timm:large", classes=10, seen=SEEN, device="cpu")
    )


def test_the_recipes_teachers_exist_in_timm() -> None:
    need_timm()
    timm = import_timm()
    teachers = {get_recipe(name).config.scheme.teacher for name in list_recipes()} - {None}
    assert teachers
    for teacher in teachers:
        name, _, tag = teacher.removeprefix("timm:").partition(".")
        assert f"{name}.{tag}" in timm.list_models(name + ".*", pretrained=True), teacher


def test_recipes_name_the_pretraining_of_their_teachers() -> None:
    """The paper's teachers were trained on ImageNet-1k only; recipes with others must say so."""
    taught = {name: config for name in list_recipes() if (config := get_recipe(name).config).scheme.teacher}
    assert {"imagenet_ds_vit_plus", "imagenet_ds_vit_plus_ablation"} <= set(taught)
    for name, config in taught.items():
        teacher = config.scheme.teacher
        assert teacher is not None
        for larger, words in (
            ("in12k", "ImageNet-12k"),
            ("in21k", "ImageNet-21k"),
            ("in22k", "ImageNet-22k"),
        ):
            assert larger not in teacher or words in list_recipes()[name], f"{name}: {teacher}"
    assert taught["imagenet_ds_vit_plus_ablation"].scheme.teacher == "timm:regnety_120.pycls_in1k"
