"""Runs that start from another: its weights, its normalisation, its routing heads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import dsnet
from dsnet.cli import main
from dsnet.core.checkpoint import load_checkpoint
from dsnet.data import load_dataset
from dsnet.data.transforms.augment import normalise
from dsnet.models.loading import load_model, save_checkpoint
from dsnet.recipes import get_recipe, list_recipes
from dsnet.slicing import KeyState
from dsnet.training import GateConfig, train
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from dsnet.training.stage2.api import train_gate
from dsnet.training.transfer import fine_tuning, routing_from, start_from, transfer_rate
from tests.support import error_of
from tests.support.image_files import write_cifar

BASE = TrainConfig(
    model="ds_mbnet_tiny",
    data=DataConfig(name="digits", hold_out=0.1),
    scheme=SchemeConfig(name="label"),
    optim=OptimConfig(epochs=2, batch=128, lr=0.5, warmup=0),
    run=RunConfig(device="cpu"),
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on all digits, with a gate."""
    folder = tmp_path_factory.mktemp("first") / "run"
    train(BASE, folder)
    train_gate(folder, GateConfig(epochs=1, passes=1, space="0,3"), device="cpu")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of digits as a folder of files."""
    root = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        digits = load_dataset("digits", split)
        for number in range(len(digits)):
            label = int(digits.labels[number])
            if label > 2:
                continue
            path = root / split / f"digit{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(digits.images[number].permute(1, 2, 0).numpy()).save(path)
    return root


def moved(config: TrainConfig, first: Path, folder: Path) -> TrainConfig:
    data = DataConfig(name=str(folder), hold_out=0.1, size=16, workers=0)
    return replace(config, start=str(first), data=data, optim=replace(config.optim, epochs=1, batch=64))


def test_a_run_starts_from_another(first: Path, folder: Path, tmp_path: Path) -> None:
    outcome = train(moved(BASE, first, folder), tmp_path / "run")
    before, after = load_model(first, "final"), load_model(tmp_path / "run", "final")
    assert after.head.classifier.weight.shape[0] == 3
    assert before.head.classifier.weight.shape[0] == 10
    known = [load_checkpoint(run, "final").data["input"] for run in (first, tmp_path / "run")]
    assert known[0] == known[1]  # normalised as the weights know it, not by the new images
    assert outcome.test[-1].accuracy > 0.9  # one epoch: from scratch it is far below
    for route in after.space:
        assert after.key_states(route) == {KeyState.CALIBRATED}
    name = "blocks.4.pointwise.conv.weight"
    assert not torch.equal(before.state_dict()[name], after.state_dict()[name])
    scratch = train(replace(moved(BASE, first, folder), start=None), tmp_path / "scratch")
    assert scratch.test[-1].accuracy < outcome.test[-1].accuracy


def test_the_weights_are_those_of_the_run(first: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny", num_classes=3)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    start_from(model, first)
    theirs = load_model(first).state_dict()
    for name, value in model.state_dict().items():
        if ".routing." in name or name.startswith("head.classifier."):
            assert torch.equal(value, fresh[name])
        else:
            assert torch.equal(value, theirs[name]), name


def test_gates_start_from_those_of_the_run(first: Path, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(moved(BASE, first, folder), run)
    config = GateConfig(epochs=1, passes=1, space="0,3", lr=1e-12, start=str(first))
    train_gate(run, config, device="cpu")
    old, new = (load_model(path).gate(0) for path in (first, run))
    assert old.choices == new.choices == (0, 3)
    for mine, theirs in zip(new.routing.parameters(), old.routing.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-9)
    train_gate(run, replace(config, start=None), device="cpu", save_as="anew")
    anew = load_model(run, "anew").gate(0).routing
    assert not torch.allclose(anew.last.weight, new.routing.last.weight, atol=1e-4)


def test_resuming_does_not_need_the_first_run(first: Path, folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "first"
    first.rename(copied)
    try:
        config = replace(moved(BASE, copied, folder), run=replace(BASE.run, save_steps=1))
        train(config, tmp_path / "run")
    finally:
        copied.rename(first)
    again = train(config, tmp_path / "run", resume=True)
    assert again.status.finished


def test_runs_that_do_not_fit_are_errors(first: Path, folder: Path, tmp_path: Path) -> None:
    config = moved(BASE, first, folder)
    other = error_of(lambda: train(replace(config, model="ds_mbnet_plus_tiny"), tmp_path / "a"))
    assert f"{first} holds ds_mbnet_tiny, not ds_mbnet_plus_tiny: give model=ds_mbnet_tiny" in other
    size = error_of(lambda: train(replace(config, data=replace(config.data, size=32)), tmp_path / "b"))
    assert "was trained on images of 16 pixels, these have 32" in size
    assert "set data.size=16" in size
    nowhere = error_of(lambda: train(replace(config, start=str(tmp_path / "no")), tmp_path / "c"))
    assert f"no folder {tmp_path / 'no'} to start from" in nowhere
    assert f"`dsnet train RECIPE --out {tmp_path / 'no'}`" in nowhere
    alone = replace(config.scheme, route=0)
    assert "start and scheme.route cannot be combined" in error_of(lambda: replace(config, scheme=alone))
    words = ["transfer", str(first), "--data", str(folder), "--out", str(tmp_path / "d")]
    assert main([*words, "--gate-set", "space=S"]) == 2  # before anything is trained
    assert not (tmp_path / "d").exists()
    model = dsnet.create_model("ds_mbnet_tiny")
    assert "heads for the choices [0, 3], not [0, 1, 2, 3]" in error_of(lambda: routing_from(model, first))
    model.reset_routing(GateConfig(space="0,3").routes(model), form=GateConfig(head="scalar").form)
    assert "another form" in error_of(lambda: routing_from(model, first))
    wide = dsnet.create_model("ds_mbnet_tiny", in_channels=1)
    assert "with these options: stem.conv.weight" in error_of(lambda: start_from(wide, first))


@pytest.mark.parametrize("name", ["stem.conv.weight", "gates.0.routing.last.weight"])
def test_weights_that_are_not_finite_are_an_error(first: Path, name: str, tmp_path: Path) -> None:
    saved, model = load_checkpoint(first), load_model(first)
    model.state_dict()[name].view(-1)[0] = float("nan")
    save_checkpoint(tmp_path / "nan", "final", model, step=1, data=saved.own_data)
    begin = routing_from if "routing" in name else start_from
    fresh = load_model(first)
    message = error_of(lambda: begin(fresh, tmp_path / "nan"))
    assert f"{tmp_path / 'nan'}'s weights are not finite: 1 of" in message
    assert name in message


def test_a_start_that_does_not_fit_is_an_error_before_training(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "digits_mbnet", "--out", str(tmp_path / "run"), "--set", f"start={first}"]
    for setting, told in (
        ("model=ds_mbnet_plus_tiny", f"{first} holds ds_mbnet_tiny, not ds_mbnet_plus_tiny"),
        ("data.size=32", "was trained on images of 16 pixels, these have 32"),
        (f"start={tmp_path / 'no'}", "to start from"),
    ):
        assert main([*words, "--set", setting]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert "multiply-adds" not in error  # nothing was timed for it
        assert not (tmp_path / "run").exists()


def test_the_transfer_command(
    first: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "moved"
    words = ["transfer", str(first), "--data", str(folder), "--out", str(out), "--set", "optim.epochs=1"]
    words += [
        "--set",
        "optim.warmup=0",
        "--set",
        "batch=64",
        "--gate-set",
        "epochs=1",
        "--gate-set",
        "passes=1",
    ]
    assert main([*words, "--gate-transfer"]) == 0
    shown = capsys.readouterr().out
    assert f"ds_mbnet_tiny on {folder}" in shown
    assert f"Next: dsnet calibrate {out}" in shown
    saved = load_checkpoint(out, "gated").data
    assert saved["network"]["gates"] == [[0, 3]]
    assert saved["gate"]["start"] == str(first)
    assert saved["recipe"]["start"] == str(first)
    assert saved["recipe"]["optim"]["lr"] == pytest.approx(0.7 * 64 / 1024)
    page = (out / "report.html").read_text()
    assert "has a trained gate" in page
    assert f"dsnet calibrate {out}" in page
    assert "dsnet gate" not in page

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for more in ([], ["--no-gate"]):
        assert main([*words, "--resume", *more]) == 0
        assert f"{out} is finished, its gate included: nothing is left to train" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before

    (out / "gated").unlink()
    assert main([*words, "--resume", "--no-gate"]) == 0
    assert f"`dsnet gate {out}`" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("dsnet.cli.transfer.train_gate", interrupted)
        assert main([*words, "--resume"]) == 130
    told = capsys.readouterr().err
    assert f"saved: {out / 'final'}" in told
    assert "the same command and --resume" in told
    assert main([*words, "--resume"]) == 0  # the network is there: its gate alone
    assert load_checkpoint(out, "gated").data["gate"]["start"] is None


def interrupted(*arguments: object, **settings: object) -> None:
    raise KeyboardInterrupt


def test_stopping_the_gate_reports_what_is_kept(
    first: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dsnet.cli.gate.train_gate", interrupted)
    assert main(["gate", str(first)]) == 130
    assert "nothing of this gate is saved" in capsys.readouterr().err


def test_the_learning_rate_depends_on_the_optimizer() -> None:
    sgd, adamw = OptimConfig(lr=0.2, batch=64), OptimConfig(kind="adamw", lr=2e-3, batch=64)
    for trained in (sgd, adamw):
        for batch in (16, 64, 1024):  # the paper's, whatever the network was trained by
            assert transfer_rate(replace(sgd, batch=batch), trained) == pytest.approx(0.7 * batch / 1024)
    rates = [transfer_rate(replace(adamw, batch=batch), adamw) for batch in (16, 64, 256)]
    assert rates == pytest.approx([1e-3, 2e-3, 4e-3])
    assert [transfer_rate(replace(adamw, batch=batch), sgd) for batch in (256, 1024)] == [5e-4, 1e-3]


def test_fine_tuning_inherits_the_settings_of_a_run() -> None:
    """A transformer that was trained by AdamW: its own rate, at the paper's schedule."""
    vit = get_recipe("digits_vit").config
    usual = fine_tuning(vit, {}).optim
    assert (usual.kind, usual.lr, usual.batch) == ("adamw", 2e-3, 64)
    assert (usual.epochs, usual.warmup) == (70, 15)
    assert fine_tuning(vit, {"batch": 256}).optim.lr == pytest.approx(4e-3)
    assert fine_tuning(vit, {"optim.kind": "sgd"}).optim.lr == pytest.approx(0.7 * 64 / 1024)
    for key in ("lr", "optim.lr"):
        assert fine_tuning(vit, {key: 0.5}).optim.lr == 0.5
    short = fine_tuning(vit, {"epochs": 14})
    assert (short.optim.epochs, short.optim.warmup) == (14, 3)
    assert fine_tuning(vit, {"optim.epochs": 14, "warmup": 0}).optim.warmup == 0


