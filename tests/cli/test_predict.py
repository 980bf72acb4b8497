"""`dsnet predict`: output, files, exit status and errors."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import dsnet
from dsnet.cli import main
from dsnet.cli.progress import CLEAR
from dsnet.inference.classify import FailedImage, Prediction, open_predictor
from dsnet.runtime.plan import Plan
from tests.support import error_of
from tests.support.routed_run import COUNT, predicted

pytestmark = pytest.mark.xdist_group("predict")

CHANNELS = {"mean": [0.5] * 3, "std": [0.2] * 3}


def command(*args: object) -> int:
    return main(["predict", *map(str, args), "--device", "cpu"])


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines(run: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, *files, "--budget", "45%", "--json") == 0
    plain = lines_of(capsys.readouterr().out)
    expected = predicted(open_predictor(run, budget="45%", device="cpu"), files)
    for line, result in zip(plain, expected, strict=True):
        assert list(line) == ["path", "class", "label", "probability", "route", "cost", "unit"]
        assert (line["path"], line["class"], line["label"]) == (result.path, *result.best[1::-1])
        assert line["probability"] == pytest.approx(result.best.probability)
        assert (line["route"], line["cost"], line["unit"]) == (result.route, result.cost, "madds")
        assert type(line["cost"]) is int
    assert command(run, "--budget", "45%", "--json", "--trace", "--top", "2", Path(files[0]).parent) == 0
    for line, other in zip(lines_of(capsys.readouterr().out), plain, strict=True):
        first, second = line.pop("top")
        assert first == {key: line[key] for key in ("class", "label", "probability")}
        assert second["probability"] <= first["probability"]
        assert line.pop("routes")[-1] == line["route"]
        assert line == pytest.approx(other) or line == other


def test_the_table_lists_every_image_and_a_summary(
    run: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(run, *files, "--budget", "45%", "--router", "cascade", "--trace", "--top", "2") == 0
    results = predicted(open_predictor(run, budget="45%", router="cascade", device="cpu"), files, top=2)
    header, _, *rows, empty, closing = capsys.readouterr().out.splitlines()
    assert header.split() == ["image", "class", "probability", "route", "ran", "MAdds", "then"]
    assert empty == ""
    for row, result in zip(rows, results, strict=True):
        assert row.startswith(f"{result.path}  {result.best.name} ")
        assert row[: header.index("route") + 5].endswith(f"% {result.route:6}")
        assert row[header.index("ran") :].startswith(" → ".join(map(str, result.routes)) + " ")
        assert row.endswith(f"{result.answers[1].name} {100 * result.answers[1].probability:.1f} %")
    mean = sum(result.cost for result in results) / COUNT
    share = mean / dsnet.madds(dsnet.create_model("ds_mbnet_tiny"), 3)
    assert closing == f"24 images, {mean / 1e3:.1f}k MAdds on average, {share:.0%} of the largest route"


def test_milliseconds(run: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, files[0], "--name", "ms", "--route", "3") == 0
    header, _, row, _, closing = capsys.readouterr().out.splitlines()
    assert (header.split()[-1], row.split()[-1]) == ("ms", "6.5")
    assert closing == "1 image, 6.5 ms on average, 100% of the largest route"
    assert command(run, *files, "--name", "ms", "--budget", "2.5ms", "--json", "--trace") == 0
    costs = (1.0, 3.0, 4.0, 6.0)
    for line in lines_of(capsys.readouterr().out):
        assert line["unit"] == "ms"
        assert line["cost"] == 0.5 + sum(costs[route] for route in line["routes"])


def test_damaged_images_are_reported_and_the_others_predicted(
    run: Path, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut, text, empty = (tmp_path / name for name in ("cut.png", "text.png", "empty.png"))
    cut.write_bytes(Path(files[0]).read_bytes()[:-60])
    text.write_text("no image")
    empty.touch()
    given = [files[0], cut, text, files[1], empty]
    assert command(run, *given, "--route", "1", "--json", "--batch", "2") == 1
    captured = capsys.readouterr()
    lines = lines_of(captured.out)
    assert [line["path"] for line in lines] == list(map(str, given))
    assert [line["path"] for line in lines if "error" not in line] == files[:2]
    assert lines[2] == {
        "path": str(text),
        "error": "cannot be read: it is no image that Pillow can read",
    }
    said = captured.err.splitlines()
    assert len(said) == 3
    assert said[0].startswith(f"dsnet: {cut} cannot be read: ")
    assert "truncated" in said[0]
    assert said[1:] == [
        f"dsnet: {bad} cannot be read: it is no image that Pillow can read" for bad in given[2::2]
    ]
    assert command(run, *given, "--route", "1") == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("; 3 could not be read")
    assert command(run, cut, text, "--route", "1") == 1
    assert capsys.readouterr().out == "0 images; 2 could not be read\n"
    results = list(open_predictor(run, route=1, device="cpu")([files[0], cut, files[1]]))
    assert [type(result) for result in results] == [Prediction, FailedImage, Prediction]


def test_results_before_an_interrupt_are_kept(
    run: Path,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, real, sizes = tmp_path / "found.jsonl", Plan.__call__, []

    def stopping(plan: Plan, x: Tensor, route: int) -> Tensor:
        if len(sizes) % 3 == 2:
            if out.exists():  # what came before is on the disk while the next batch runs
                sizes.append(len(out.read_text().splitlines()))
            raise KeyboardInterrupt
        sizes.append(len(x))
        return real(plan, x, route)

    monkeypatch.setattr(Plan, "__call__", stopping)
    assert command(run, *files, "--route", "0", "--batch", "5", "--out", out) == 130
    assert sizes == [5, 5, 10]
    assert [line["path"] for line in lines_of(out.read_text())] == files[:10]
    out.unlink()
    assert command(run, *files, "--route", "0", "--batch", "5") == 130
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-1]] == files[:10]


def test_an_existing_file_is_replaced_only_with_force(
    run: Path, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.jsonl"
    assert command(run, *files, "--route", "0", "--out", out) == 0
    assert capsys.readouterr().out.startswith("24 images, ")
    written = out.read_text()
    assert [line["path"] for line in lines_of(written)] == files
    assert command(run, files[0], "--route", "1", "--out", out) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text() == written
    assert command(run, files[0], "--route", "1", "--out", out, "--force") == 0
    assert [line["route"] for line in lines_of(out.read_text())] == [1]
    fresh = tmp_path / "fresh.jsonl"
    assert command(run, files[0], "--route", "9", "--out", fresh) == 2
    assert not fresh.exists()


def test_progress_shows_for_several_batches_but_not_between_json_lines(
    run: Path, files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*args: str, out: bool = False) -> str:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: out)
        assert command(run, *files, "--route", "0", *args) == 0
        return capsys.readouterr().err

    assert shown("--batch", "10").endswith(f"{CLEAR}image 24/24\n")
    assert shown("--batch", "10", "--json").endswith(f"{CLEAR}image 24/24\n")
    assert shown("--batch", "10", "--json", out=True) == ""
    assert shown("--batch", "24") == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--route", "0", "--budget", "45%"], ["--route", "--budget", "either"]),
        (["--route", "0", "--router", "auto"], ["--route", "--router", "either"]),
        (["--route", "4"], ["no route 4", "0 to 3"]),
        (["--route", "0", "--json", "--out", "x.jsonl"], ["--json", "--out", "one of them"]),
        (["--route", "0", "--force"], ["--force is for --out"]),
        (["--route", "0", "--out", "nowhere/x.jsonl"], ["existing folder", "nowhere"]),
        (["--route", "0", "--out", "."], ["--out takes a file"]),
        (["--route", "0", "--top", "11"], ["11", "has 10"]),
        (["--route", "0", "missing.png"], ["no file or folder 'missing.png'"]),
        (["--budget", "5%"], ["out of reach", "51.6k MAdds to 316.6k MAdds"]),
        (["--budget", "5%", "--router", "gate"], ["out of reach", "this gate"]),
        (["--budget", "lots"], ["300M", "'lots'"]),
        (["--budget", "45"], ["45 multiply-adds an image, less than any route takes", "write 45%"]),
        (["--budget", "5ms"], ["multiply-adds"]),
        (["--router", "cascade"], ["needs a budget", "51.6k MAdds to 316.6k MAdds", "16.3% to 100.0%"]),
        (["--name", "ms"], ["needs a budget", "1.5 ms to 6.5 ms", "23.1% to 100.0%", "--route N"]),
        (["--name", "ms", "--router", "gate"], ["not trained", "dsnet gate"]),
        (["--name", "ms", "--router", "gate", "--budget", "2.5ms"], ["not trained", "dsnet gate"]),
        (["--name", "final"], ["dsnet calibrate", "--name final", "--route N, 0 to 3"]),
        (["--name", "final", "--budget", "45%"], ["dsnet calibrate", "--route N"]),
        (["--name", "fresh", "--router", "cascade"], ["dsnet calibrate", "--name fresh"]),
        (["--name", "best.pt"], ["no checkpoint 'best.pt'"]),
        (["--route", "0", "--device", "tpu"], ["device='tpu'"]),
    ],
    ids=" ".join,
)
def test_impossible_options_are_refused_with_a_reason(
    run: Path,
    files: list[str],
    args: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = [args.pop()] if args[-1] == "missing.png" else []
    assert main(["predict", str(run), files[0], *images, "--device", "cpu", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dsnet: ")
    for word in words:
        assert word in captured.err
    assert not os.path.exists("x.jsonl")


def test_the_library_raises_the_errors_of_the_command(run: Path, files: list[str]) -> None:
    for wrong in ({"budget": "45%"}, {"router": "gate"}):
        message = error_of(lambda wrong=wrong: open_predictor(run, route=0, **wrong, device="cpu"))
        assert "neither a budget nor a router" in message
    predictor = open_predictor(run, route=0, device="cpu")
    assert "at least 1 image" in error_of(
        lambda: predictor(files, batch=0)
    )  # at once, not at the first result
    assert "0 most probable" in error_of(lambda: predictor(files, top=0))
    assert list(predictor([])) == []
    assert "3 names" in error_of(lambda: replace(predictor, classes=("a", "b", "c")))


def test_the_help_shows_options_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["predict", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in ("Examples:", "photos/**/*.jpg", "--budget 45%", "dsnet calibrate", "--trace", "FILE.jsonl"):
        assert word in text
