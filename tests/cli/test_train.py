"""``dsnet train`` and ``dsnet recipes``: output, signals, and every recipe."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dsnet
from dsnet.cli import main
from dsnet.core.settings import from_plain, to_plain
from dsnet.detection.train.config import DetectionConfig
from dsnet.recipes import get_recipe, list_recipes
from dsnet.recipes.registry import register_recipe
from dsnet.recipes.resolve import resolve_recipe
from dsnet.training import load_checkpoint
from tests.support import error_of

QUICK = [
    *("--set", "epochs=1"),
    *("--set", "batch=128"),
    *("--set", "calibration=256"),
    *("--set", "device=cpu"),
]


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_resolves_and_has_duration_and_expectation(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.duration
    assert recipe.expect
    config = resolve_recipe(name, [])
    assert from_plain(type(config), json.loads(json.dumps(to_plain(config)))) == config
    model = dsnet.create_model(config.model, device="meta", **config.options)
    config.scheme.parse().draw(model.space, config.scheme.random, torch.Generator().manual_seed(0))
    size = config.data.size or model.input_spec.image_size
    model.input_spec.check(size, size)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_has_a_dry_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", name, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "optim.lr = " in text
    assert "A step runs" in text
    assert re.search(r"^ +0 ", text, re.M)  # the route table
    assert main(["train", name, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]


def test_recipes_are_listed_with_command_duration_and_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    for name in list_recipes():
        assert f"dsnet train {name}" in text
    for name in list_recipes(DetectionConfig):
        assert f"dsnet detect train {name}" in text
    assert main(["recipes", "digits_mbnet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digits_mbnet"]["settings"]["data"]["name"] == "digits"
    assert main(["recipes", "digits_mbnett"]) == 2
    assert "did you mean digits_mbnet" in capsys.readouterr().err
    assert main(["train", "bccd_mbnet"]) == 2
    assert "dsnet detect train bccd_mbnet" in capsys.readouterr().err


def test_a_recipe_needs_a_new_name_and_a_docstring() -> None:
    def digits_mbnet() -> None:
        """Taken."""

    assert "registered already" in error_of(lambda: register_recipe(digits_mbnet))
    assert "docstring" in error_of(lambda: register_recipe(lambda: None))


def test_training_shows_every_route_and_can_be_evaluated_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert main(["train", "digits_mbnet", "--out", str(folder), *QUICK]) == 0
    shown = capsys.readouterr()
    assert "epoch 1: held-out route 0" in shown.err
    rows = re.findall(r"^ +(\d) .* ([\d.]+)% +([\d.]+)% +([\d.]+)%$", shown.out, re.M)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert "before and after re-calibration" in shown.out
    plot = tmp_path / "routes.svg"
    assert main(["evaluate", str(folder), "--json", "--plot", str(plot), "--device", "cpu"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [f"{100 * route['accuracy']:.2f}" for route in again["routes"]] == [row[1] for row in rows]
    assert plot.read_text().count("<circle") == 4
    assert main(["evaluate", str(folder), "--plot", "x.png"]) == 2
    assert ".svg or .html" in capsys.readouterr().err
    assert main(["train", "digits_mbnet", "--out", str(folder)]) == 2
    assert "--resume" in capsys.readouterr().err
    recipe = str(folder / "recipe.json")
    assert main(["train", recipe, "--dry-run", "--set", "seed=5"]) == 0
    assert "run.seed = 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["digits_mbnett"], "did you mean digits_mbnet"),
        (["digits_mbnet", "--set", "epochs"], "key=value"),
        (["digits_mbnet", "--set", "optim.epochs=ten"], "optim.epochs must be a whole number, not 'ten'"),
        (["digits_mbnet", "--set", "model=resnet50"], "static network"),
        (["digits_mbnet", "--set", "options.width=3"], "no option width"),
        (["digits_mbnet", "--set", "options.activation=tanh"], "choose from silu, relu, hard_swish"),
        (["digits_mbnet", "--set", "data.name=nothing"], "no data set 'nothing'"),
        (["digits_mbnet", "--set", "options.num_classes=7"], "digits has 10 classes"),
        (["digits_mbnet", "--set", "device=abacus"], "possible: auto, cpu, cuda"),
        (["missing/recipe.json"], "missing/recipe.json"),
        (["digits_mbnet", "--set", "scheme.route=9", "--set", "scheme.name=label"], "no route 9"),
    ],
)
def test_impossible_settings_are_refused_with_a_reason(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", *arguments, "--out", str(tmp_path / "run")]) in (1, 2)
    assert told in capsys.readouterr().err


def test_a_file_without_a_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.json"
    for text, told in (("{", "not JSON"), ("[]", "expected an object"), ('{"lr": 1}', "no setting 'lr'")):
        path.write_text(text)
        assert main(["train", str(path)]) == 2
        assert told in capsys.readouterr().err
    path.write_text(json.dumps(to_plain(DetectionConfig())))
    assert main(["train", str(path)]) == 2
    assert f"{path} is a recipe for a detector: dsnet detect train {path}" in capsys.readouterr().err


def test_sigterm_saves_and_resume_finishes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "dsnet", "train", "digits_mbnet", "--out", str(folder), *QUICK]
    command += ["--set", "epochs=3", "--set", "log_every=1"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    _, err = started.communicate(timeout=120)
    assert started.returncode == 128 + signal.SIGTERM, err
    assert "--resume" in err
    assert "--resume" in (folder / "report.html").read_text(encoding="utf-8")
    assert 0 < load_checkpoint(folder, "last").data["step"] < 30
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Going on after step" in done.stderr
    assert "Final network" in done.stdout
    assert done.stdout.splitlines()[-1] == f"Report: {folder / 'report.html'}"


def ended(*args: object, **options: object) -> None:
    """In place of what takes long: SIGTERM comes."""
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_after_the_last_step_and_in_a_gate_reports_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    command = ["train", "digits_mbnet", "--out", str(folder), *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr("dsnet.training.api._finish", ended)
        assert main(command) == 128 + signal.SIGTERM
    assert f"Stopped. {folder} keeps what was saved. Go on with" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("dsnet.training.api._prepare", ended)
        assert main([*command[:3], str(tmp_path / "other"), *QUICK]) == 128 + signal.SIGTERM
    assert "Stopped. Nothing was saved yet." in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr("dsnet.training.stage2.api.train_from_signals", ended)
        assert main(["gate", str(folder)]) == 128 + signal.SIGTERM
    assert f"nothing of this gate is saved, {folder} is as it was" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("dsnet.cli.calibrate.calibrate_run", ended)
        assert main(["calibrate", str(folder)]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.endswith("dsnet: stopped\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_torchrun_trains_on_two_processes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "dsnet"]
    command = [sys.executable, *launch, "train", "digits_mbnet", "--out", str(folder), *QUICK]
    done = subprocess.run(
        [*command, "--set", "lr=0.05"], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Final network") == 1  # one of them reports
    assert done.stderr.count("on this machine") == 1
    results = json.loads((folder / "results.json").read_text())
    assert sum(results["classes"]["images"]) == 359
    assert sum(results["classes"]["correct"]) == results["test"][-1]["correct"]
    assert {row["images"] for row in results["test"]} == {359}  # both halves of the test split
    assert {row["statistics"] for row in results["test"]} == {"calibrated"}