def test_a_teacher_of_other_classes_is_left_out() -> None:
    taught = get_recipe("imagenet_ds_vit_plus").config
    alone = fine_tuning(taught, {}).scheme
    assert (alone.name, alone.teacher) == ("label+mvco", None)
    assert alone == replace(taught.scheme, name="label+mvco", teacher=None)
    assert fine_tuning(taught, {"scheme.name": "ib"}).scheme.teacher is None
    assert fine_tuning(taught, {"teacher": "runs/t"}).scheme == replace(taught.scheme, teacher="runs/t")
    assert "needs a teacher" in error_of(lambda: fine_tuning(taught, {"scheme.name": "ed"}))
    plain = get_recipe("digits_mbnet").config
    assert fine_tuning(plain, {}).scheme == plain.scheme


@pytest.mark.parametrize("name", ["cifar10_vit_transfer", "cifar100_vit_transfer", "digits_vit_transfer"])
def test_transfer_recipes_of_transformers_start_from_a_transformer(name: str) -> None:
    config = get_recipe(name).config
    assert config.model.startswith("ds_vit_plus")
    assert config.start is not None
    first = get_recipe(Path(config.start).name).config
    settings = {"optim.epochs": config.optim.epochs}
    usual = fine_tuning(first, settings)
    assert config.scheme == usual.scheme
    assert config.optim == replace(usual.optim, warmup=config.optim.warmup)


