"""Prediction: what the network says at the route it reports, from files of every kind; what is refused."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import dsnet
from dsnet.cli import main
from dsnet.data import load
from dsnet.data.augment import Augment, normalise
from dsnet.models import Supernet
from dsnet.routing import (
    CascadeRule,
    CostTable,
    GateConfig,
    RoutedOutput,
    calibrate,
    collect,
    open_trained,
    train_gate,
)
from dsnet.routing.calibration import RouterName
from dsnet.routing.predict import Prediction, Predictor, Unread, find_images, open_predictor
from dsnet.training import load_model, save_checkpoint
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from dsnet.training.run import train
from tests.support import error_of

pytestmark = pytest.mark.xdist_group("predict")

COUNT = 24
CONFIG = TrainConfig(
    model="ds_mbnet_tiny",
    data=DataConfig(name="digits", calibration=512),
    augment=Augment(padding=1),
    scheme=SchemeConfig(name="label"),
    optim=OptimConfig(lr=0.2, epochs=3, warmup=1, batch=64),
    run=RunConfig(device="cpu", validate_every=100),
)
CHANNELS = {"mean": [0.5] * 3, "std": [0.2] * 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: final, without router; fresh, with a gate; gated, calibrated; ms, a cascade in ms."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    train(CONFIG, folder)
    for name in ("fresh", "gated"):
        train_gate(folder, GateConfig(epochs=3, passes=1), save_as=name, device="cpu")
    assert main(["calibrate", str(folder), "--name", "gated", "--device", "cpu"]) == 0
    opened = open_trained(folder, "final", device="cpu")
    costs = CostTable(unit="ms", prefix=0.5, segments=(((1.0, 3.0, 4.0, 6.0),),))
    made = calibrate(collect(opened.model, opened.seen(opened.held_out)), costs, gate=False)
    kept = {key: opened.saved.data[key] for key in ("recipe", "input", "classes", "route")}
    save_checkpoint(folder, "ms", opened.model, step=1, data={**kept, "routing": made.to_dict()})
    return folder


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return load("digits", "test").images[:COUNT]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, digits: Tensor) -> list[str]:
    """The digits as files, in the order of their names."""
    folder = tmp_path_factory.mktemp("images")
    paths = [str(folder / f"{number:02d}.png") for number in range(COUNT)]
    for path, digit in zip(paths, digits, strict=True):
        picture(digit).save(path)
    return paths


def picture(digit: Tensor) -> Image.Image:
    return Image.fromarray(digit.permute(1, 2, 0).numpy())


def seen(predictor: Predictor, digits: Tensor) -> Tensor:
    return normalise(digits, *predictor.channels)


def predicted(predictor: Predictor, paths: list[str], **settings: int) -> list[Prediction]:
    results = list(predictor(paths, **settings))
    assert all(isinstance(result, Prediction) for result in results)
    return results  # type: ignore[return-value]


CHOSEN: list[dict[str, Any]] = [
    {"budget": "45%", "router": "cascade"},
    {"budget": "45%"},
    {"budget": "45%", "router": "gate"},
    {"budget": 200_000},
    {"router": "gate"},
    {},
    {"name": "fresh"},
    {"name": "final", "route": 2},
    {"name": "ms", "budget": "2.5ms"},
]


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_answers_are_the_networks_at_the_reported_route(
    run: Path, files: list[str], digits: Tensor, chosen: dict[str, Any]
) -> None:
    predictor = open_predictor(run, **chosen, device="cpu")
    results = predicted(predictor, files, batch=7, top=3)
    assert [result.path for result in results] == files
    model, x = load_model(run, chosen.get("name")), seen(predictor, digits)
    for result, image in zip(results, x, strict=True):
        shares = model(image[None], result.route)[0].softmax(0).sort(descending=True)
        assert [answer.label for answer in result.answers] == shares.indices[:3].tolist()
        assert [answer.probability for answer in result.answers] == pytest.approx(
            shares.values[:3].tolist(), abs=1e-5
        )
        assert [answer.name for answer in result.answers] == [str(n) for n in shares.indices[:3].tolist()]
    routes = {result.route for result in results}
    assert routes == {2} if "route" in chosen else len(routes) > 1 or "budget" not in chosen


@pytest.mark.parametrize("router", ["auto", "gate", "cascade"])
def test_routes_and_costs_are_the_rules(
    run: Path, files: list[str], digits: Tensor, router: RouterName
) -> None:
    routed = dsnet.load_routed(run, "45%", router=router, name="gated")
    predictor = open_predictor(run, budget="45%", router=router, device="cpu")
    results = predicted(predictor, files, batch=COUNT)
    with torch.no_grad():
        taken = routed.run(seen(predictor, digits)).routes.tolist()
    assert [result.route for result in results] == taken
    prefix = routed.router.costs.prefix
    for result in results:
        assert result.routes == routed.path(result.route)
        own = [dsnet.madds(routed.model, route) for route in result.routes]
        assert result.cost == routed.cost(result.route) == sum(own) - prefix * (len(own) - 1)
    assert (max(len(result.routes) for result in results) > 1) == (routed.router.kind == "cascade")


def test_without_a_budget_the_gates_decide(run: Path, files: list[str], digits: Tensor) -> None:
    for name in ("gated", "fresh"):
        predictor = open_predictor(run, name=name, device="cpu")
        choices = predictor.model.route(seen(predictor, digits))[:, 0].tolist()
        assert [result.route for result in predicted(predictor, files)] == choices


def test_every_kind_of_image_is_read_alike(run: Path, digits: Tensor, tmp_path: Path) -> None:
    rgb = picture(digits[3])
    grey, clear = rgb.convert("L"), rgb.convert("RGBA")
    clear.putalpha(grey.point(lambda value: 255 - value))  # what it hides counts as well
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    kinds = {"rgb.png": rgb, "grey.png": grey, "clear.png": clear, "deep.png": deep, "raw.ppm": rgb}
    kinds |= {"palette.png": grey.convert("P"), "lossless.tif": rgb, "no_suffix": rgb}
    for name, image in kinds.items():
        image.save(tmp_path / name, format="png" if name == "no_suffix" else None)
    modes = set()
    for name in kinds:
        with Image.open(tmp_path / name) as image:
            modes.add(image.mode)
    assert modes == {"RGB", "L", "RGBA", "I;16", "P"}
    results = predicted(open_predictor(run, route=3, device="cpu"), [str(tmp_path / n) for n in kinds])
    assert len({result.answers for result in results}) == 1, results


def test_images_of_other_sizes_are_resized_and_cut(run: Path, digits: Tensor, tmp_path: Path) -> None:
    """The shorter side becomes 16, the middle of the longer one is kept."""
    wide = picture(torch.cat([digits[0], digits[1], digits[2]], dim=2)).resize((72, 24))
    wide.save(tmp_path / "wide.png")
    predictor = open_predictor(run, route=3, device="cpu")
    (result,) = predicted(predictor, [str(tmp_path / "wide.png")])
    centre = np.asarray(wide.resize((48, 16), Image.Resampling.BICUBIC))[:, 16:32]
    logits = predictor.model(seen(predictor, torch.from_numpy(centre.copy()).permute(2, 0, 1)[None]), 3)
    assert result.best.probability == pytest.approx(logits.softmax(1).max().item(), abs=1e-5)
    assert result.best.label == logits.argmax()


def saved(folder: Path, name: str, **data: object) -> Path:
    save_checkpoint(folder, "final", dsnet.create_model(name), step=1, data={"input": CHANNELS, **data})
    return folder


def test_the_side_and_the_names_are_the_runs(tmp_path: Path) -> None:
    def opened(name: str, **data: object) -> Predictor:
        return open_predictor(saved(tmp_path, name, **data), route=0, device="cpu")

    assert opened("ds_mbnet_tiny").size == 16
    larger = opened("ds_mbnet_tiny", input={**CHANNELS, "size": 32})
    assert larger.size == 32
    assert larger.rule.cost(larger.model, 0) == dsnet.madds(larger.model, 0, 32)
    assert opened("ds_mbnet_cifar").size == 32
    assert opened("ds_mbnet_tiny").classes == tuple(map(str, range(10)))
    assert opened("ds_mbnet_tiny", classes=list("abcdefghij")).classes == tuple("abcdefghij")
    assert "3 names for the 10 classes" in error_of(lambda: opened("ds_mbnet_tiny", classes=list("abc")))
    assert "nearest that runs" in error_of(lambda: opened("ds_mbnet_tiny", input={**CHANNELS, "size": 17}))
    assert "normalised" in error_of(lambda: opened("ds_mbnet_tiny", input=None))


def test_a_run_trained_at_one_route_uses_it(tmp_path: Path, files: list[str]) -> None:
    folder = saved(tmp_path, "ds_mbnet_tiny", route=2)
    assert {r.route for r in predicted(open_predictor(folder, device="cpu"), files)} == {2}
    assert {r.route for r in predicted(open_predictor(folder, route=2, device="cpu"), files)} == {2}
    for wrong in ({"route": 1}, {"budget": "45%"}, {"router": "cascade"}):
        message = error_of(lambda wrong=wrong: open_predictor(folder, **wrong, device="cpu"))
        assert "route 2 alone" in message


def test_a_route_without_statistics_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny").train()
    model(torch.rand(4, 3, 16, 16), 0)
    save_checkpoint(tmp_path, "final", model, step=1, data={"input": CHANNELS})
    assert open_predictor(tmp_path, route=0, device="cpu")
    assert "dsnet recalibrate" in error_of(lambda: open_predictor(tmp_path, route=1, device="cpu"))


# --- which files ---------------------------------------------------------------------------------
@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty files; it is their names that count."""
    monkeypatch.chdir(tmp_path)
    names = ["b/2.png", "b/10.png", "a/x/1.JPG", "a/0.webp", "a/note.txt", "a-b/5.png", "x[1].png", "named"]
    for name in (*names, ".hidden/7.png", "b/._2.png", "empty/note.txt"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).touch()
    return tmp_path


