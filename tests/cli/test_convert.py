"""Converted networks on the command line: `dsnet convert`, `dsnet train --model`, and loading their runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dsnet
from dsnet.cli import main
from dsnet.models.convert.sources import _FACTORIES
from dsnet.models.registry import unregister
from dsnet.slicing import KeyState, SplitBatchNorm2d
from tests.support import error_of, need_timm

MODULE = '''
from torch import nn
from dsnet.models.convert import register_network

def layers(num_classes):
    sizes = [(3, 16), (16, 32), (32, 32), (32, 64)]
    convolutions = [
        nn.Sequential(nn.Conv2d(i, o, 3, 2 if n < 2 else 1, 1), nn.BatchNorm2d(o), nn.ReLU())
        for n, (i, o) in enumerate(sizes)
    ]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))

@register_network
def four_convolutions(num_classes=10):
    """Four convolutions, as a supernet."""
    return layers(num_classes)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module with a registered network, in the current folder; forgotten after the test."""
    name = f"networks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture(autouse=True)
def _forget_networks() -> object:
    yield
    for name in list(_FACTORIES):
        unregister(name)
        del _FACTORIES[name]


def test_a_network_of_timm_is_converted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    need_timm()
    settings = ["--set", "image_size=64", "--set", "widths=0.5,1", "--set", "num_classes=7"]
    assert main(["convert", "timm:resnet18", "--weights", "none", *settings]) == 0
    text = capsys.readouterr().out
    assert "layer3.1.conv1" in text
    assert "128 256" in text
    assert "residual stream" in text
    assert "the gate decides behind layer1.0" in text
    assert main(["convert", "timm:resnet18", "--weights", "none", *settings, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    model = dsnet.create_model(
        "timm:resnet18", image_size=64, widths=(0.5, 1.0), num_classes=7, device="meta"
    )
    assert [row["madds"] for row in data["routes"]] == [dsnet.madds(model, route) for route in model.space]


def test_a_network_of_the_user_trains_and_predicts(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of the file are the start; a run is loaded once its module is imported, not before."""
    assert main(["convert", "--import", module, "four_convolutions", "--set", "image_size=32"]) == 0
    network = _FACTORIES["four_convolutions"](10)
    with torch.no_grad():
        network[-1].bias.copy_(torch.linspace(100, 0, 10))  # so that every image is a 0
    save_file(network.state_dict(), "start.safetensors")
    train = ["train", "--data", "digits", "--model", "four_convolutions", "--weights", "start.safetensors"]
    train += ["--set", "data.size=32", "--set", "options.image_size=32", "--set", "options.widths=0.5,1"]
    train += ["--set", "epochs=1", "--set", "lr=1e-9", "--threads", "1", "--out", "run"]
    assert main(train) == 0
    results = json.loads(Path("run/results.json").read_text(encoding="utf-8"))
    assert results["test"][-1]["accuracy"] == pytest.approx(0.1, abs=0.03)
    model = dsnet.load("run").model
    assert len(model.space) == 2
    assert model.head.classifier.bias[0] > 99
    assert main(["gate", "run", "--set", "epochs=1", "--set", "passes=1"]) == 0
    assert main(["calibrate", "run"]) == 0
    routed = dsnet.load("run").routed("80%")
    assert routed(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    # Transfer starts from the run's weights, not from the file; its classes are new.
    transfer = ["transfer", "run", "--data", "digits", "--no-gate", "--out", "other", "--threads", "1"]
    Path("start.safetensors").unlink()
    assert main([*transfer, "--set", "epochs=1", "--set", "warmup=0", "--set", "lr=1e-9"]) == 0
    other = dict(dsnet.load("other").model.named_parameters())
    blocks = {name: weight for name, weight in model.named_parameters() if name.startswith("stages.")}
    assert blocks
    assert all(torch.allclose(other[name], weight, atol=1e-6) for name, weight in blocks.items())
    capsys.readouterr()
    for name in list(_FACTORIES):
        unregister(name)
        del _FACTORIES[name]
    message = error_of(lambda: dsnet.load("run"))
    assert "four_convolutions" in message
    assert "--import MODULE" in message


def test_images_calibrate_the_smaller_routes_only(module: str) -> None:
    """The largest route keeps the statistics of the network, as its results."""
    convert = ["convert", "--import", module, "four_convolutions", "--set", "image_size=32"]
    assert main([*convert, "--out", "plain"]) == 0
    save_file(_FACTORIES["four_convolutions"](10).state_dict(), "weights.safetensors")
    convert += ["--weights", "weights.safetensors"]
    assert main([*convert, "--data", "digits", "--out", "calibrated"]) == 0
    model = dsnet.load("calibrated").model
    states = [model.key_states(route) for route in model.space]
    assert all(KeyState.CALIBRATED in state for state in states)
    norm = next(module for module in model.stages.modules() if isinstance(module, SplitBatchNorm2d))
    assert torch.equal(norm.mean[-1], torch.zeros_like(norm.mean[-1]))  # of the new network
    assert norm.mean[0, :8].abs().max() > 0.01


def test_a_conversion_is_saved_as_a_run(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["convert", "--import", module, "four_convolutions", "--set", "image_size=32", "--out", "run"])
        == 0
    )
    assert "Saved in run" in capsys.readouterr().out
    assert dsnet.load("run").model.spec.name == "four_convolutions"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["train", "digits_mbnet", "--model", "timm:resnet18"],
            ["--model goes with --data", "--set model=NAME"],
        ),
        (["train", "--data", "digits", "--weights", "x.pth"], ["--weights is for --model NAME"]),
        (
            ["train", "--data", "digits", "--model", "four_convolutions", "--weights-by-order"],
            ["--weights FILE"],
        ),
        (["train", "--data", "digits", "--model", "ds_mbnet"], ["not a network to convert", "timm:NAME"]),
        (["convert", "ds_mbnet_tiny"], ["is a supernet already", "dsnet describe ds_mbnet_tiny"]),
        (["convert", "four_convolutions", "--weights", "x.pth"], ["no file x.pth"]),
        (["convert", "four_convolutions", "--set", "widths=0.5,2"], ["(0, 1]", "2"]),
        (["convert", "four_convolutions", "--set", "colour=red"], ["colour", "widths"]),
        (["convert", "four_convolutions", "--set", "gate=nowhere"], ["'nowhere'", "possible: 0"]),
    ],
)
def test_errors_say_what_is_possible(
    args: list[str], words: list[str], module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([args[0], "--import", module, *args[1:]]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for word in words:
        assert word in error


def test_gate_and_weights_train_together(module: str) -> None:
    train = [
        "train",
        "--import",
        module,
        "--data",
        "digits",
        "--model",
        "four_convolutions",
        "--threads",
        "1",
    ]
    train += ["--set", "data.size=32", "--set", "options.image_size=32", "--set", "epochs=1"]
    train += ["--set", "scheme.name=label", "--set", "scheme.joint=gumbel", "--out", "joint"]
    assert main(train) == 0
    results = json.loads(Path("joint/results.json").read_text(encoding="utf-8"))
    assert 0 < results["gated"]["accuracy"] <= 1