def test_the_command_reports_that_the_teacher_is_left_out(
    first: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taught = tmp_path / "taught"
    shutil.copytree(first, taught)
    recipe = json.loads((taught / "recipe.json").read_text())
    recipe["scheme"] |= {"name": "ed+mvco", "teacher": "runs/other"}
    (taught / "recipe.json").write_text(json.dumps(recipe))
    words = ["transfer", str(taught), "--data", str(folder), "--out", str(tmp_path / "new"), "--no-gate"]
    assert main([*words, "--set", "epochs=1", "--set", "data.calibration=64"]) == 0
    told = capsys.readouterr().err
    assert "The teacher runs/other knows other classes: fine-tuning by scheme label+mvco" in told
    assert load_checkpoint(tmp_path / "new", "final").data["recipe"]["scheme"]["name"] == "label+mvco"


def test_errors_of_the_transfer_command(
    first: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["transfer", "--data", str(folder)]
    assert main([*words, str(tmp_path)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    bare = tmp_path / "bare"
    train(replace(BASE, optim=replace(BASE.optim, epochs=1)), bare)
    assert main([*words, str(bare), "--gate-transfer"]) == 2
    assert "has no trained gate to begin with" in capsys.readouterr().err
    assert main([*words, str(first), "--set", "batch=x", "--out", str(tmp_path / "x")]) == 2
    assert "whole number" in capsys.readouterr().err
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a").symlink_to(folder / "train" / "digit0")
    alone = ["transfer", str(first), "--data", str(tmp_path / "own"), "--out", str(tmp_path / "x")]
    assert main(alone) == 2
    assert "has one class (a); telling apart takes at least two" in capsys.readouterr().err
    assert main([*words, str(first), "--gate-set", "epoch=1", "--out", str(tmp_path / "x")]) == 2
    assert "did you mean epochs" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_small_images_are_resized_to_those_of_the_run(first: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = rng.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
        labels = [i % 10 for i in range(20)]
        shades = 25 * np.array(labels, dtype=np.uint8)
        images[:, :, :, :16] = shades[:, None, None, None]  # what there is to learn
        write_cifar(tmp_path / "cifar-10-batches-py" / name, images, labels=labels)
    out = tmp_path / "moved"
    words = ["transfer", str(first), "--data", "cifar10", "--out", str(out), "--gate-transfer"]
    words += ["--set", f"data.root={tmp_path}", "--set", "data.hold_out=0.2", "--set", "batch=20"]
    words += ["--set", "optim.epochs=2", "--set", "optim.warmup=0", "--gate-set", "epochs=1"]
    assert main([*words, "--set", "data.size=24"]) == 2
    assert main(words) == 0
    saved = load_checkpoint(out, "gated").data
    assert saved["recipe"]["data"]["size"] == saved["input"]["size"] == 16

    stored, model = load_dataset("cifar10", "test", root=tmp_path), load_model(out, "final")
    assert stored.size == 32
    small = F.interpolate(stored.images.float(), (16, 16), mode="bilinear", antialias=True).round()
    seen = normalise(small, tuple(saved["input"]["mean"]), tuple(saved["input"]["std"]))
    results = json.loads((out / "results.json").read_text())["test"]
    for result in results:
        with torch.no_grad():
            right = model(seen, result["route"]).argmax(1) == stored.labels
        assert result["correct"] == int(right.sum())
        assert result["madds"] == dsnet.madds(model, result["route"], 16)
    assert results[-1]["correct"] > 2 * 20 / 10  # chance: a tenth


def test_transfer_recipes_start_from_the_run_of_another_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = {name: config for name in list_recipes() if (config := get_recipe(name).config).start is not None}
    assert {"cifar10_transfer", "cifar100_transfer", "imagenette_to_cifar10", "digits_transfer"} <= set(begun)
    for config in begun.values():
        assert config.start is not None
        runs, name = Path(config.start).parts
        assert runs == "runs"
        first = get_recipe(name).config
        assert (first.model, first.options) == (config.model, config.options)
        usual = dsnet.create_model(config.model, device="meta").input_spec.image_size
        assert (first.data.size or usual) == (config.data.size or usual)
    missing = error_of(lambda: train(begun["digits_transfer"], tmp_path / "run"))
    assert "no folder runs/digits_seen_mbnet" in missing
    assert "`dsnet train digits_seen_mbnet`" in missing
