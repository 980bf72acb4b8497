"""Benchmarks run on a CPU too, with tiny networks, and write what their tables are made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import training


def test_a_training_step_is_timed_beside_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "training.json"
    options = ["--device", "cpu", "--model", "ds_mbnet_tiny", "--batch", "8", "--repeats", "1"]
    training.main([*options, "--json", str(path)])
    assert "ds_mbnet_tiny" in capsys.readouterr().out
    (row,) = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert row["ratio"] == pytest.approx(row["step"] / row["sum"], rel=1e-3)
    assert row["sum"] == pytest.approx(sum(ms for name, ms in row["parts"].items() if name != "images"), 1e-3)
    assert set(row["parts"]) == {*(f"network {i}" for i in range(4)), "teacher", "update", "images"}
