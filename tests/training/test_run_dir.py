"""Folders of runs: resuming, locking, damaged files, unusual data and settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dsnet
from dsnet.cli import main
from dsnet.data import load_dataset
from dsnet.data.in_memory import InMemoryDataset
from dsnet.data.loading import map_classes
from dsnet.models.loading import build_network
from dsnet.report.plot import Point, accuracy_plot
from dsnet.training import load_checkpoint, save_checkpoint, train
from dsnet.training.callbacks import Callback
from dsnet.training.config import DataConfig, OptimConfig, SchemeConfig
from dsnet.training.run_dir import locked, read_config
from tests.support import error_of
from tests.support.training import SHORT, Listen, StopAt

pytestmark = pytest.mark.xdist_group("folder")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(SHORT, folder)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


# --- going on ----------------------------------------------------------------------------------------
def test_a_checkpoint_without_a_recipe_is_not_overwritten(copied: Path, tmp_path: Path) -> None:
    (copied / "recipe.json").unlink()
    assert "no recipe.json" in error_of(lambda: train(SHORT, copied, resume=True))
    (copied / "last").unlink()
    assert "no recipe.json" in error_of(lambda: train(SHORT, copied, resume=True))
    for folder in copied.glob("last-*"):
        shutil.rmtree(folder)
    assert "no checkpoint 'last' to resume from; it has best, final" in error_of(
        lambda: train(SHORT, copied, resume=True)
    )
    assert "holds a run already" in error_of(lambda: train(SHORT, copied))
    own = tmp_path / "own"  # a loop of one's own that saved a network
    save_checkpoint(own, "last", dsnet.create_model("ds_mbnet_tiny"), step=3)
    assert "no recipe.json" in error_of(lambda: train(SHORT, own, resume=True))


def test_resuming_without_a_checkpoint_warns(tmp_path: Path) -> None:
    callback = Listen()
    train(SHORT, str(tmp_path / "new"), resume=True, callback=callback)
    assert any("no checkpoint in" in message for message in callback.messages)


def test_resuming_from_an_incomplete_checkpoint_is_an_error(copied: Path) -> None:
    saved = load_checkpoint(copied, "last")
    save_checkpoint(copied, "last", build_network(saved), step=5)
    assert "lacks optimizer" in error_of(lambda: train(SHORT, copied, resume=True))


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert "another process works in" in error_of(lambda: train(SHORT, tmp_path))
    assert train(SHORT, tmp_path).status.finished


def test_an_unused_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    big = replace(SHORT, optim=replace(SHORT.optim, batch=10**6))
    assert "batch" in error_of(lambda: train(big, folder))
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)  # one that was there stays
    assert "batch" in error_of(lambda: train(big, folder))
    assert folder.is_dir()
    with locked(tmp_path / "kept"):
        (tmp_path / "kept" / "file").touch()
    assert (tmp_path / "kept" / "file").is_file()
    with locked(tmp_path / "held"):
        error_of(lambda: train(SHORT, tmp_path / "held"))  # refused by who did not make it
        assert (tmp_path / "held" / ".lock").is_file()
    assert not (tmp_path / "held").exists()


def test_a_lock_outlasts_the_removal_of_its_folder(tmp_path: Path) -> None:
    inside, most, together = [], [], threading.Barrier(3, timeout=60)

    def take_turns(number: int) -> None:
        for turn in range(200):
            together.wait()
            for _ in range(5):
                with suppress(dsnet.DsnetError), locked(tmp_path / str(turn) / "run"):
                    inside.append(number)
                    most.append(len(inside))
                    time.sleep(0)  # lets another thread try
                    inside.remove(number)

    with ThreadPoolExecutor(3) as threads:  # locks of threads keep each other out as those of processes do
        for done in [threads.submit(take_turns, number) for number in range(3)]:
            done.result(60)
    assert max(most) == 1


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("recipe.json", b"\xff\xfe", "is not JSON"),
        ("recipe.json", b"[]", "is not a recipe"),
        ("last-00000005/checkpoint.json", b"[]", "not a complete checkpoint"),
        ("last-00000005/checkpoint.json", b'{"format": 1}', "not a complete checkpoint"),
    ],
)
def test_damaged_files_are_named(copied: Path, file: str, content: bytes, told: str) -> None:
    (copied / file).write_bytes(content)
    assert told in error_of(lambda: train(SHORT, copied, resume=True))


def test_damaged_metrics_do_not_stop_a_run(copied: Path) -> None:
    (copied / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + (copied / "metrics.jsonl").read_bytes())
    assert train(SHORT, copied, resume=True).status.finished


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "picture.png").write_bytes(bytes(range(256)) * 100)
    assert main(["evaluate", str(copied), "--name", "nope"]) == 2
    assert "no checkpoint 'nope'; it has last, best, final" in capsys.readouterr().err
    checkpoint = next(copied.glob("final-*"))
    assert main(["recalibrate", str(checkpoint)]) == 2
    assert "--name final" in capsys.readouterr().err
    assert main(["train", str(copied)]) == 2
    assert "recipe.json" in capsys.readouterr().err
    assert main(["evaluate", str(copied), "--routes", "1"]) == 0
    assert main(["evaluate", str(copied), "--plot", str(copied / "no" / "x.svg")]) == 2
    assert "takes a file in an existing folder" in capsys.readouterr().err


def test_a_stop_request_is_acknowledged(tmp_path: Path) -> None:
    class Both(StopAt, Listen):
        def __init__(self) -> None:
            StopAt.__init__(self, 2, signal.SIGINT)
            Listen.__init__(self)

    callback = Both()
    train(SHORT, tmp_path, callback=callback)
    assert any("then saving" in message for message in callback.messages)


# --- data --------------------------------------------------------------------------------------------
def folders(root: Path, classes: dict[str, int], split: str) -> None:
    for name, count in classes.items():
        (root / split / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((16, 16, 3), 4 * number + len(name), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / name / f"{number}.png")


def test_few_images_train_without_validation(tmp_path: Path) -> None:
    folders(tmp_path, {"a": 4, "b": 4}, "train")
    folders(tmp_path, {"b": 2, "a": 2}, "test")
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()  # is no class
    config = replace(SHORT, data=DataConfig(name=str(tmp_path)), optim=OptimConfig(epochs=1, batch=4))
    callback = Listen()
    outcome = train(config, tmp_path / "run", callback=callback)
    assert any("too few images to hold out" in message for message in callback.messages)
    assert outcome.held_out == ()
    starved = replace(config, data=replace(config.data, hold_out=0.9))
    assert "data.hold_out=0.9 leaves none" in error_of(lambda: train(starved, tmp_path / "other"))


def test_labels_follow_the_names_of_classes(tmp_path: Path) -> None:
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    some = InMemoryDataset(name="some", images=images, labels=torch.tensor([0, 1, 1]), classes=("cat", "ant"))
    named = map_classes(some, ("ant", "bee", "cat"), "the network")
    assert named.labels.tolist() == [2, 0, 0]
    assert named.classes == ("ant", "bee", "cat")
    assert "does not have: cat" in error_of(lambda: map_classes(some, ("ant", "bee"), "the network"))
    numbered = replace(some, classes=("0", "1"))
    assert map_classes(numbered, ("ant", "bee", "cat"), "it").labels.tolist() == [0, 1, 1]
    digits = replace(some, classes=("7", "9"))
    assert map_classes(digits, tuple("0123456789"), "it").labels.tolist() == [7, 9, 9]
    assert "does not have: 7, 9" in error_of(lambda: map_classes(digits, tuple("0123"), "it"))


def test_one_file_for_both_splits_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "all.parquet"
    path.write_bytes(b"")
    config = replace(SHORT, data=DataConfig(name=str(path)))
    assert "is one file for both splits" in error_of(lambda: train(config, tmp_path / "run"))


def test_images_of_16_bits_and_one_channel_are_read(tmp_path: Path) -> None:
    (tmp_path / "train" / "x").mkdir(parents=True)
    grey = np.full((8, 8), 128 * 257, dtype=np.uint16)
    Image.fromarray(grey).save(tmp_path / "train" / "x" / "a.png")
    read = load_dataset(tmp_path, "train", size=8)
    assert set(read.images.flatten().tolist()) == {128}
    mean, std = read.statistics()
    assert mean[0] == pytest.approx(128 / 255)
    assert std == (1.0, 1.0, 1.0)


# --- settings ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["scheme.drop_path=0.2"], "no residual branches"),
        (["options.device=cpu"], "options.device is not an option"),
        (["device=cuda:7"], "device='cuda:7' is not possible"),
        (["device=meta"], "auto, cpu, cuda or cuda:N"),
        (["seed=99999999999999999999999"], "seed must be below"),
        (["lr=1e400"], "optim.lr must be a finite number"),
        (["scheme.name=single", "scheme.route=1"], "a single route needs scheme.name=label"),
    ],
)
def test_settings_without_effect_are_errors(
    settings: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [part for setting in ("scheme.name=label", *settings) for part in ("--set", setting)]
    assert main(["train", "digits_mbnet", "--out", str(tmp_path / "run"), *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_single_routes_validate_once_they_have_statistics(tmp_path: Path) -> None:
    config = replace(SHORT, scheme=SchemeConfig(name="single"))
    assert train(config, tmp_path).status.finished


def test_a_recipe_file_gives_the_run_its_name(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(finished / "recipe.json", tmp_path / "mine.json")
    assert main(["train", "mine.json", "--json"]) == 0
    assert read_config(tmp_path / "runs" / "mine") == SHORT
    assert json.loads((tmp_path / "runs" / "mine" / "results.json").read_text())["gated"] is None


def test_group_norms_need_no_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(SHORT, options={"norm": "group"})
    train(config, tmp_path)
    assert main(["recalibrate", str(tmp_path), "--device", "cpu"]) == 0
    assert "nothing to compute" in capsys.readouterr().out


def test_a_joint_run_reports_the_accuracy_of_its_gates(tmp_path: Path) -> None:
    config = replace(SHORT, scheme=SchemeConfig(name="label", joint="reinforce"))
    gated = train(config, tmp_path).gated
    assert gated is not None
    assert sum(gated.taken.values()) == gated.images == 359
    model = dsnet.training.load_model(tmp_path)
    costs = [dsnet.madds(model, route) for route in model.space]
    assert gated.madds == pytest.approx(sum(costs[r] * n for r, n in gated.taken.items()) / 359)


@pytest.mark.parametrize("count", [1, 2])
def test_a_plot_of_one_point_or_equal_ones_is_readable(count: int) -> None:
    picture = accuracy_plot({"a": [Point(1000.0 + i, 0.5, "r") for i in range(count)]}).svg("x")
    labels = [text for text in picture.split(">") if text.endswith("%</text")]
    assert len(set(labels)) == len(labels) >= 2


def test_a_stopped_run_is_saved_when_its_workers_end_first(tmp_path: Path) -> None:
    """A signal to a process group also ends the decoding workers."""
    folders(tmp_path, {"a": 30, "b": 30}, "train")
    folders(tmp_path, {"a": 4, "b": 4}, "test")
    data = DataConfig(name=str(tmp_path), lazy=True, workers=2)
    config = replace(SHORT, data=data, optim=OptimConfig(epochs=50, batch=8))

    class KillAll(Callback):
        def on_step_end(self, step: int, epoch: int, images: int) -> None:
            if step == 8:
                children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                os.kill(os.getpid(), signal.SIGTERM)
                for child in children:
                    os.kill(int(child), signal.SIGTERM)

    outcome = train(config, tmp_path / "run", callback=KillAll())
    assert outcome.status.signal == signal.SIGTERM
    assert load_checkpoint(tmp_path / "run").data["step"] == outcome.status.step >= 8
