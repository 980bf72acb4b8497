"""Commands and reports on networks with several image sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsnet.cli import main
from dsnet.inference.classify import Answer, Prediction
from dsnet.report.plot import Point, by_image_size
from dsnet.training import load_model
from dsnet.training.results import read_outcome

SIZES = "options.image_sizes=8,24"  # the digits have 16 pixels a side


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "sizes"
    settings = ["--set", SIZES, "--set", "optim.epochs=1", "--set", "run.device=cpu", "--threads", "1"]
    assert main(["train", "digits_mbnet", "--out", str(path), *settings]) == 0
    assert main(["calibrate", str(path), "--device", "cpu"]) == 0
    return path


def test_a_run_resizes_images_of_a_fixed_size_to_the_largest(folder: Path) -> None:
    model = load_model(folder)
    assert model.image_sizes == (8, 24)
    outcome = read_outcome(folder)
    assert outcome is not None
    assert outcome.images.size == 24
    assert [r.image_size for r in outcome.test] == [route.image_size for route in model.space]
    assert [r.label for r in outcome.test] == [route.label for route in model.space]
    assert outcome.test[-1].label == "7 (24 px)"
    stored = json.loads((folder / "results.json").read_text())
    assert stored["test"][0]["image_size"] == stored["held_out"][0][1]["image_size"] == 8


def test_evaluate_names_the_image_size_of_each_route(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, csv = tmp_path / "plot.svg", tmp_path / "routes.csv"
    text = run(capsys, "evaluate", str(folder), "--device", "cpu", "--plot", str(plot), "--csv", str(csv))
    header, _, first, *_, last = text.strip().splitlines()[2:]
    assert header.split()[:3] == ["route", "image", "accuracy"]
    assert first.split()[:3] == ["0", "8", "px"]
    assert last.split()[:3] == ["7", "24", "px"]
    assert "supernet, 8 px" in plot.read_text()
    assert "image_size" in csv.read_text().splitlines()[0]
    data = json.loads(run(capsys, "evaluate", str(folder), "--device", "cpu", "--json"))
    assert [row["image_size"] for row in data["routes"]] == [8, 8, 8, 8, 24, 24, 24, 24]


def test_routed_results_and_pages_name_the_image_size(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "routers.html"
    text = run(capsys, "evaluate", str(folder), "--device", "cpu", "--routed", "--plot", str(page))
    assert "7 (24 px)" in text
    shown = page.read_text()
    assert "single routes, 8 px" in shown
    assert "single routes, 24 px" in shown
    data = json.loads(run(capsys, "evaluate", str(folder), "--device", "cpu", "--routed", "--json"))
    assert [row["image_size"] for row in data["single_routes"]] == [8] * 4 + [24] * 4
    report = (folder / "report.html").read_text()
    assert "8 and 24 pixels a side" in report
    assert "<th>image</th>" in report
    assert "routes, 24 px" in report


def test_describe_and_models_show_image_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "describe", "ds_mbnet_tiny", "--set", "image_sizes=8,16")
    assert text.startswith("ds_mbnet_tiny at 8, 16 pixels: 8 routes, one gate;")
    assert "image   width" in text
    assert sum("16 px" in line for line in text.splitlines()) == 4
    data = json.loads(run(capsys, "describe", "ds_mbnet_tiny", "--set", "image_sizes=8,16", "--json"))
    assert (data["image_sizes"], data["gates"]) == ([8, 16], 1)
    assert data["routes"][-1]["image_size"] == 16
    text = run(capsys, "describe", "ds_resnet_tiny", "--set", "image_sizes=8,16")
    assert "32 routes, no gate between them (a cascade routes)" in text
    one = run(capsys, "describe", "ds_mbnet_tiny", "--set", "image_sizes=(16,)")
    assert "The same on every route: image 16 px;" in one
    plain = run(capsys, "describe", "ds_mbnet_tiny", "--json")
    assert "image_sizes" not in plain
    for model in json.loads(run(capsys, "models", "--json")):
        assert ("image_sizes" in model["options"]) == (model["kind"] == "supernet")


def test_a_dry_run_shows_sizes_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "train", "digits_mbnet", "--set", SIZES, "--dry-run", "--threads", "1")
    assert "ds_mbnet_tiny at 8 and 24 pixels a side" in text
    assert "24 px" in text
    assert "multiply-adds, about" in text


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            "options.image_sizes=8",
            "image_sizes are up to 16 sides in pixels, for example (64, 96, 128), not 8",
        ),
        ("options.image_sizes=16,8", "image_sizes must rise"),
        ("options.image_sizes=8,15", "image size 15 × 15 does not run"),
        ("options.image_sizes=8x16", "not '8x16'"),
        ("options.image_size=16", "no option image_size; possible:"),
    ],
)
def test_errors_name_what_is_possible(setting: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits_mbnet", "--set", setting, "--dry-run"]) == 2
    assert told in capsys.readouterr().err


def test_predictions_name_the_image_size() -> None:
    known = {"path": "a.png", "answers": (Answer(3, "three", 0.9),), "route": 4, "routes": (0, 4)}
    plain = Prediction(**known, cost=10.0, unit="madds").to_dict()
    sized = Prediction(**known, cost=10.0, unit="madds", image_size=24).to_dict()
    assert {**plain, "image_size": 24} == sized


def test_many_sizes_are_one_curve() -> None:
    points = [(size, Point(size, 0.5, "route")) for size in (8, 16, 24, 32)]
    assert list(by_image_size("routes", points[:3])) == ["routes, 8 px", "routes, 16 px", "routes, 24 px"]
    (curve,) = by_image_size("routes", points).values()
    assert [point.label for point in curve] == [f"route ({size} px)" for size in (8, 16, 24, 32)]
    assert list(by_image_size("routes", [(None, Point(1, 0.5))])) == ["routes"]
