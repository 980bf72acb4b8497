"""Text for messages: bounded, and safe for a terminal."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from dsnet.cli import main
from dsnet.errors import DsnetError, printable, shorten


@pytest.mark.parametrize(
    "value", ["x" * 10**6, ["y" * 10**6] * 10**3, {i: i for i in range(10**5)}, b"z" * 10**6]
)
def test_a_large_value_makes_a_short_message(value: object) -> None:
    assert len(shorten(value)) <= 120


def test_small_values_are_shown_in_full() -> None:
    assert shorten([1, 2.5, "a"]) == "[1, 2.5, 'a']"


def test_escape_sequences_and_broken_names_cannot_reach_a_terminal() -> None:
    assert printable("a\x1b[2Jb\udcffc\x07") == r"a\x1b[2Jb\udcffc\x07"
    assert printable("Grüße\n× λ\t日本") == "Grüße\n× λ\t日本"
    assert printable("x" * 100, 10) == "xxx...xxx"


def test_a_message_is_bounded_and_printable_whatever_it_quotes() -> None:
    message = str(DsnetError("no " + "\x1b[2J\udcff" * 10**5 + " here: give another"))
    assert len(message) <= 4000
    assert message.isprintable()
    assert message.startswith("no ")
    assert message.endswith("give another")
    assert isinstance(pickle.loads(pickle.dumps(DsnetError("x"))), DsnetError)


HUGE = "x" * 100_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", f"optim.lr={HUGE}"],
        ["--set", f"{HUGE}=1"],
        ["--set", HUGE],
        ["--set", f"model={HUGE}"],
        ["--set", f"options.norm={HUGE}"],
        ["--set", f"options.{HUGE}=1"],
        ["--set", f"scheme.name={HUGE}"],
        ["--set", "optim.epochs=0x" + "f" * 100_000],
        ["--set", "optim.epochs=" + "(" * 100_000],
        ["--set", "augment.crop=[" + "1," * 50_000 + "]"],
        ["--data", HUGE],
        ["--data", "a\x1b[2J\udcff"],
    ],
    ids=lambda arguments: arguments[1][:16],
)
def test_a_bad_value_is_shortened_in_the_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = [] if arguments[0] == "--data" else ["digits_mbnet"]
    assert main(["train", *recipe, *arguments, "--dry-run"]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error) < 1300
    assert error.isprintable()


def test_bad_recipe_values_and_file_names_are_shortened_in_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    for plain in (
        {"model": HUGE},
        {HUGE: 1},
        {"optim": HUGE},
        {"optim": {"kind": HUGE}},
        {"options": {HUGE: 1}, "model": "ds_mbnet_tiny"},
        {"augment": {"crop": [1] * 50_000}},
    ):
        path.write_text(json.dumps(plain))
        assert main(["train", str(path), "--dry-run"]) == 2
        assert len(capsys.readouterr().err) < 1300
    for name in (HUGE, f"*{HUGE}"):
        assert main(["predict", str(tmp_path), name]) == 2
        assert len(capsys.readouterr().err) < 1300
