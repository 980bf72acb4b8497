"""``dsnet train --data FOLDER``: settings chosen by the data, the estimated cost, and the page."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dsnet
from dsnet.calibration.difficulty import GateReport
from dsnet.cli import build_parser, main
from dsnet.core.settings import from_plain, override, to_plain
from dsnet.data import load_dataset
from dsnet.data.inspect import DatasetSummary, inspect_dataset
from dsnet.recipes.custom_data import recipe_for
from dsnet.report.training import before_text, training_page
from dsnet.training import train
from dsnet.training.config import DataConfig, TrainConfig
from dsnet.training.estimate import estimate
from dsnet.training.evaluation import ClassResults, Confusion, GatedResult, RouteResult, evaluate
from dsnet.training.loop import RunStatus
from dsnet.training.results import Images, Outcome, read_outcome, results_of
from tests.support import error_of, images, randomise

COLOURS = {"blue sky": (40, 40, 200), "grass": (40, 200, 40), "rust": (200, 40, 40)}
ONE_EPOCH = ["--set", "optim.epochs=1", "--set", "run.device=cpu"]


def make_pictures(root: Path, each: int, *, side: int = 24, classes: dict = COLOURS) -> Path:
    generator = np.random.default_rng(0)
    for name, colour in classes.items():
        folder = root / name
        folder.mkdir(parents=True)
        for number in range(each):
            pixels = np.array(colour) + generator.integers(-40, 40, (side, side + number % 5, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:03}.png")
    return root


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes told apart by their colour, 30 pictures each, and no splits."""
    return make_pictures(tmp_path_factory.mktemp("my pictures") / "colours", 30)