def test_folders_and_patterns_give_their_images_in_order(tree: Path) -> None:
    everything = ["a/0.webp", "a/x/1.JPG", "a-b/5.png", "b/10.png", "b/2.png", "x[1].png"]
    assert find_images(["."]) == [f"./{path}" for path in everything]
    assert find_images([tree]) == [str(tree / path) for path in everything]
    assert find_images(["**"]) == find_images(["*"]) == everything
    assert find_images(["**/*.png"]) == everything[2:]
    assert find_images(["?/*.png"]) == everything[3:5]
    assert find_images(["[ab]"]) == ["a/0.webp", "a/x/1.JPG", "b/10.png", "b/2.png"]  # folders that match
    assert find_images(["x[1].png"]) == ["x[1].png"]  # a name before a pattern
    assert find_images(["b", "a"]) == ["b/10.png", "b/2.png", "a/0.webp", "a/x/1.JPG"]
    assert find_images(["named", Path("a/note.txt")]) == ["named", "a/note.txt"]  # whatever is named


def test_a_path_comes_once_however_it_is_written(tree: Path) -> None:
    given = ["b/2.png", "./b/2.png", str(tree / "b" / "2.png"), "a/../b/2.png", "b", "b/*.png"]
    assert find_images(given) == ["b/2.png", "b/10.png"]


