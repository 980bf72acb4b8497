"""Training runs of detectors: saved, stopped, resumed, evaluated, used for prediction, compiled."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from PIL import Image
from torch import Tensor

import dsnet
from dsnet import runtime
from dsnet.cli import main
from dsnet.core.settings import to_plain
from dsnet.data.decode import DecodeError
from dsnet.detection.data.dataset import load_detection_dataset, read_splits
from dsnet.detection.deploy.plan import DetectorPlan
from dsnet.detection.io import load_detector, save_detector
from dsnet.detection.train._loss import prior_targets
from dsnet.detection.train._task import detector_lr
from dsnet.detection.train.api import train_detector
from dsnet.detection.train.config import (
    DetectionConfig,
    DetectionDataConfig,
    DetectionOptimConfig,
    DetectionRunConfig,
    DetectorGateConfig,
)
from dsnet.detection.visualize import drawing_paths
from dsnet.inference import detect
from dsnet.inference.classify import FailedImage
from dsnet.inference.detect import ImageDetections, detect_files
from dsnet.recipes import get_recipe, list_recipes
from dsnet.slicing import KeyState
from dsnet.training.callbacks import Callback
from tests.support import assert_close, error_of, rewrite
from tests.support.boxes import SIDE, SIZE, TABLE, reference_targets


def config(root: Path, **optim: Any) -> DetectionConfig:  # noqa: ANN401
    return DetectionConfig(
        model="ds_mbnet_tiny",
        data=DetectionDataConfig(root=str(root), size=SIZE, calibration=8),
        optim=DetectionOptimConfig(
            **{"epochs": 2, "batch": 6, "lr": 0.05, "warmup": 1.0, "random": 1, **optim}
        ),
        gate=DetectorGateConfig(epochs=1, batch=8),
        table=TABLE,
        run=DetectionRunConfig(device="cpu", log_every=2),
    )


@pytest.fixture(scope="module")
def run(voc: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detector") / "run"
    outcome = train_detector(config(voc), folder)
    assert outcome.status.finished
    assert [result.route for result in outcome.results] == [0, 1, 2, 3, None]
    return folder


def test_a_run_saves_detector_results_and_settings(run: Path, voc: Path) -> None:
    saved = load_detector(run)
    assert saved.classes == ("blue", "red")
    assert saved.preprocessing.size == SIZE
    states = [state for norm in saved.detector.norms() for state in norm.states]
    assert set(states) == {KeyState.CALIBRATED}
    results = json.loads((run / "results.json").read_text())
    assert results["classes"] == ["blue", "red"]
    gated = results["results"][-1]
    assert sum(gated["taken"].values()) == gated["images"] == 6
    costs = {number: saved.detector.cost(number, SIZE).madds() for number in range(4)}
    mean = sum(costs[int(number)] * count for number, count in gated["taken"].items()) / 6
    assert gated["madds"] == pytest.approx(mean)
    assert [r["madds"] for r in results["results"][:-1]] == list(costs.values())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"]) for line in lines] == [(2, 0), (3, 0), (4, 1), (6, 1)]
    assert set(lines[0]) >= {"loss", "largest/place", "smallest/kind", "images_per_s"}
    assert "without a detector" in error_of(lambda: load_detector(_classifier(run.parent / "plain")))


def _classifier(folder: Path) -> Path:
    from dsnet.training import save_checkpoint

    save_checkpoint(folder, "last", dsnet.create_model("ds_mbnet_tiny"), step=0)
    return folder


class _StopAt(Callback):
    """Asks to stop after a step; 0: before the first."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_begin(self, step: int, steps: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, step: int, epoch: int, images: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_resumed_run_equals_an_uninterrupted_one(run: Path, voc: Path, tmp_path: Path) -> None:
    stopped = train_detector(config(voc), tmp_path / "run", callback=_StopAt(4))
    assert (stopped.status.step, stopped.status.signal) == (4, signal.SIGTERM)
    assert stopped.results == ()
    outcome = train_detector(config(voc), tmp_path / "run", resume=True)
    assert outcome.status.finished
    whole, resumed = (load_detector(folder).detector.state_dict() for folder in (run, tmp_path / "run"))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    message = error_of(lambda: train_detector(config(voc), tmp_path / "run"))
    assert "holds a run already" in message
    other = config(voc, lr=0.01)
    message = error_of(lambda: train_detector(other, tmp_path / "run", resume=True))
    assert "started with other settings" in message
    assert "optim.lr was 0.05, not 0.01" in message


