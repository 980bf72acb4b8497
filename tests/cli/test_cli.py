"""The command line: output, errors and help."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

import dsnet
from dsnet.cli import main
from dsnet.data import load_dataset
from dsnet.models.loading import build_network
from dsnet.slicing import KeyState
from dsnet.training import load_checkpoint, save_checkpoint


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(args) == 0
    return capsys.readouterr().out


def test_models_lists_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "models")
    for name in dsnet.list_models():
        assert re.search(rf"^{name} ", text, re.M), name
    assert "132.9M – 565.4M" in text
    twins = run(capsys, "models", "--kind", "twin")
    assert "resnet50" in twins
    assert "ds_mbnet" not in twins.split("what it is")[0] + "".join(
        line[:12] for line in twins.splitlines()[2:]
    )


def test_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(run(capsys, "models", "--json"))}
    assert rows["ds_mbnet"]["madds"] == [132867296, 565422848]
    assert "activation" in rows["ds_mbnet"]["options"]
    assert rows["resnet50"]["routes"] is None


def test_describe_shows_sizes_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "describe", "ds_mbnet_plus")
    assert "12 routes, one gate" in text
    assert "S = routes 0 to 3" in text
    assert re.search(r"^ +11 +640 1152 +7 7 +3 3 +603\.9M +7\.54M", text, re.M)


def test_describe_shows_a_sample_of_many_routes(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "describe", "ds_resnet")
    assert "32 of 256 routes" in text
    assert re.search(r"^ +255 +3 3 3 3 +256 512 1024 2048", text, re.M)
    everything = run(capsys, "describe", "ds_resnet", "--all")
    assert len(everything.splitlines()) == len(text.splitlines()) - 1 + (256 - 32)


def test_describe_as_json_is_the_route_space_with_counts(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(
        run(capsys, "describe", "ds_vit_plus", "--image-size", "384", "--convention", "all", "--json")
    )
    model = dsnet.create_model("ds_vit_plus", device="meta")
    assert [row["madds"] for row in data["routes"]] == [
        dsnet.madds(model, r, 384, "all") for r in model.space
    ]
    assert data["routes"][0]["stages"] == [
        {"width": 192, "depth": 12, "hidden": 576, "heads": 4, "head_dim": 48}
    ]


def test_describe_takes_model_options_and_twins(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run(capsys, "describe", "ds_mbnet_cifar", "--set", "num_classes=100", "--json"))
    model = dsnet.create_model("ds_mbnet_cifar", num_classes=100, device="meta")
    assert data["routes"][3]["madds"] == dsnet.madds(model, 3)
    data = json.loads(run(capsys, "describe", "ds_mbnet_cifar", "--image-size", "32x64", "--json"))
    assert data["image_size"] == [32, 64]
    assert data["routes"][0]["madds"] == dsnet.madds(
        dsnet.create_model("ds_mbnet_cifar", device="meta"), 0, (32, 64)
    )
    assert "2.32B MAdds" in run(capsys, "describe", "resnet50", "--set", "width=0.75")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["describe", "ds_mbnt"], ["ds_mbnt", "did you mean ds_mbnet"]),
        (["describe", "ds_mbnet", "--image-size", "225"], ["225 × 225", "224 × 224"]),
        (["describe", "ds_mbnet", "--set", "norm"], ["key=value", "norm"]),
        (["describe", "ds_mbnet", "--set", "color=red"], ["color", "activation"]),
        (["describe", "ds_mbnet", "--set", "norm=layer"], ["layer", "batch, group"]),
        (["describe", "ds_mbnet", "--set", "device=cuda"], ["device", "no model option"]),
        (["describe", "ds_mbnet", "--set", "num_classes=True"], ["num_classes", "True"]),
        (["describe", "deit", "--set", "mlp_ratio=abc"], ["mlp_ratio", "'abc'"]),
        (["describe", "ds_mbnet", "--image-size", "224x30"], ["224 × 30", "224 × 32"]),
    ],
)
def test_errors_name_the_value_and_the_alternatives(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsnet: ")
    assert len(error.splitlines()) == 1
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    "args",
    [
        ["describe"],
        ["describe", "x", "--image-size", "0"],
        ["describe", "x", "--image-size", "1" + "0" * 400],
        ["nothing"],
        [],
    ],
)
def test_wrong_usage_exits_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    assert "usage: dsnet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--help"], ["dsnet describe ds_mbnet", "dsnet demo", "COMMAND --help"]),
        (["models", "--help"], ["create_model", "--kind"]),
        (["describe", "--help"], ["Examples:", "--convention", "--image-size", "--json"]),
        (["demo", "--help"], ["--images", "--out"]),
        (["weights", "--help"], ["Examples:", "--json"]),
        (
            ["gate", "--help"],
            [
                "Examples:",
                "goal=value",
                "complexity=none",
                "sgs=none",
                "seed=0",
                "even=false",
                "dsnet calibrate",
            ],
        ),
        (["calibrate", "--help"], ["Examples:", "--target-madds", "--latency-table", "--sweep"]),
        (["profile", "--help"], ["--batch", "--out"]),
        (["predict", "--help"], ["--budget", "--trace"]),
        (["evaluate", "--help"], ["Examples:", "--csv", "--plot", "test split", "--routed"]),
        (["recalibrate", "--help"], ["Example:", "--data", "cifar10, cifar100, digits"]),
        (["train", "--help"], ["digits_mbnet", "torchrun", "--resume", "--dry-run", "Examples:"]),
        (["recipes", "--help"], ["Examples:", "--json"]),
    ],
)
def test_help_shows_options_and_examples(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in words:
        assert word in text


def test_demo_writes_a_self_contained_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    text = run(capsys, "demo", "--out", str(out), "--images", "200")
    report = (out / "report.html").read_text(encoding="utf-8")
    assert str(out / "report.html") in text
    assert "http" not in report.replace("http://www.w3.org/2000/svg", "")
    assert report.count("<svg") == 2  # for wide pages and for narrow ones
    assert report.count("<img") >= 8
    for said in ("Accuracy against measured time", "ms an image", "Images by route", "How it was measured"):
        assert said in report, said
    (sentence,) = re.findall(r"^(?:Routing gets|No gain).*$", text, re.M)
    assert report.index(html.escape(sentence)) < report.index("<h2>"), "the result comes first"
    accuracies = re.compile(r"^(route \d \(\d+ px\)|cascade at \d+%) +([\d.]+)%", re.M)
    before = accuracies.findall(text)
    assert [name.split()[0] for name, _ in before].count("route") == 8
    assert [name.split()[0] for name, _ in before].count("cascade") >= 3
    again = run(capsys, "demo", "--out", str(out), "--images", "200")
    assert accuracies.findall(again) == before
    assert main(["evaluate", str(out / "supernet"), "--routed", "--budget", "50%"]) == 0
    capsys.readouterr()
    files = sorted(path.name for path in (out / "images").iterdir())
    classes = load_dataset("fashion_mnist_sample", "test").classes
    assert files == sorted(f"{name}-{number}.png" for name in classes for number in (1, 2))
    assert main(["predict", str(out / "supernet"), str(out / "images"), "--budget", "20%", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    right = [Path(answer["path"]).name.rpartition("-")[0] == answer["class"] for answer in found]
    assert sum(right) >= 14, "of 20; about nine in ten are right"


def test_a_stopped_demo_writes_no_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dsnet", "demo", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "supernet" / "recipe.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not (tmp_path / "report.html").exists()


def test_demo_keeps_folders_that_it_did_not_create(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "supernet").mkdir()
    (tmp_path / "supernet" / "mine.txt").write_text("mine")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "another --out" in capsys.readouterr().err
    assert (tmp_path / "supernet" / "mine.txt").read_text() == "mine"


def test_recalibrate_computes_the_statistics_of_every_route(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    model.train()(torch.randn(8, 3, 16, 16), 1)
    more = {"extra": {"numbers": torch.arange(3)}}
    save_checkpoint(tmp_path, "last", model, step=5, tensors=more, data={"recipe": "mine"})
    text = run(capsys, "recalibrate", str(tmp_path), "--data", "digits", "--images", "500")
    assert "4 routes re-calibrated on 500 images of digits" in text
    saved = load_checkpoint(tmp_path)
    assert (saved.data["recipe"], saved.data["step"]) == ("mine", 5)
    assert saved.tensors["extra"]["numbers"].tolist() == [0, 1, 2]
    again = build_network(saved)
    for route in again.space:
        assert again.key_states(route) == {KeyState.CALIBRATED}
    assert torch.equal(again.stem.conv.weight, model.stem.conv.weight)
    assert again.stem.norm.count.tolist() == [500 * 256]
    assert main(["recalibrate", str(tmp_path), "--data", "nothing"]) == 2
    assert main(["recalibrate", str(tmp_path / "no"), "--data", "digits"]) == 2
    error = capsys.readouterr().err
    assert "cifar10, cifar100, digits" in error
    assert f"{tmp_path / 'no'} does not exist: expected the folder of a run" in error


def test_evaluate_shows_every_route(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = dsnet.create_model("ds_resnet_tiny", generator=torch.Generator().manual_seed(0))
    save_checkpoint(tmp_path, "last", model, step=5)
    assert main(["evaluate", str(tmp_path), "--data", "digits"]) == 2
    assert "normalised" in capsys.readouterr().err
    run(capsys, "recalibrate", str(tmp_path), "--data", "digits", "--images", "300")
    text = run(capsys, "evaluate", str(tmp_path), "--data", "digits", "--csv", str(tmp_path / "routes.csv"))
    assert len(re.findall(r"^ +\d+ +[\d.]+ % .* calibrated ", text, re.M)) == 16
    assert (tmp_path / "routes.csv").read_text().count("\n") == 17
    data = json.loads(run(capsys, "evaluate", str(tmp_path), "--data", "digits", "--routes", "3", "--json"))
    assert [row["route"] for row in data["routes"]] == [0, 8, 15]
    assert data["routes"][0]["images"] == 359


def test_a_folder_that_cannot_be_created_is_reported_before_work_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "folder")]) == 1
    out, error = capsys.readouterr()
    assert "images" not in out
    assert error.startswith("dsnet: ")


def test_output_prints_on_a_terminal_without_unicode() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsnet", "describe", "ds_mbnet_tiny"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
        timeout=120,
    )
    assert b"316.6k" in done.stdout


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsnet", "--version"], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == f"dsnet {dsnet.__version__}"


def test_an_interrupted_import_ends_as_an_interrupted_command(tmp_path: Path) -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    module, function = scripts["project"]["scripts"]["dsnet"].split(":")
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; sys.exit({module}.{function}())", "models"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dsnet: stopped\n")
