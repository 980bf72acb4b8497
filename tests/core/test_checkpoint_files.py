"""Checkpoints with damaged, lost or half-written files, and links inside a run."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import dsnet
from dsnet.cli.threads import kept_threads
from dsnet.core import checkpoint
from dsnet.core.files import write_text
from dsnet.core.metrics_log import MetricsFile, read_metrics
from dsnet.errors import DsnetWarning
from dsnet.models.loading import build_network
from dsnet.report.training import training_page
from dsnet.training import load_checkpoint, save_checkpoint, train
from dsnet.training.results import read_outcome
from dsnet.training.run_dir import going_on
from tests.support import error_of, rewrite
from tests.support.training import SHORT

pytestmark = pytest.mark.xdist_group("folder")

SAVED = replace(SHORT, run=replace(SHORT.run, save_steps=2))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(SAVED, folder)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def model() -> dsnet.Supernet:
    return dsnet.create_model("ds_mbnet_tiny", generator=torch.Generator().manual_seed(0))


def flip(path: Path, at: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(bytes(raw))


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX")
def test_weights_have_the_permissions_of_other_files(model: dsnet.Supernet, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        where = save_checkpoint(tmp_path, "final", model, step=1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in where.iterdir()} == {0o640}


def test_the_folders_of_a_run_are_made(model: dsnet.Supernet, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "runs" / "new", "last", model, step=1)
    assert load_checkpoint(tmp_path / "runs" / "new").data["step"] == 1


# --- damage --------------------------------------------------------------------------------------------
def test_no_flipped_bit_loads(model: dsnet.Supernet, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "last", model, step=1)
    draws, files = random.Random(0), sorted(folder.iterdir())
    assert [path.name for path in files] == ["SHA256SUMS", "checkpoint.json", "model.safetensors"]
    for _ in range(60):
        path = draws.choice(files)
        at, bit = draws.randrange(path.stat().st_size), draws.randrange(8)
        flip(path, at, bit)
        assert "not a complete checkpoint" in error_of(lambda: load_checkpoint(tmp_path))
        flip(path, at, bit)
    assert load_checkpoint(tmp_path).data["step"] == 1
    (folder / "SHA256SUMS").unlink()  # as earlier versions wrote it
    assert load_checkpoint(tmp_path).data["step"] == 1


def test_a_file_without_a_hash_is_refused(model: dsnet.Supernet, tmp_path: Path) -> None:
    sums = save_checkpoint(tmp_path, "last", model, step=1) / "SHA256SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(line for line in lines if "model.safetensors" not in line))
    assert "SHA256SUMS has no model.safetensors" in error_of(lambda: load_checkpoint(tmp_path))


def test_a_checkpoint_without_a_network_is_refused(model: dsnet.Supernet, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "last", model, step=1) / "checkpoint.json"
    rewrite(path, json.dumps({**json.loads(path.read_text()), "groups": ["optimizer"]}))
    assert "its groups lack 'model'" in error_of(lambda: load_checkpoint(tmp_path))


def test_warnings_name_the_line_that_loads_a_damaged_run(model: dsnet.Supernet, tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, "last", model, step=step)
    flip(tmp_path / "last-00000002" / "model.safetensors", 5000)
    (tmp_path / "last").unlink()
    with pytest.warns(DsnetWarning) as caught:
        load_checkpoint(tmp_path, "last")
    assert {warning.filename for warning in caught} == {__file__}
    assert len({warning.lineno for warning in caught}) == 1


def test_a_damaged_last_falls_back_to_the_previous_one(copied: Path) -> None:
    expected = load_checkpoint(copied, "final").tensors["model"]
    assert sorted(p.name for p in copied.glob("last-*")) == ["last-00000004", "last-00000005"]
    flip(copied / "last-00000005" / "optimizer.safetensors", 5000)
    with pytest.warns(
        DsnetWarning, match=r"optimizer\.safetensors is damaged.*loading last-00000004 instead"
    ):
        assert load_checkpoint(copied, "last").data["step"] == 4
    with pytest.warns(DsnetWarning, match="loading last-00000004 instead, of step 4"):
        assert train(SAVED, copied, resume=True).status.finished
    again = load_checkpoint(copied, "final").tensors["model"]
    assert all(torch.equal(value, expected[name]) for name, value in again.items())
    assert load_checkpoint(copied, "last").data["step"] == 5


@pytest.mark.parametrize(
    ("group", "change", "said"),
    [
        (
            "optimizer",
            lambda t: t.pop("3.momentum_buffer"),
            "'optimizer' lacks the tensor '3.momentum_buffer'",
        ),
        ("optimizer", lambda t: t.update({"999.x": torch.ones(1)}), "an unexpected tensor: '999.x'"),
        (
            "optimizer",
            lambda t: t.update({"0.momentum_buffer": torch.ones(1)}),
            "'0.momentum_buffer' of the checkpoint's group 'optimizer' has shape [1], expected [",
        ),
        ("model", lambda t: t.pop("head.classifier.bias"), "'model' lacks the tensor 'head.classifier.bias'"),
    ],
)
def test_missing_and_unexpected_tensors_are_refused(
    copied: Path, group: str, change: object, said: str
) -> None:
    path = copied / "last-00000005" / f"{group}.safetensors"
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path)
    rewrite(path, path.read_bytes())
    assert said in error_of(lambda: train(SAVED, copied, resume=True))


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00", b"last-../../etc", b"last-00000099\n"])
def test_a_lost_pointer_falls_back_to_the_newest_checkpoint(copied: Path, content: bytes | None) -> None:
    if content is None:
        (copied / "last").unlink()
    else:
        (copied / "last").write_bytes(content)
    assert "holds a run already" in error_of(lambda: train(SAVED, copied))
    with pytest.warns(DsnetWarning, match="using the newest checkpoint of that name, last-00000005"):
        assert train(SAVED, copied, resume=True).status.step == 5
    assert sorted(p.name for p in copied.glob("last-*")) == ["last-00000004", "last-00000005"]


def test_other_names_fall_back_if_their_pointer_is_damaged_not_if_it_is_missing(
    model: dsnet.Supernet, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "best", model, step=3)
    (tmp_path / "best").write_text("best-00000099\n")
    with pytest.warns(DsnetWarning, match="using the newest checkpoint of that name, best-00000003"):
        assert load_checkpoint(tmp_path, "best").data["step"] == 3
    (tmp_path / "best").unlink()
    assert "has no checkpoint 'best'; it has none" in error_of(lambda: load_checkpoint(tmp_path, "best"))


def test_an_untrained_network_can_be_saved_again(model: dsnet.Supernet, tmp_path: Path) -> None:
    for _ in range(3):
        save_checkpoint(tmp_path, "last", model, step=0)
    assert load_checkpoint(tmp_path).data["step"] == 0
    assert len(list(tmp_path.glob("last-*"))) == 2  # the current one and the one before


def test_an_earlier_step_does_not_replace_last(model: dsnet.Supernet, tmp_path: Path) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, "last", model, step=step)
    assert "later checkpoint, last-00000020" in error_of(
        lambda: save_checkpoint(tmp_path, "last", model, step=15)
    )
    assert load_checkpoint(tmp_path, "last").data["step"] == 20
    flip(tmp_path / "last-00000020" / "model.safetensors", 5000)  # it does not count, and stays for a look
    save_checkpoint(tmp_path, "last", model, step=15)
    kept = ["last-00000010", "last-00000015", "last-00000020"]
    assert sorted(p.name for p in tmp_path.glob("last-*")) == kept
    save_checkpoint(tmp_path, "last", model, step=30)
    assert sorted(p.name for p in tmp_path.glob("last-*")) == ["last-00000015", "last-00000030"]


def test_data_that_could_not_be_loaded_again_is_not_saved(model: dsnet.Supernet, tmp_path: Path) -> None:
    for data, said in (
        ({"classes": [0, 1]}, "classes[0] is 0, expected text"),
        ({"input": {"mean": [0.0], "std": [0.0]}}, "input.std[0] is 0.0"),
        ({"mine": {1, 2}}, "cannot be written as JSON"),
    ):
        assert said in error_of(
            lambda d=data: save_checkpoint(tmp_path / "run", "last", model, step=1, data=d)
        )
    assert not (tmp_path / "run").exists()


# --- a full disk ---------------------------------------------------------------------------------------
@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Meanwhile no file can become larger, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_kept(run: Path, said: str) -> None:
    assert str(run / "last-00000002") in said
    assert "MB free in" in said
    assert "last-00000001 is kept" in said
    assert sorted(p.name for p in run.iterdir()) == ["last", "last-00000001"]
    assert load_checkpoint(run).data["step"] == 1


def test_a_full_disk_leaves_the_last_checkpoint(model: dsnet.Supernet, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "last", model, step=1)
    with small_files(100_000):
        said = error_of(lambda: save_checkpoint(tmp_path, "last", model, step=2))
    check_kept(tmp_path, said)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error: No space left on device")],
)
@pytest.mark.parametrize("writer", ["save_file", "flush"])
def test_an_unfinished_checkpoint_is_removed(
    model: dsnet.Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, writer: str
) -> None:
    save_checkpoint(tmp_path, "last", model, step=1)

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, writer, fail)
    said = error_of(lambda: save_checkpoint(tmp_path, "last", model, step=2))
    assert "No space left on device" in said
    check_kept(tmp_path, said)


def test_a_pointer_that_cannot_be_written_keeps_the_old_one(
    model: dsnet.Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, "last", model, step=1)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dsnet.core.files.os.replace", fail)
    assert f"{tmp_path / 'last'} cannot be written" in error_of(
        lambda: save_checkpoint(tmp_path, "last", model, step=2)
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "last-00000001"]


def test_resuming_on_a_full_disk_keeps_the_metrics(copied: Path) -> None:
    before = (copied / "metrics.jsonl").read_text()
    assert before
    with small_files(10):
        assert "metrics.jsonl cannot be written" in error_of(lambda: train(SAVED, copied, resume=True))
    assert (copied / "metrics.jsonl").read_text() == before
    assert [p.name for p in copied.iterdir() if p.name.startswith(".metrics")] == []


def test_metrics_that_are_not_numbers_are_left_out_of_charts(copied: Path) -> None:
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    example, name = lines[0], next(name for name in lines[0] if "/" in name)
    wrong = ("x", [0, 0], None, True, 1e300, float("nan"))
    lines += [{**example, name: value} for value in wrong]
    del next(line for line in lines if "score" in line)["epoch"]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = read_metrics(copied / "metrics.jsonl")
    assert [name in line for line in kept[-len(wrong) :]] == [False] * len(wrong)
    outcome = read_outcome(copied)
    assert outcome is not None
    assert "Losses, network by network" in training_page(outcome, SAVED, kept)


def test_a_checkpoint_beyond_the_last_step_is_refused(copied: Path) -> None:
    last = load_checkpoint(copied, "last")
    data = {
        key: value for key, value in last.data.items() if key not in ("format", "step", "network", "groups")
    }
    tensors = {group: values for group, values in last.tensors.items() if group != "model"}
    save_checkpoint(copied, "last", build_network(last), step=999, tensors=tensors, data=data)
    assert "its checkpoint is of step 999, but its settings and these images give" in error_of(
        lambda: train(SAVED, copied, resume=True)
    )


def test_lines_of_metrics_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, after=0)
    with small_files(10):
        assert "metrics.jsonl cannot be written" in error_of(
            lambda: metrics.write("train", 1, {"loss": [0.5] * 10_000})
        )
        metrics.close()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "tr')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"kind": "train", "step": 1}]


# --- links ---------------------------------------------------------------------------------------------
def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "link").symlink_to(mine)
    write_text(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert mine.read_text() == "precious"


def test_training_replaces_links_and_keeps_their_targets(tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    mine.write_text("precious")
    for name in ("metrics.jsonl", "recipe.json", "results.json"):
        (run / name).symlink_to(mine)
    assert train(SHORT, run).status.finished
    assert mine.read_text() == "precious"
    assert json.loads((run / "results.json").read_text())["steps"] == 5
    (run / "tensorboard").exists()
    shutil.rmtree(run / "tensorboard", ignore_errors=True)
    (run / "tensorboard").symlink_to(tmp_path)
    assert "symbolic link inside a run" in error_of(lambda: train(SHORT, run, resume=True))


def test_links_to_files_are_read_and_pipes_are_not(model: dsnet.Supernet, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "run", "last", model, step=1)
    for path in list(folder.iterdir()):  # as in the cache of a model hub
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert load_checkpoint(tmp_path / "run").data["step"] == 1
    for name in ("model.safetensors", "SHA256SUMS"):
        (folder / name).unlink()
        os.mkfifo(folder / name)  # nobody writes to it: it would block
        assert name in error_of(lambda: load_checkpoint(tmp_path / "run"))


def test_a_pipe_is_not_read_as_a_pointer(model: dsnet.Supernet, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "last", model, step=1, data={"threads": 3})
    assert kept_threads(tmp_path) == 3
    assert "last-00000001 is the checkpoint to resume from" in going_on(tmp_path)
    (tmp_path / "last").unlink()
    os.mkfifo(tmp_path / "last")
    with pytest.warns(DsnetWarning, match="using the newest checkpoint of that name"):
        assert load_checkpoint(tmp_path).data["step"] == 1
    assert kept_threads(tmp_path) is None
    assert "nothing is saved" in going_on(tmp_path)


# --- reading while another process writes ----------------------------------------------------------------
def test_loading_while_a_run_saves_gives_a_complete_checkpoint(model: dsnet.Supernet, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "best", model, step=1)
    done = threading.Event()

    def save() -> None:
        step = 1
        while not done.is_set():
            step += 1
            save_checkpoint(tmp_path, "best", model, step=step)

    writer = threading.Thread(target=save)
    writer.start()
    try:
        steps = [load_checkpoint(tmp_path, "best").data["step"] for _ in range(80)]
    finally:
        done.set()
        writer.join()
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


@pytest.mark.parametrize("reader", ["_read", "_read_data", "load_file"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    model: dsnet.Supernet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    save_checkpoint(tmp_path, "best", model, step=1)
    read, step = getattr(checkpoint, reader), 1

    def slow(path: Path) -> object:
        nonlocal step
        if step < 6:
            step += 1
            save_checkpoint(tmp_path, "best", model, step=step)  # the folder is gone now
        return read(path)

    monkeypatch.setattr(checkpoint, reader, slow)
    assert load_checkpoint(tmp_path, "best").data["step"] == 6