def test_what_is_not_found_is_named(tree: Path) -> None:
    assert "no file or folder 'c.png'" in error_of(lambda: find_images(["b", "c.png"]))
    assert "no image matches 'c/**/*.png'" in error_of(lambda: find_images(["b", "c/**/*.png"]))
    assert "no image matches '**/*.txt'" in error_of(lambda: find_images(["**/*.txt"]))
    message = error_of(lambda: find_images(["empty"]))
    assert message.startswith("empty has no images")
    assert ".jpeg, .jpg" in message


# --- the command ---------------------------------------------------------------------------------
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


def test_the_table_and_what_it_came_to(
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


def test_damaged_images_are_reported_and_the_others_go_on(
    run: Path, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut, text, empty = (tmp_path / name for name in ("cut.png", "text.png", "empty.png"))
    cut.write_bytes(Path(files[0]).read_bytes()[:-60])
    text.write_text("no image")
    empty.touch()
    given = [files[0], cut, text, files[1], empty]
    assert command(run, *given, "--route", "1", "--json", "--batch", "2") == 1
    captured = capsys.readouterr()
    assert [line["path"] for line in lines_of(captured.out)] == files[:2]
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
    assert [type(result) for result in results] == [Prediction, Unread, Prediction]


def test_what_was_done_is_kept_where_it_is_stopped(
    run: Path,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, real, sizes = tmp_path / "found.jsonl", CascadeRule.__call__, []

    def stopping(rule: CascadeRule, model: Supernet, x: Tensor) -> RoutedOutput:
        if len(sizes) % 3 == 2:
            if out.exists():  # what came before is on the disk while the next batch runs
                sizes.append(len(out.read_text().splitlines()))
            raise KeyboardInterrupt
        sizes.append(len(x))
        return real(rule, model, x)

    monkeypatch.setattr(CascadeRule, "__call__", stopping)
    assert command(run, *files, "--route", "0", "--batch", "5", "--out", out) == 130
    assert sizes == [5, 5, 10]
    assert [line["path"] for line in lines_of(out.read_text())] == files[:10]
    out.unlink()
    assert command(run, *files, "--route", "0", "--batch", "5") == 130
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-1]] == files[:10]


def test_a_file_is_not_overwritten_unasked(
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


def test_progress_is_for_several_batches_and_not_between_lines(
    run: Path, files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*args: str, out: bool = False) -> str:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: out)
        assert command(run, *files, "--route", "0", *args) == 0
        return capsys.readouterr().err

    assert shown("--batch", "10").endswith("\rimage 24/24\n")
    assert shown("--batch", "10", "--json").endswith("\rimage 24/24\n")
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
        (["--route", "0", "--out", "nowhere/x.jsonl"], ["folder that is there", "nowhere"]),
        (["--route", "0", "--out", "."], ["--out takes a file"]),
        (["--route", "0", "--top", "11"], ["11", "has 10"]),
        (["--route", "0", "missing.png"], ["no file or folder 'missing.png'"]),
        (["--budget", "5%"], ["out of reach", "51.6k MAdds to 316.6k MAdds"]),
        (["--budget", "5%", "--router", "gate"], ["out of reach", "this gate"]),
        (["--budget", "lots"], ["300M", "'lots'"]),
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
def test_what_cannot_be_done_says_why(
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


def test_the_library_refuses_what_the_command_refuses(run: Path, files: list[str]) -> None:
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


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["predict", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in ("Examples:", "photos/**/*.jpg", "--budget 45%", "dsnet calibrate", "--trace", "FILE.jsonl"):
        assert word in text
