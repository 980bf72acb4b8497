"""Runs of an earlier version load, give the same logits and resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsnet.training import load_checkpoint, train
from tests.support.old_runs import FOLDER, STOPPED, logits_of, registered


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with registered():
        yield


def expected(name: str) -> torch.Tensor:
    return torch.tensor(json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))[name])


@pytest.mark.parametrize(("run", "name", "route"), [("stopped", "last", 1), ("finished", "final", 3)])
def test_a_checkpoint_of_an_earlier_version_gives_the_same_logits(run: str, name: str, route: int) -> None:
    found = torch.tensor(logits_of(load_checkpoint(FOLDER / run, name), route))
    torch.testing.assert_close(found, expected(run), rtol=1e-4, atol=1e-6)


def test_a_run_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    run = Path(shutil.copytree(FOLDER / "stopped", tmp_path / "run"))
    assert load_checkpoint(run, "last").data["step"] == 2
    outcome = train(STOPPED, run, resume=True)
    assert (outcome.status.step, outcome.status.finished) == (4, True)
    found = torch.tensor(logits_of(load_checkpoint(run, "final"), 1))
    torch.testing.assert_close(found, expected("resumed"), rtol=1e-3, atol=1e-5)