def test_a_run_stopped_before_its_first_step_resumes(voc: Path, tmp_path: Path) -> None:
    stopped = train_detector(config(voc), tmp_path / "run", callback=_StopAt(0))
    assert (stopped.status.step, stopped.status.signal) == (0, signal.SIGTERM)
    assert train_detector(config(voc), tmp_path / "run", resume=True).status.finished


def test_a_checkpoint_without_optimizer_state_cannot_resume(voc: Path, tmp_path: Path) -> None:
    train_detector(config(voc), tmp_path / "run", callback=_StopAt(4))
    path = tmp_path / "run" / "last-00000004" / "checkpoint.json"
    data = json.loads(path.read_text())
    data["groups"].remove("optimizer")
    rewrite(path, json.dumps(data))
    assert "lacks optimizer" in error_of(lambda: train_detector(config(voc), tmp_path / "run", resume=True))


def test_a_stop_after_training_says_what_is_saved(
    voc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def terminate(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # the signal comes before that

    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(to_plain(config(voc, epochs=1))))
    command = ["detect", "train", str(recipe), "--out", str(tmp_path / "run")]
    before = signal.getsignal(signal.SIGTERM)
    for more, way, status in (([], stop, 130), (["--resume"], terminate, 143)):
        with monkeypatch.context() as patched:
            patched.setattr("dsnet.detection.train.api.calibrate_detector_bn", way)
            assert main([*command, *more]) == status
        told = capsys.readouterr().err
        assert "Stopped after training, all 3 steps: the trained weights are saved" in told
    assert signal.getsignal(signal.SIGTERM) is before
    late = train_detector(config(voc, epochs=1), tmp_path / "late", callback=_StopAt(3))  # in the last step
    assert late.status.finished
    assert not late.done
    evaluate = [
        "detect",
        "evaluate",
        str(late.folder),
        "--data",
        str(voc),
        "--routes",
        "0",
        "--device",
        "cpu",
    ]
    assert main(evaluate) == 0
    assert "was stopped after training" in capsys.readouterr().err
    assert "--resume" in told
    assert main([*command, "--resume"]) == 0
    told = capsys.readouterr().err
    assert "The gate, between 4 routes" in told
    assert "gate, epoch 1 of 1: target" in told
    assert (tmp_path / "run" / "results.json").is_file()


def test_a_run_cannot_resume_with_other_data(voc: Path, tmp_path: Path) -> None:
    root = tmp_path / "voc"
    shutil.copytree(voc, root)
    train_detector(config(root), tmp_path / "run", callback=_StopAt(2))
    for path in (root / "Annotations").iterdir():
        path.write_text(path.read_text().replace("blue", "zebra"))
    message = error_of(lambda: train_detector(config(root), tmp_path / "run", resume=True))
    assert "was started with {'classes': ['blue', 'red']" in message
    seeded = replace(config(voc), run=DetectionRunConfig(device="cpu", seed=5))
    message = error_of(lambda: train_detector(seeded, tmp_path / "run", resume=True))
    assert "data.root was " in message
    assert "run.seed was 0, not 5" in message


@pytest.mark.parametrize("command", ["evaluate", "recalibrate", "gate", "calibrate", "transfer", "predict"])
def test_a_detector_is_no_classifier(run: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", "digits"] if command in ("evaluate", "recalibrate", "transfer") else []
    before = sorted(path.name for path in run.iterdir())
    given = (
        [str(run), *data] if command != "predict" else [str(run), str(run / "results.json"), "--route", "0"]
    )
    assert main([command, *given]) == 2
    assert "holds a detector: use `dsnet detect" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == before


def test_problems_with_the_data_are_reported_before_training(voc: Path, tmp_path: Path) -> None:
    root = tmp_path / "voc"
    shutil.copytree(voc, root)
    for path in (root / "Annotations").iterdir():
        path.write_text(path.read_text().replace("<bndbox>", "<difficult>1</difficult><bndbox>"))
    message = error_of(lambda: train_detector(config(root), tmp_path / "run"))
    assert "trainval: there is no box that is not marked as difficult" in message
    strange = replace(config(voc), gate=DetectorGateConfig(space="Q"))
    assert "no space 'Q'" in error_of(lambda: train_detector(strange, tmp_path / "run"))
    listed = root / "ImageSets" / "Main" / "test.txt"
    listed.write_text(listed.read_text() + "\nimage18\nimage18\n")
    read = read_splits(root, "test")
    assert len(read.items) == 6
    assert "names image18 3 times" in read.problems[0].what


def test_file_names_may_have_spaces(voc: Path, tmp_path: Path) -> None:
    root = tmp_path / "voc"
    shutil.copytree(voc, root)
    for folder, suffix in (("Annotations", "xml"), ("JPEGImages", "png")):
        (root / folder / f"image0.{suffix}").rename(root / folder / f"imagé ü.{suffix}")
    (root / "ImageSets" / "Main" / "some.txt").write_text("imagé ü\nimage1  -1\n")
    assert [item.image.stem for item in read_splits(root, "some").items] == ["imagé ü", "image1"]


def test_learning_rates() -> None:
    steps = DetectionOptimConfig(lr=1.0, epochs=300, warmup=2, milestones=(200, 250))
    rates = [detector_lr(steps, step, 10) for step in (0, 19, 1999, 2000, 2499, 2500)]
    assert rates == pytest.approx([0.05, 1.0, 1.0, 0.1, 0.1, 0.01])
    smooth = DetectionOptimConfig(lr=1.0, epochs=10, warmup=0)
    assert [detector_lr(smooth, step, 10) for step in (0, 50)] == pytest.approx([1.0, 0.5])


def test_unusable_images_are_left_out(voc: Path, tmp_path: Path) -> None:
    root = tmp_path / "voc"
    shutil.copytree(voc, root)
    (root / "JPEGImages" / "image0.png").write_bytes(b"no image")
    Image.new("RGB", (32, 64)).save(root / "JPEGImages" / "image1.png")
    read = read_splits(root, "trainval")
    pictures, problems = load_detection_dataset(read, 48)
    assert (len(pictures), pictures.listed) == (16, 18)
    assert [problem.file.name for problem in (*problems, *read.problems)] == ["image0.png", "image1.png"]
    assert "32 × 64 pixels, not 64 × 64" in read.problems[0].what
    assert pictures.images.shape == (16, 3, 48, 48)
    both = read_splits(tmp_path, "voc/trainval,voc/test")
    assert (len(both.items), both.listed) == (23, 24)
    assert both.classes == ("blue", "red")


def test_targets_of_padded_boxes(voc: Path, run: Path) -> None:
    pictures, _ = load_detection_dataset(read_splits(voc, "trainval"), 48)
    priors = load_detector(run).detector.priors(SIZE)
    boxes = [torch.from_numpy(truth.boxes).float() for truth in pictures.truths]
    classes = [torch.from_numpy(truth.classes) for truth in pictures.truths]
    expected, found = reference_targets(priors, boxes, classes), prior_targets(priors, pictures.boxes)
    assert torch.equal(found.classes, expected.classes)
    assert_close(found.offsets, expected.offsets, 1e-6)


def test_detections_in_files(run: Path, voc: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes(b"nothing")
    paths = [voc / "JPEGImages" / "image3.png", damaged, voc / "JPEGImages" / "image5.png"]
    saved = load_detector(run)
    first, second, third = detect_files(saved, paths, score=0.0, batch=2)
    assert isinstance(first, ImageDetections)
    assert isinstance(second, FailedImage)
    assert isinstance(third, ImageDetections)
    plain = first.to_dict(saved.classes)
    assert plain["route"] in range(4)
    assert all(0 <= side <= SIDE for box in plain["boxes"] for side in box["box"])
    (alone,) = detect_files(saved, paths[2:], score=0.0)
    assert isinstance(alone, ImageDetections)
    assert alone.detections.boxes == pytest.approx(third.detections.boxes, abs=1e-5)
    assert "score must be" in error_of(lambda: list(detect_files(saved, paths, score=2.0)))


@pytest.mark.parametrize(
    ("part", "value"), [("offsets", float("nan")), ("logits", float("nan")), ("logits", float("inf"))]
)
def test_predictions_that_are_not_finite_are_an_error_of_their_image(
    run: Path,
    voc: Path,
    part: str,
    value: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    predict = detect._predict

    @torch.inference_mode()
    def damaged(plan: DetectorPlan, x: Tensor, route: int | None) -> tuple[Tensor, list[int]]:
        row, routes = predict(plan, x, route)
        getattr(plan.split(row), part)[1, 5, 0] = value
        return row, routes

    monkeypatch.setattr(detect, "_predict", damaged)
    names = [str(voc / "JPEGImages" / f"image{number}.png") for number in (3, 4, 5)]
    lines = tmp_path / "found.jsonl"
    command = ["detect", "predict", str(run), *names, "--device", "cpu", "--score", "0", "--out", str(lines)]
    assert main(command) == 1
    told = capsys.readouterr().err
    assert f"dsnet: {names[1]}: the detector's predictions at route" in told
    assert "are not finite" in told
    assert [json.loads(line)["path"] for line in lines.read_text().splitlines()] == [names[0], names[2]]


def test_escape_sequences_in_folder_names_are_not_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "\x1b[31mred")
    assert main(["detect", "train", str(copy / "recipe.json"), "--out", str(copy), "--resume"]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "\\x1b[31mred" in printed.out


def test_a_detector_whose_weights_are_not_finite_is_not_loaded(run: Path, tmp_path: Path) -> None:
    saved = load_detector(run)
    with torch.no_grad():
        saved.detector.norm.weight[0] = float("nan")
    save_detector(
        tmp_path,
        "final",
        saved.detector,
        step=1,
        classes=saved.classes,
        preprocessing=saved.preprocessing,
    )
    assert "not finite: 1 of" in error_of(lambda: load_detector(tmp_path))


def test_an_image_that_cannot_be_drawn_keeps_its_boxes(
    run: Path,
    voc: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = str(voc / "JPEGImages" / "image3.png")

    def vanished(*_: object) -> None:
        raise DecodeError("it is gone")

    monkeypatch.setattr("dsnet.cli.detect.draw_detections", vanished)
    command = ["detect", "predict", str(run), name, "--device", "cpu", "--json"]
    assert main([*command, "--draw", str(tmp_path / "drawn")]) == 1
    out, told = capsys.readouterr()
    assert f"dsnet: {name}: cannot be drawn: it is gone" in told
    assert set(json.loads(out)) == {"path", "route", "madds", "boxes"}


# --- plans -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("backend", "memory"), [("eager", "packed"), ("eager", "shared"), ("openvino", "packed")]
)
def test_a_plan_equals_the_detector(
    run: Path, voc: Path, backend: str, memory: Literal["packed", "shared"]
) -> None:
    pytest.importorskip("torch" if backend == "eager" else backend)
    detector = load_detector(run).detector
    plan = runtime.compile(detector, backend=backend, memory=memory, image_size=SIZE, batch_buckets=(1,))
    x = torch.randn(7, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    expected, found = detector(x), plan.run(x)
    assert torch.equal(found.routes, detector.route(x))
    for got, want in zip(found.output, expected, strict=True):
        assert_close(got, want, 1e-4)
    for route in (0, 3):
        assert_close(plan(x, route).logits, detector(x, route).logits, 1e-4)
    together = plan.detect(x, score=0.0, max_detections=5)
    for i in (0, 4):  # alone or in a batch
        (alone,) = plan.detect(x[i : i + 1], score=0.0, max_detections=5)
        assert alone.classes.tolist() == together[i].classes.tolist()
        assert alone.boxes == pytest.approx(together[i].boxes, abs=1e-4)
        assert alone.scores == pytest.approx(together[i].scores, abs=1e-4)
    assert "DetectorPlan(ds_mbnet_tiny" in repr(plan)


# --- the command line ------------------------------------------------------------------------------------
def test_evaluate_and_predict(
    run: Path, voc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detect", "evaluate", str(run), "--data", str(voc), "--device", "cpu"]) == 0
    out, told = capsys.readouterr()
    assert "mAP 2007" in out
    assert "The gate ran" in out
    assert "stopped" not in told
    images, lines = str(voc / "JPEGImages"), tmp_path / "found.jsonl"
    command = ["detect", "predict", str(run), images, "--score", "0.05", "--device", "cpu"]
    assert main([*command, "--out", str(lines), "--draw", str(tmp_path / "drawn")]) == 0
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(found) == 24
    assert {"path", "route", "madds", "boxes", "drawn"} == set(found[0])
    assert Path(found[0]["drawn"]).is_file()
    drawn = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert len(drawn) == 24
    with Image.open(tmp_path / "drawn" / drawn[0]) as image:
        assert image.size == (SIDE, SIDE)
    assert main([*command, "--out", str(lines)]) == 2
    assert "--force replaces it" in capsys.readouterr().err
    before = (voc / "JPEGImages" / "image0.png").read_bytes()
    assert main([*command, "--draw", images, "--force"]) == 2
    assert "which is one of the images" in capsys.readouterr().err
    assert (voc / "JPEGImages" / "image0.png").read_bytes() == before
    written = lines.read_text()
    assert main([*command[:-4], "--score", "7", "--out", str(lines), "--force"]) == 2
    assert "--score must be" in capsys.readouterr().err
    assert lines.read_text() == written
    assert main([*command, "--json", "--route", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 24
    (tmp_path / "broken.png").write_bytes(b"x")
    assert main([*command[:3], str(tmp_path / "broken.png"), "--device", "cpu"]) == 1
    assert "broken.png" in capsys.readouterr().err


def test_drawings_keep_the_layout_of_their_folders(run: Path, voc: Path, tmp_path: Path) -> None:
    nest, out = tmp_path / "nest", tmp_path / "out"
    for inside in ("a", "b/c"):
        (nest / inside).mkdir(parents=True)
        shutil.copy(voc / "JPEGImages" / "image3.png", nest / inside / "x.png")
    Image.open(nest / "a" / "x.png").save(nest / "a" / "x.jpg")
    found = drawing_paths([str(nest)], out)
    assert [str(path.relative_to(out)) for path in found.values()] == ["a/x.png", "a/x-2.png", "b/c/x.png"]
    found = drawing_paths([str(nest / "a"), str(nest / "b")], out)
    assert [str(path.relative_to(out)) for path in found.values()] == ["a/x.png", "a/x-2.png", "b/c/x.png"]
    found = drawing_paths([str(nest / "*" / "**" / "*.png"), str(nest / "a" / "x.png")], out)
    assert [str(path.relative_to(out)) for path in found.values()] == ["a/x.png", "b/c/x.png"]
    found = drawing_paths([str(nest / "a" / "x.png"), str(nest / "b" / "c" / "x.png")], out)
    assert [str(path.relative_to(out)) for path in found.values()] == ["x.png", "x-2.png"]
    command = ["detect", "predict", str(run), str(nest), "--route", "0", "--device", "cpu"]
    assert main([*command, "--draw", str(out)]) == 0
    assert len([path for path in out.rglob("*.png") if path.is_file()]) == 3


def test_only_the_first_problems_are_printed(
    run: Path, voc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, listed = tmp_path / "voc", tmp_path / "problems.txt"
    shutil.copytree(voc, root)
    for number in range(7):
        (root / "Annotations" / f"image{number}.xml").unlink()
    command = ["detect", "evaluate", str(run), "--data", str(root), "--split", "trainval"]
    command += ["--routes", "0", "--device", "cpu"]
    assert main(command) == 0
    told = capsys.readouterr().err
    assert told.count("is missing") == 5
    assert "and 2 more problems with files: --problems FILE.txt lists them" in told
    assert main([*command, "--problems", str(listed)]) == 0
    assert len(listed.read_text().splitlines()) == 7


def test_classes_with_commas(voc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["detect", "train", "bccd_ds_mbnet", "--data", str(voc), "--dry-run"]
    for given in ("data.classes=red,blue", "classes=red, blue", "classes=('red','blue')"):
        assert main([*command, "--set", given]) == 0
        shown = capsys.readouterr().out
        assert "data.classes = ('red', 'blue')" in shown
        assert "classes   2: red, blue" in shown
    assert main([*command, "--set", "classes=1,2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["classes"] == ["1", "2"]


def test_a_start_that_cannot_carry_a_detector(
    voc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = _classifier(tmp_path / "tiny")
    command = ["detect", "train", "bccd_ds_mbnet", "--data", str(voc), "--out", str(tmp_path / "run")]
    for given in (f"start={start}", "model=ds_mbnet_tiny"):
        assert main([*command, "--set", given]) == 2
        told = capsys.readouterr().err
        assert "cannot carry this detector: it has no features of stride 16" in told
        assert " ds_mbnet, " in told.split("these can:")[1]
        assert "mbnet" in told.split("these can: ")[1].split(".")[0].split(", ")


def test_train_by_a_recipe(voc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model=ds_mbnet_tiny", "data.size=32", "optim.epochs=1", "optim.batch=6", "gate.epochs=0"]
    given += ["device=cpu", "precision=float32", "table.strides=(4,8)", "table.project=8"]
    given += ["table.pyramid=(8,8)", "table.ratios=((2.0,),(2.0,))", "calibration=6"]
    settings = [part for value in given for part in ("--set", value)]
    command = ["detect", "train", "bccd_ds_mbnet", "--data", str(voc), *settings]
    assert main([*command, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "table.pyramid = (8, 8)" in shown
    assert "images    18 to train with, 6 to test with" in shown
    assert "classes   2: blue, red" in shown
    assert "training  1 epoch of 3 steps with 6 images: 3 steps" in shown
    assert main([*command, "--dry-run", "--set", "optim.batch=100"]) == 0
    assert "18 training images do not fill a batch of 100: lower optim.batch" in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    out, told = capsys.readouterr()
    for line in (
        "images    18 to train with",
        "epoch 1 of 1: loss",
        "Statistics of 4 routes",
        "Figures of 4 routes",
    ):
        assert told.count(line) == 1
    assert "route 3: mAP" in told
    assert "mAP 2007" in out
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("data:image/jpeg") == 6
    assert "image18.png: route 3" in page
    assert "--route 3</code>" in page  # there is no gate
    written = (tmp_path / "run" / "results.json").stat().st_mtime_ns
    assert main([*command, "--out", str(tmp_path / "run"), "--resume"]) == 0
    out, told = capsys.readouterr()
    assert "is finished: all 3 steps" in told
    assert "Statistics" not in told
    assert "mAP 2007" in out
    assert (tmp_path / "run" / "results.json").stat().st_mtime_ns == written
    predict = ["detect", "predict", str(tmp_path / "run"), str(voc / "JPEGImages"), "--device", "cpu"]
    assert main(predict) == 2
    assert "the gate of" in capsys.readouterr().err
    elsewhere = ["detect", "train", "bccd_ds_mbnet", "--data", str(tmp_path / "none"), "--dry-run"]
    assert main(elsewhere) == 0
    assert "is not known: " in capsys.readouterr().out
    again = ["detect", "train", str(tmp_path / "run" / "recipe.json"), "--dry-run", "--json"]
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out)["data"]["root"] == str(voc)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no recipe 'nothing'; possible: "),
        (["bccd_ds_mbnet", "--data", "there-is-none"], "is no folder in VOC's layout"),
        (["bccd_ds_mbnet", "--set", "data.size=300"], "size must be a multiple of 32, not 300"),
        (["bccd_ds_mbnet", "--set", "milestones=(5,3)"], "milestones must rise"),
        (["bccd_ds_mbnet", "--set", "epochs=3"], "optim.epochs or gate.epochs?"),
    ],
)
def test_settings_that_cannot_be_trained(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detect", "train", *arguments, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_a_split_with_an_unknown_class_stops_before_training(voc: Path, tmp_path: Path) -> None:
    root = tmp_path / "voc"
    shutil.copytree(voc, root)
    path = root / "Annotations" / "image23.xml"
    path.write_text(path.read_text().replace("red", "green").replace("blue", "green"))
    message = error_of(lambda: train_detector(config(root), tmp_path / "run"))
    assert "image23.xml: class 'green' is not in the list: blue, red" in message
    assert not (tmp_path / "run" / "last").exists()
    message = error_of(lambda: train_detector(config(voc, batch=100), tmp_path / "other"))
    assert "18 training images do not fill a batch of 100" in message
    message = error_of(lambda: train_detector(config(Path("")), tmp_path / "other"))
    assert "is no folder in VOC's layout" in message


def test_recipes_are_complete() -> None:
    for name in list_recipes(DetectionConfig):
        recipe = get_recipe(name, DetectionConfig)
        assert recipe.expect
        model = dsnet.create_model(recipe.config.model, device="meta")
        assert set(recipe.config.table.strides) <= set(model.feature_shapes(0, recipe.config.data.size))
