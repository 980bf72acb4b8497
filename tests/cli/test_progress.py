"""Progress of long commands if stderr is a log file."""

from __future__ import annotations

import pytest

from dsnet.cli.progress import LOG_SECONDS, TrainingProgress, clock, progress


class Time:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("dsnet.cli.progress.time.monotonic", lambda: self.now)


def test_progress_in_a_log_prints_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time = Time(monkeypatch)
    for _ in progress(range(40), 40, "batch"):
        time.now += 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "batch 8/40, 1:04 left"
    assert len(lines) == 4
    for _ in progress(iter(range(5)), 0, "image"):
        time.now += 20
    assert capsys.readouterr().err.splitlines()[-1] == "image 5"
    list(progress(range(3), 3, "quick"))
    assert capsys.readouterr().err == ""
    assert (clock(5), clock(3725)) == ("0:05", "1:02:05")
    assert LOG_SECONDS == 15


def test_stages_begin_and_end_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time = Time(monkeypatch)
    for _ in progress(range(4), 4, "program", stages=True):
        time.now += 8
    assert not list(progress([], 0, "other", stages=True))
    assert capsys.readouterr().err.splitlines() == [
        "program: 4 to do",
        "program 2/4, 0:16 left",
        "program: done after 0:32",
        "other: some to do",
        "other: done after 0:00",
    ]


def test_training_without_an_estimate_forecasts_and_reports_every_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time = Time(monkeypatch)
    callback = TrainingProgress(epochs=2)
    callback.on_train_begin(0, 20)
    for step in range(1, 21):
        time.now += 1
        callback.on_log(step, {"loss": 1.5, "images_per_s": 8.0})
        callback.on_step_end(step, (step - 1) // 10, 16)
    assert capsys.readouterr().err.splitlines() == [
        "Training takes about 15 seconds from here; figures and the gate come on top",
        "epoch 1 of 2: loss 1.500; 8.0 images/s; about 10 seconds left",
        "epoch 2 of 2: loss 1.500; 8.0 images/s",
    ]


def test_training_in_a_log_prints_progress_and_corrects_the_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time = Time(monkeypatch)
    callback = TrainingProgress(expected=25_200)  # 7 hours
    callback.on_train_begin(0, 100)
    for step in range(1, 101):
        time.now += 3
        callback.on_step_end(step, (step - 1) // 10, 64)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "epoch 1 step 5/100 4:45 left"
    (corrected,) = [line for line in lines if "Corrected" in line]
    assert "about 5 minutes left (not about 6 hours)" in corrected
    assert lines.index(corrected) == 2
    assert all("Corrected" not in line for line in said_by(TrainingProgress(expected=300), time, capsys))
    assert said_by(TrainingProgress(quiet=True, expected=1), time, capsys) == []


def said_by(callback: TrainingProgress, time: Time, capsys: pytest.CaptureFixture[str]) -> list[str]:
    callback.on_train_begin(0, 100)
    for step in range(1, 101):
        time.now += 3
        callback.on_step_end(step, (step - 1) // 10, 64)
    return capsys.readouterr().err.splitlines()
