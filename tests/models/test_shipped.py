"""Trained weights that come with the package: what is said of them is true, and damage is noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dsnet.cli import main
from dsnet.core.settings import to_plain
from dsnet.data import load_dataset
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError
from dsnet.models import shipped
from dsnet.models.loading import build_network
from dsnet.models.shipped import list_shipped, load_shipped, shipped_weights
from dsnet.recipes import get_recipe

NAMES = list_shipped()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a copy of the shipped weights, which may be damaged."""
    shutil.copytree(shipped.FOLDER, tmp_path / "shipped")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    return tmp_path / "shipped" / "fashion_mnist_resnet"


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_a_licence_a_small_size_and_the_recipe_that_made_them(name: str) -> None:
    weights = shipped_weights(name)
    assert weights.bytes < 4e6
    assert (weights.folder / "LICENSE").is_file()
    recipe = json.loads(json.dumps(to_plain(get_recipe(weights.recipe).config)))
    assert weights.checkpoint["recipe"] == recipe
    assert len(weights.accuracy) == len(build_network(load_shipped(name)).space)


@torch.inference_mode()
def test_the_accuracy_is_as_stated() -> None:
    weights = shipped_weights("fashion_mnist_resnet")
    model, test = build_network(load_shipped(weights.name)), load_dataset("fashion_mnist_sample", "test")
    seen = weights.checkpoint["input"]
    x, labels = next(test.subset(torch.arange(500)).epoch(500))
    logits = model(normalise(x, tuple(seen["mean"]), tuple(seen["std"])), model.space.smallest)
    assert float((logits.argmax(1) == labels).double().mean()) == pytest.approx(weights.accuracy[0], abs=0.05)
    assert tuple(weights.checkpoint["classes"]) == test.classes


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights"]) == 0
    text = capsys.readouterr().out
    assert main(["weights", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == NAMES
    for entry in listed:
        assert entry["sha256"] in text
        assert f"dsnet train {entry['recipe']}" in text
        assert {"network", "data", "accuracy", "bytes", "license"} <= set(entry)


def test_damaged_and_missing_files_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(
        DsnetError, match=r"SHA-256 of .*model.safetensors differs .* install the package again"
    ):
        load_shipped("fashion_mnist_resnet")
    out = folder.parent / "demo"
    assert main(["demo", "--out", str(out)]) == 2
    assert "install the package again" in capsys.readouterr().err
    assert not (out / "supernet").exists()
    file.unlink()
    for call in (load_shipped, lambda name: shipped_weights(name).bytes):
        with pytest.raises(DsnetError, match=r"model.safetensors is missing; .* install the package again"):
            call("fashion_mnist_resnet")
    (folder / "card.json").write_text("{}")
    with pytest.raises(DsnetError, match=r"card.json"):
        shipped_weights("fashion_mnist_resnet")
    with pytest.raises(DsnetError, match="no weights named 'nothing' come with this package"):
        shipped_weights("nothing")
