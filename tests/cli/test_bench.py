"""The command `dsnet bench`: its output, files, options and help."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from unittest import mock

import pytest

from dsnet.cli import main
from dsnet.cli.parsers.common import seconds as parse_seconds
from dsnet.errors import DsnetError


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mix, out, plot = tmp_path / "mix.json", tmp_path / "bench.json", tmp_path / "bench.svg"
    mix.write_text('{"0": 7, "2": 3}', encoding="utf-8")
    words = ["bench", "ds_mbnet_tiny", "--batch", "1", "4", "--mix", str(mix), "--repeats", "2"]
    words += ["--backend", "eager", "--plot", str(plot), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["dsnet", *words])
    assert main([*words, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"70% at 0 \([\d.]+[kM]\), 30% at 2 \(", shown)
    assert "gated plan" in shown
    assert plot.read_text(encoding="utf-8").count('class="bar"') == 6
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["benchmark"] == "bench"
    assert {"machine", "date", "commit", "dirty", "command"} <= set(data)
    assert [row["batch"] for row in data["results"]] == [1, 4]
    assert data["command"] == f"dsnet bench ds_mbnet_tiny --batch 1 4 --mix {mix} --repeats 2 --backend eager"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("1h", 3600)])
def test_times_are_given_in_seconds_minutes_or_hours(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds
    for wrong in ("0", "-5m", "five", "m", "", "nan", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a time such as 90, 90s"):
            parse_seconds(wrong)


def test_quick_and_the_time_limit_are_passed_on() -> None:
    with mock.patch("dsnet.cli.bench.bench", side_effect=DsnetError("seen")) as measured:
        assert main(["bench", "ds_mbnet_tiny", "--device", "cpu", "--quick", "--time-limit", "2m"]) == 2
    given = measured.call_args.kwargs
    assert (given["quick"], given["time_limit"], given["batches"], given["repeats"]) == (True, 120, [1, 8], 3)


def test_buckets_are_passed_on() -> None:
    with mock.patch("dsnet.cli.bench.bench", side_effect=DsnetError("seen")) as measured:
        assert main(["bench", "ds_mbnet_tiny", "--device", "cpu", "--buckets", "1", "16"]) == 2
    assert measured.call_args.kwargs["batch_buckets"] == [1, 16]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mix", "nowhere.json"], "cannot be read"),
        (["--routes", "99"], "99"),
        (["--out", "no/such/folder/x.json"], "in an existing folder"),
        (["--plot", "no/such/folder/x.svg"], "--plot takes a file in an existing folder"),
        (["--plot", "x.png"], "writes .svg or .html"),
        (["--router", "gate"], "are for --mix measured"),
    ],
)
def test_invalid_options_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "ds_mbnet_tiny", "--repeats", "1", "--batch", "1", "--backend", "eager", *words]) == 2
    )
    assert says in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    for words in (
        "Examples:",
        "--mix measured --budget 45%",
        "uniform|measured|FILE",
        "bn_key=stage",
        "--plot",
    ):
        assert words in text
