"""Locks: one process at a time writes to a run, and the error names it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsnet.cli import main
from dsnet.cli.train import report_outcome
from dsnet.models.loading import build_network
from dsnet.training import load_checkpoint, save_checkpoint, train
from dsnet.training.run_dir import locked
from tests.support import error_of
from tests.support.training import SHORT

pytestmark = pytest.mark.xdist_group("folder")

HOLDER = """
import sys
from pathlib import Path
from dsnet.core.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(SHORT, folder)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def content(run: Path) -> dict[str, tuple[int, int]]:
    """All files but the lock, with size and time of change."""
    files = [path for path in run.rglob("*") if path.name != ".lock"]
    return {str(path.relative_to(run)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    "command",
    [
        ["recalibrate", "RUN", "--images", "256"],
        ["recalibrate", "RUN", "--name", "last"],
        ["gate", "RUN", "--set", "epochs=1"],
        ["calibrate", "RUN"],
        ["train", "RUN/recipe.json", "--out", "RUN", "--resume"],
        ["evaluate", "RUN", "--routes", "1", "--csv", "RUN/routes.csv"],
        ["evaluate", "RUN", "--routes", "1", "--plot", "RUN/more/routes.svg"],
        ["profile", "ds_mbnet_tiny", "--repeats", "1", "--out", "RUN/times.json"],
        ["predict", "RUN", "RUN/x.png", "--out", "RUN/found.jsonl"],
        ["detect", "train", "bccd_ds_mbnet", "--data", "RUN", "--out", "RUN", "--resume"],
    ],
    ids=lambda command: "-".join(command[:2]),
)
def test_commands_do_not_write_to_a_locked_run(
    copied: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (copied / "more").mkdir()
    before = content(copied)
    with locked(copied):
        assert main([word.replace("RUN", str(copied)) for word in command]) == 2
        assert "another process works in" in capsys.readouterr().err
    assert content(copied) == before


def test_recalibrating_does_not_set_a_training_run_back(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when the run was trained on between the command's reading and its writing."""
    saved = load_checkpoint(copied, "last")
    with locked(copied):
        assert main(["recalibrate", str(copied), "--name", "last", "--images", "256"]) == 2
        data = {key: saved.data[key] for key in ("recipe", "input", "classes")}
        save_checkpoint(copied, "last", build_network(saved), step=50, data=data)
    assert load_checkpoint(copied, "last").data["step"] == 50
    assert main(["recalibrate", str(copied), "--name", "last", "--images", "256"]) == 0
    assert "saved in" in capsys.readouterr().out
    assert load_checkpoint(copied, "last").data["step"] == 50


def test_the_error_names_process_and_command(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        said = error_of(lambda: train(SHORT, tmp_path))
        assert (
            f"another process works in {tmp_path} now: process {holder.pid}, `-c {tmp_path}`, since 20"
            in said
        )
        holder.stdin.close()
    with locked(tmp_path):  # it ended with its process
        pass
    assert (tmp_path / ".lock").read_bytes() == b""


def test_a_locked_run_only_prevents_the_page(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another process takes the run between the end of training and the page."""
    outcome = train(SHORT, copied, resume=True)
    with locked(copied):
        assert report_outcome(outcome, SHORT, as_json=False) == 0
    captured = capsys.readouterr()
    assert "Final network" in captured.out
    assert "no report: another process works in" in captured.err


def test_a_lock_is_opened_without_following_links_or_emptying_files(tmp_path: Path) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("precious")
    run.mkdir()
    (run / ".lock").symlink_to(mine)
    assert ".lock is a symbolic link" in error_of(lambda: train(SHORT, run))
    assert mine.read_text() == "precious"
    (run / ".lock").unlink()
    (run / ".lock").hardlink_to(mine)
    with locked(run):
        pass
    assert mine.read_text() == "precious"
    (run / ".lock").unlink()
    (run / ".lock").mkdir()
    assert ".lock" in error_of(lambda: train(SHORT, run))