# --- settings -----------------------------------------------------------------------------------------
def made(count: int, device: str, *, side: int = 300, classes: int = 4) -> TrainConfig:
    return recipe_for(DataConfig(name="x"), images=count, classes=classes, side=side, device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("side", [8, 32, 48, 49, 75, 130, 4000])
@pytest.mark.parametrize("count", [4, 7, 40, 600, 50_000])
def test_settings_chosen_by_the_data_are_valid(count: int, side: int, device: str) -> None:
    config = made(count, device, side=side)
    model = dsnet.create_model(config.model, device="meta")
    model.input_spec.check(config.data.size, config.data.size)
    batch, trained = config.optim.batch, round(count * (1 - config.data.hold_out))
    assert batch == 2 ** round(math.log2(batch))
    assert batch <= max(16, trained / 8)
    assert 1 <= batch <= min(256, trained)
    photos = device == "cpu" and side > 48  # fewer networks add up in a step, so each may learn faster
    assert config.optim.lr == pytest.approx(0.2 * batch / (64 if photos else 256))
    assert config.optim.warmup < config.optim.epochs
    assert config.augment.flip
    assert from_plain(TrainConfig, json.loads(json.dumps(to_plain(config)))) == config


@pytest.mark.parametrize(
    ("count", "device", "side", "model", "size", "batch", "epochs"),
    [
        (40, "cpu", 300, "ds_mbnet_small", 96, 16, 200),
        (600, "cpu", 64, "ds_mbnet_small", 64, 32, 56),
        (1000, "cpu", 64, "ds_mbnet_small", 64, 32, 32),
        (50_000, "cpu", 300, "ds_mbnet_small", 96, 32, 10),
        (50_000, "cpu", 32, "ds_mbnet_tiny", 32, 64, 10),
        (40, "cuda", 300, "ds_mbnet", 224, 16, 200),
        (600, "cuda", 130, "ds_mbnet", 128, 64, 200),
        (50_000, "cuda", 32, "ds_mbnet_cifar", 32, 256, 30),
    ],
)
def test_settings_for_few_and_many_images(
    count: int, device: str, side: int, model: str, size: int, batch: int, epochs: int
) -> None:
    config = made(count, device, side=side)
    assert (config.model, config.data.size, config.optim.batch) == (model, size, batch)
    assert config.optim.epochs == epochs
    schemes = {"ds_mbnet_small": "label", "ds_mbnet_tiny": "ib"}
    assert config.scheme.name == schemes.get(model, "h-ib+mvco")
    assert config.run.precision == ("bfloat16" if device == "cuda" else "float32")
    assert config.data.hold_out == (0.2 if count < 50 * 4 else 0.1)


# --- a folder of classes without splits ---------------------------------------------------------------
def test_a_folder_of_classes_is_divided_the_same_way_every_time(tmp_path: Path) -> None:
    root = make_pictures(tmp_path / "own", 10)
    for name, count in (("single", 1), ("pair", 2)):
        make_pictures(root, count, classes={name: (9, 9, 9)})
    (root / ".cache").mkdir()
    (root / "rust" / "._000.png").write_bytes(b"what a Mac leaves behind")

    def files(split: str) -> set[str]:
        found = load_dataset(str(root), split, lazy=True)
        return {str(Path(found.items.name(at)).relative_to(root)) for at in range(len(found))}

    train, test = files("train"), files("test")
    assert (train, test) == (files("train"), files("test"))
    assert not train & test
    assert len(train | test) == 33
    counts = load_dataset(str(root), "test", lazy=True).labels.bincount(minlength=5).tolist()
    assert load_dataset(str(root), "test", lazy=True).classes == (
        "blue sky",
        "grass",
        "pair",
        "rust",
        "single",
    )
    assert counts == [2, 2, 1, 2, 0]
    assert {name.split("/")[1] for name in test} != {"000.png", "001.png"}  # not simply the first
    for number in (100, 101, 102):
        (root / "rust" / f"{number}.png").write_bytes((root / "rust" / "000.png").read_bytes())
    moved = {name for name in train if name in files("test")}
    assert len(moved) <= 1  # three of thirteen are for testing instead of two of ten


def test_existing_splits_are_used(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "train").symlink_to(flat)
    told = error_of(lambda: load_dataset(str(tmp_path), "test"))
    assert f"the test split of {tmp_path} is not there" in told
    assert str(tmp_path / "train") in told
    (tmp_path / "val").symlink_to(flat)
    assert (
        len(load_dataset(str(tmp_path), "train", lazy=True))
        == len(load_dataset(str(tmp_path), "test", lazy=True))
        == 90
    )
    assert not inspect_dataset(str(tmp_path)).divided


def test_inspecting_a_dataset_does_not_decode_all_images(flat: Path) -> None:
    found = inspect_dataset(str(flat))
    assert found.classes == tuple(COLOURS)
    assert found.counts == (24, 24, 24)
    assert (found.test, found.side, found.divided, found.files) == (18, 24, True, True)
    assert found.decoding > 0
    digits = inspect_dataset("digits")
    assert (digits.images, digits.test, digits.side, digits.files) == (1438, 359, 16, False)


# --- the cost -----------------------------------------------------------------------------------------
def test_the_estimate_counts_the_steps_and_costs_of_the_run(flat: Path, tmp_path: Path) -> None:
    found = inspect_dataset(str(flat))
    config = recipe_for(
        DataConfig(name=str(flat)), images=found.images, classes=3, side=found.side, device="cpu"
    )
    config = override(config, {"optim.epochs": 2, "run.validate_every": 1, "scheme.name": "label"})
    config = override(config, {"run.device": "cpu"})
    model = dsnet.create_model(config.model, device="meta")
    ahead = estimate(config, model, found)
    costs = [dsnet.madds(model, route, 24) for route in model.space]
    mean, trained, held = round(sum(costs) / 4), 57, 15
    assert (ahead.held_out, ahead.size) == (held, 24)
    step = 3 * (costs[0] + costs[3] + 2 * mean) * config.optim.batch
    validation = 2 * held * (costs[0] + costs[3])
    judging = (2 * held + found.test + trained) * sum(costs)
    assert ahead.madds == ahead.steps * step + validation + judging
    outcome = train(config, tmp_path)
    assert outcome.status.steps == ahead.steps
    assert 0 < ahead.seconds < 120
    told = before_text(config, found, ahead)
    assert re.search(r"about \d+ seconds? on this machine", told)
    assert f"{ahead.steps} steps" in told
    assert "18 of the 90 images" in told
    assert "--set augment.flip=false" in told
    assert "mirrored" not in before_text(override(config, {"augment.flip": False}), found, ahead)
    patient = replace(ahead, seconds=700.0)
    assert "about 12 minutes on this machine" in before_text(config, found, patient)
    big = override(config, {"optim.batch": 64})
    assert "more than the 57 training images" in error_of(lambda: estimate(big, model, found))


# --- end to end ---------------------------------------------------------------------------------------
def page_of(folder: Path) -> str:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    return text


def commands_of(text: str) -> list[list[str]]:
    """Every command of a page, as the shell would split it; each is one that there is."""
    found = [shlex.split(html.unescape(code)) for code in re.findall(r"<pre><code>(.*?)</code></pre>", text)]
    for command, *arguments in found:
        assert command == "dsnet"
        build_parser().parse_args(arguments)  # ends the process where it does not fit
    return [arguments for _, *arguments in found]


def test_a_folder_of_images_is_enough_to_train(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    extra = ["--set", "optim.epochs=6", "--set", "run.validate_every=1", "--set", "run.device=cpu"]
    assert main(["train", "--data", str(flat), *extra]) == 0
    folder = Path("runs") / "colours"
    shown = capsys.readouterr()
    assert "18 of the 90 images, about a fifth of every class, are kept for the test" in shown.err
    assert "on this machine" in shown.err
    assert shown.out.splitlines()[-1] == f"Report: {folder / 'report.html'}"
    results = json.loads((folder / "results.json").read_text())
    assert sum(results["classes"]["images"]) == 18
    assert sum(results["classes"]["correct"]) == results["test"][-1]["correct"]
    text = page_of(folder)
    assert f"{results['test'][-1]['accuracy']:.1%} right" in text
    assert text.count("<circle") >= 4
    assert "blue sky" in text
    commands = commands_of(text)
    assert [words[0] for words in commands][:6] == [
        *("predict", "gate", "calibrate", "evaluate", "predict", "bench")
    ]
    assert all(words[1].startswith(str(folder)) for words in commands)
    for words in commands[1:5]:
        words = [str(next(flat.rglob("*.png"))) if word == "photo.jpg" else word for word in words]
        assert main(words) == 0, words
    assert "gate" not in {words[0] for words in commands_of(page_of(folder))}  # it is trained now


def test_a_run_without_a_recipe_resumes_with_its_settings(
    flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = make_pictures(tmp_path / "own", 20)
    folder = tmp_path / "run"
    command = ["train", "--data", str(own), "--out", str(folder), "--resume"]
    assert main([*command, *ONE_EPOCH]) == 0
    (folder / "report.html").unlink()
    make_pictures(own, 25, classes={"more": (0, 0, 0)})
    (own / "more").rename(own / "grass" / "more")  # other settings would be made now
    capsys.readouterr()
    assert main(command) == 0
    assert "Going on after step" in capsys.readouterr().err
    assert page_of(folder)
    again = ["train", "--data", str(own), "--out", str(folder)]
    assert main(again) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_recipe_takes_other_data(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits_mbnet", "--data", str(flat), "--dry-run", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["data"]["name"] == str(flat)
    assert plain["optim"]["epochs"] == 20
    assert main(["train", "--data", str(flat), "--dry-run", *ONE_EPOCH]) == 0
    text = capsys.readouterr().out
    assert text.startswith("colours: ds_mbnet_tiny")
    assert "optim.epochs = 1\n" in text
    assert "on this machine" in text


def _nothing(root: Path) -> None:
    pass


def _only_files(root: Path) -> None:
    make_pictures(root, 3, classes={"a": (1, 1, 1)})
    for path in (root / "a").iterdir():
        path.rename(root / path.name)
    (root / "a").rmdir()


def _one_class(root: Path) -> None:
    make_pictures(root, 5, classes={"cats": (1, 1, 1)})


def _an_empty_class(root: Path) -> None:
    make_pictures(root, 5)
    (root / "void").mkdir()


def _empty_classes(root: Path) -> None:
    (root / "void").mkdir()


def _one_image_a_class(root: Path) -> None:
    make_pictures(root, 1)


def _no_image(root: Path) -> None:
    for name in ("a", "b"):
        (root / name).mkdir()
        for number in range(4):
            (root / name / f"{number}.jpg").write_text("no image")


@pytest.mark.parametrize(
    ("fill", "told"),
    [
        (_nothing, "nor folders of classes"),
        (_only_files, "nor folders of classes"),
        (_one_class, "one class (cats)"),
        (_an_empty_class, "without training images: void"),
        (_empty_classes, "no images (.bmp"),
        (_one_image_a_class, "at most one image a class"),
        (_no_image, "no image of a sample"),
    ],
)
def test_unusable_folders_are_refused_with_a_reason(
    fill: Callable[[Path], None], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "own"
    root.mkdir()
    fill(root)
    assert main(["train", "--data", str(root), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert str(root) in error
    assert not (tmp_path / "run").exists()


def test_the_data_to_train_on_must_be_given(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        ([], "Give a RECIPE (`dsnet recipes` lists them), or --data"),
        ([str(flat)], f"dsnet train --data {flat}"),
        (["--data", str(flat), "--set", "data.name=digits"], "both say which data"),
        (["--data", "nothing"], "there is no data set 'nothing'"),
        (["--data", str(flat), "--set", "optim.epoch=1"], "did you mean optim.epochs"),
    ):
        assert main(["train", *arguments]) == 2
        assert told in capsys.readouterr().err


# --- the page -----------------------------------------------------------------------------------------
def result(number: int, correct: int, count: int = 200) -> RouteResult:
    madds = 1000 * (number + 1)
    return RouteResult(
        route=number, correct=correct, images=count, madds=madds, params=9, statistics="calibrated"
    )


OUTCOME = Outcome(
    folder=Path("runs/my run"),
    status=RunStatus(step=100, steps=100),
    test=(result(0, 150), result(1, 180)),
    classes=ClassResults(route=1, images=(120, 80), correct=(115, 65), confused=((1, 0, 15), (0, 1, 5))),
    images=Images(classes=("cat", "dog & co"), counts=(60, 50), held_out=11, test=200, size=96),
)


def told_by(
    outcome: Outcome,
    scores: list[float] | None = None,
    gates: Sequence[GateReport] = (),
    verdict: str | None = None,
) -> str:
    steps = range(10, 101, 10)
    checks = [
        {"kind": "validate", "step": step, "epoch": step // 10 - 1, "score": score, "route_1": score}
        for step, score in zip(steps, scores or [0.9] * 10, strict=True)
    ]
    config = override(TrainConfig(), {"data.name": "/photos/pets", "optim.epochs": 10})
    return training_page(outcome, config, checks, gates=gates, verdict=verdict)


def test_the_page_shows_accuracies_and_classes() -> None:
    text = told_by(OUTCOME)
    assert "pets: 90.0% right" in text
    assert "Look at this first" not in text
    assert "75.0%" in text
    assert "standard error is 2.1 points; guessing gets 60.0%" in text
    assert text.index("dog &amp; co</span>") < text.index("cat</span>")  # the worst class first
    assert "dog &amp; co for cat: 15 of 80" in text
    assert ["predict", "runs/my run", "photo.jpg", "--route", "1", "--top", "3"] in commands_of(text)


def test_the_page_warns_of_problems() -> None:
    assert OUTCOME.images is not None
    lost = replace(OUTCOME, test=(result(0, 110), result(1, 122)))
    assert "61.0% is hardly better than always answering cat (60.0%)" in told_by(lost)
    assert "optim.epochs=20" in told_by(lost)
    chance = replace(OUTCOME, test=(result(0, 5, 8), result(1, 7, 8)))
    assert "87.5% is hardly better" in told_by(chance)  # of eight images
    few = replace(OUTCOME.images, counts=(400, 7))
    text = told_by(replace(OUTCOME, images=few))
    assert "1 class of 2 has fewer than 20 training images (dog &amp; co)" in text
    assert "from 7 to 400 training images" in text
    assert "could not be read" not in told_by(OUTCOME)
    damaged = replace(OUTCOME, images=replace(OUTCOME.images, damaged=1))
    assert "1 image could not be read" in told_by(damaged)
    unwatched = replace(OUTCOME, images=replace(OUTCOME.images, held_out=0))
    text = told_by(unwatched)
    assert "No images were held out" in text
    words = [command for command in commands_of(text) if command[0] != "predict"]
    assert words[0][:4] == ["train", "runs/my run/recipe.json", "--set", "data.hold_out=0.2"]
    assert "With 40 test images" in told_by(replace(OUTCOME, images=replace(OUTCOME.images, test=40)))


def test_the_page_advises_a_longer_run() -> None:
    rising = [0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.8, 0.9]
    assert "optim.epochs=20" in told_by(OUTCOME, rising)
    assert "rose by 25.0 points in the last fifth" in told_by(OUTCOME, rising)
    flat = [0.1, 0.5, 0.85, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.905]
    text = told_by(OUTCOME, flat)
    assert "will not help" not in text  # a cosine schedule ends flat whatever its length
    assert "optim.epochs=20" in text
    assert "run.seed=1" in text


def test_a_low_accuracy_is_reported() -> None:
    low = replace(OUTCOME, test=(result(0, 130), result(1, 140)))  # guessing gets 60 %
    assert "Accuracy is low: the largest route gets 70.0%" in told_by(low)
    assert "Accuracy is low" not in told_by(replace(OUTCOME, test=(result(0, 130), result(1, 180))))


def test_the_page_of_a_stopped_run_shows_how_to_resume() -> None:
    stopped = Outcome(folder=Path("runs/x"), status=RunStatus(step=30, steps=100), images=OUTCOME.images)
    text = told_by(stopped)
    assert "stopped after step 30 of 100" in text
    assert commands_of(text) == [["train", "runs/x/recipe.json", "--out", "runs/x", "--resume"]]


def test_the_page_describes_a_trained_gate() -> None:
    assert "gate" in {words[0] for words in commands_of(told_by(OUTCOME))}
    gate = GateReport(gate=0, choice_counts={0: 8, 3: 3}, entropy=0.8, information=0.1)
    text = told_by(OUTCOME, gates=[gate])
    assert [words[0] for words in commands_of(text)][:2] == ["predict", "calibrate"]
    assert "gate" not in {words[0] for words in commands_of(text)}
    assert "has a trained gate" in text
    assert "for 11 held-out images, choice by choice: 0: 73%, 3: 27%" in text
    assert GateReport.from_dict(json.loads(json.dumps(gate.to_dict()))) == gate
    assert "Does routing pay?" not in text
    told = told_by(OUTCOME, gates=[gate], verdict="Routing does not pay here: use route 1.")
    assert "<strong>Routing does not pay here: use route 1.</strong>" in told


def test_the_outcome_of_a_finished_run_can_be_read_again(tmp_path: Path) -> None:
    held_out = ((None, result(0, 9, 11)), (result(1, 9, 11), result(1, 10, 11)))
    gated = GatedResult(correct=170, images=200, madds=1200.5, taken={0: 150, 1: 50})
    outcome = replace(OUTCOME, folder=tmp_path, held_out=held_out, gated=gated)
    assert read_outcome(tmp_path) is None
    (tmp_path / "results.json").write_text(json.dumps(results_of(outcome)))
    assert read_outcome(tmp_path) == outcome
    (tmp_path / "results.json").write_text('{"test": []}')  # of a loop of one's own
    assert read_outcome(tmp_path) is None


def test_a_run_of_one_route_gets_no_advice_on_routers() -> None:
    alone = replace(OUTCOME, test=(result(1, 180),))
    assert {words[0] for words in commands_of(told_by(alone))} == {"predict", "train"}


def test_damaged_files_are_counted_on_the_page(tmp_path: Path) -> None:
    root = make_pictures(tmp_path / "own", 20)
    for number in ("003", "004"):
        (root / "rust" / f"{number}.png").write_bytes(b"broken")
    with pytest.warns(UserWarning, match="skipped"):
        assert main(["train", "--data", str(root), "--out", str(tmp_path / "run"), *ONE_EPOCH]) == 0
    assert "2 images could not be read" in page_of(tmp_path / "run")


def test_damaged_files_are_reported_in_plain_lines(tmp_path: Path) -> None:
    root = make_pictures(tmp_path / "own", 20)
    broken = root / "rust" / "003.png"
    broken.write_bytes(broken.read_bytes()[:700])
    command = ["train", "--data", str(root), "--out", str(tmp_path / "run"), *ONE_EPOCH]
    code = f"from dsnet.cli import main; raise SystemExit(main({command!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if "003.png" in line]
    assert told.startswith(f"warning: skipped {broken}: ")
    assert "Warning" not in done.stderr
    assert "warnings.warn" not in done.stderr


# --- class by class -----------------------------------------------------------------------------------
def test_confusion_equals_a_count_by_hand() -> None:
    model = randomise(dsnet.create_model("ds_mbnet_tiny")).requires_grad_(False)
    views = [images(model, count, seed=count) for count in (40, 25)]
    labels = [torch.arange(len(x)) % 3 for x in views]
    confusion = Confusion(model.space[2], 10, torch.device("cpu"))
    found = evaluate(model, list(zip(views, labels, strict=True)), on_predictions=confusion.add)
    answers = torch.cat([model(x, 2).argmax(1) for x in views]).tolist()
    pairs = list(zip(torch.cat(labels).tolist(), answers, strict=True))
    for true, answer in {(a, b) for a in range(10) for b in range(10)}:
        assert int(confusion.counts[true, answer]) == pairs.count((true, answer))
    results = confusion.results(confusion.counts, max_pairs=100)
    assert results.images[:4] == (23, 21, 21, 0)
    assert sum(results.correct) == found[2].correct
    assert results.confused
    assert all(pairs.count((true, taken)) == count for true, taken, count in results.confused)
    counts = [count for _, _, count in results.confused]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == 65 - found[2].correct


def test_a_dataset_of_one_class_is_refused() -> None:
    good = DatasetSummary(name="x", classes=("a", "b"), counts=(3, 1), test=2, side=9)
    good.check()
    assert "one class (a)" in error_of(replace(good, classes=("a",), counts=(3,)).check)
