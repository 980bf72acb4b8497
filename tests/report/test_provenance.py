"""Every file of figures names the machine, the code and the command of its measurement."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from benchmarks.timing import environment, write_json

from dsnet.report.provenance import UNKNOWN, Code, code_version

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
KEYS = {"machine", "torch", "date", "commit", "dirty", "command"}
COMMITS = re.compile(r"[0-9a-f]{7,40}(, [0-9a-f]{7,40})*")


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", folder, *author, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_of_figures_has_a_provenance(path: Path) -> None:
    about = json.loads(path.read_text(encoding="utf-8"))
    assert set(about) >= KEYS
    assert all(about[key] for key in KEYS - {"dirty"})
    assert about["dirty"] in (True, False, UNKNOWN)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", about["date"])
    assert about["commit"] == UNKNOWN or COMMITS.fullmatch(about["commit"])
    if about["commit"] == UNKNOWN or "," in about["commit"]:
        assert about["commit_of"], "why, or which commit is of what"


def test_the_commits_of_figures_are_in_the_history() -> None:
    try:
        history = set(git(ROOT, "rev-list", "HEAD").split())
        whole = git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this copy of the source has no git history")
    if not whole:
        pytest.skip("this checkout has a part of the history alone")
    named = {
        commit: path.stem
        for path in FILES
        for commit in json.loads(path.read_text(encoding="utf-8"))["commit"].split(", ")
        if commit != UNKNOWN
    }
    lengths = {len(commit) for commit in named}
    short = {commit[:length] for commit in history for length in lengths}
    assert not {commit: stem for commit, stem in named.items() if commit not in short}


def test_the_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSNET_COMMIT", raising=False)
    source = tmp_path / "src" / "dsnet" / "report" / "provenance.py"
    figures = tmp_path / "benchmarks" / "results" / "a.json"
    for path in (source, figures):
        path.parent.mkdir(parents=True)
        path.write_text("1\n")
    assert code_version(tmp_path) == Code(UNKNOWN, UNKNOWN)
    git(tmp_path, "init", "--quiet")
    assert code_version(tmp_path) == Code(UNKNOWN, UNKNOWN), "a repository that does not track this package"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "a")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD").strip()
    assert code_version(tmp_path) == Code(commit, False)
    figures.write_text("2\n")
    assert code_version(tmp_path) == Code(commit, False), "figures are no code"
    source.write_text("2\n")
    assert code_version(tmp_path) == Code(commit, True)


def test_a_copy_without_history_takes_its_commit_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, expected in (("abc1234", Code("abc1234", False)), ("abc1234-dirty", Code("abc1234", True))):
        monkeypatch.setenv("DSNET_COMMIT", given)
        assert code_version(tmp_path) == expected


def test_benchmarks_write_a_provenance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    about = environment(torch.device("cpu"))
    write_json(path, about)
    assert set(json.loads(path.read_text(encoding="utf-8"))) >= KEYS
    write_json(path, {**about, "commit": UNKNOWN})
    assert "set DSNET_COMMIT" in capsys.readouterr().out
