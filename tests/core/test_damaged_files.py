"""Damaged JSON files of a run: a command works or reports the problem in one line."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsnet import DsnetError
from dsnet.benchmark.workloads import mix_of, read_mix
from dsnet.cli import build_parser
from dsnet.models.loading import build_network
from dsnet.report.run_page import update_run_page
from dsnet.routing import LatencyTable
from dsnet.runtime._autotune import _read_cache, cache_file
from dsnet.runtime.profile import profile
from dsnet.training import load_checkpoint
from dsnet.training.run_dir import read_config
from tests.support import error_of, rewrite

DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**9,
    2**70,
    10**400,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
]
VALUES += ["../outside", "\x1b[31m", "\ud800", "x" * 5000, [], {}, [0, 0, 0], [[]], {"a": 1}, {"0": -1}, DEEP]


def places(data: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values inside; of long lists the first and the last item."""
    inside: dict[Any, object] = data if isinstance(data, dict) else {}
    if isinstance(data, list) and data:
        inside = {at: data[at] for at in sorted({0, len(data) - 1})}
    for key, value in inside.items():
        yield (*path, key)
        yield from places(value, (*path, key))


def edited(data: dict[str, Any], draws: random.Random) -> tuple[str, dict[str, Any]]:
    """A copy with one value replaced, removed, doubled or added, and what was done."""
    made = copy.deepcopy(data)
    # Values near the top as often as those deep inside, which are many more.
    by_depth: dict[int, list[tuple[str | int, ...]]] = {}
    for path in places(made):
        by_depth.setdefault(len(path), []).append(path)
    path = draws.choice(by_depth[draws.choice(list(by_depth))])
    place: Any = made
    for key in path[:-1]:
        place = place[key]
    kind = draws.choice(["replace"] * 5 + ["remove", "add"])
    if kind == "remove":
        del place[path[-1]]
        return f"{path} removed", made
    value = copy.deepcopy(draws.choice(VALUES))
    if kind == "replace":
        place[path[-1]] = value
    elif isinstance(place, list):
        place.append(value)
    else:
        place["added"] = value
    return f"{path} {kind} {str(value)[:60]}", made


def outcome(told: str, call: Callable[[], object]) -> bool:
    """Whether a call works; anything but success or an error for people fails the test."""
    said = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except DsnetError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    assert len(said) < 3000, told
    return not said


def command(*words: object) -> Callable[[], object]:
    """A command without the last handler of `main`."""

    def call() -> object:
        args = build_parser().parse_args([str(word) for word in words])
        return args.run_command(args)

    return call


def try_checkpoint(run: Path, image: str, text: str, turn: int) -> Callable[[], object]:
    (folder,) = run.glob("gated-*")
    rewrite(folder / "checkpoint.json", text)
    commands = [
        command("predict", run, image, "--budget", "45%"),
        command("predict", run, image, "--route", 1, "--top", 3),
        command("predict", run, image),
        lambda: (load_checkpoint(run).data.get("best") or {"score": 0, "step": 0})["score"] > 0.0,
        command("evaluate", run, "--routes", 2),
        command("bench", run, "--mix", "measured", "--budget", "x"),
    ]
    return commands[turn % len(commands)]


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_edited_checkpoints_load_or_are_refused(copied: Path, files: list[str]) -> None:
    (folder,) = copied.glob("gated-*")
    data, draws = json.loads((folder / "checkpoint.json").read_text()), random.Random(0)
    worked = 0
    for turn in range(60):
        told, changed = edited(data, draws)
        worked += outcome(told, try_checkpoint(copied, files[0], json.dumps(changed), turn))
    assert 0 < worked < 50
    (folder / "checkpoint.json").write_text(json.dumps(data))
    assert outcome("as it was", command("predict", copied, files[0], "--budget", "45%"))


def test_edited_files_load_or_are_refused(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSNET_CACHE", str(tmp_path / "cache"))
    cache_file().parent.mkdir()
    model, draws = build_network(load_checkpoint(copied)), random.Random(1)
    latency, mix = tmp_path / "latency.json", tmp_path / "mix.json"
    profile(model, repeats=1).save(latency)
    mix.write_text('{"0": 0.5, "3": 0.5}')
    cache_file().write_text('{"a network": {"eager": 0.5}}')
    readers: dict[Path, Callable[[], object]] = {
        latency: lambda: LatencyTable.load(latency).check(model, torch.device("cpu")),
        mix: lambda: mix_of(model, read_mix(mix)),
        cache_file(): _read_cache,
        copied / "recipe.json": lambda: read_config(copied),
        copied / "results.json": lambda: update_run_page(copied),
    }
    for path, read in readers.items():
        data = json.loads(path.read_text())
        assert outcome(str(path), read)
        for _ in range(10):
            told, changed = edited(data, draws)
            path.write_text(json.dumps(changed))
            outcome(f"{path.name}: {told}", read)
        path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("input", "std"), [0, 0, 0], "input.std[0] is 0, expected a finite number from 1e-06"),
        (("input", "std"), [1, 1], "input.std has 2 values, expected 3"),
        (("classes",), list(range(10)), "classes[0] is 0, expected text"),
        (("step",), "x", "step is 'x', expected a whole number"),
        (("groups",), ["model", "../../../etc/passwd"], "groups[1] is '../../../etc/passwd'"),
        (("network", "options"), {"device": "cuda"}, "network.options.device"),
        (("network", "options"), {"num_classes": 2**24}, "do not fit its weights"),
        (("recipe", "data", "size"), -3, "recipe.data.size is -3"),
        (("step",), DEEP, "nested 202 levels deep, expected at most 64"),
    ],
)
def test_an_error_names_file_key_value_and_what_is_allowed(
    copied: Path, path: tuple[str, ...], value: object, said: str
) -> None:
    (folder,) = copied.glob("gated-*")
    data = json.loads((folder / "checkpoint.json").read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    rewrite(folder / "checkpoint.json", json.dumps(data))
    message = error_of(lambda: build_network(load_checkpoint(copied, "gated")))
    assert said in message
    assert "checkpoint" in message


def test_json_is_limited_in_size_and_depth(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied / "recipe.json"
    path.write_text('{"data": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "nested 100001 levels deep" in error_of(lambda: read_config(copied))
    path.write_text("{" * 100_000)
    assert "nested 100000 levels deep" in error_of(lambda: read_config(copied))
    path.write_text(json.dumps({"model": '\\[{"' * 100}))  # brackets in text are no levels
    assert "there is no model" not in str(read_config(copied))
    monkeypatch.setattr("dsnet.core.schema.LARGEST", 100)
    assert "more than 100 bytes" in error_of(lambda: read_config(copied))
    path.unlink()
    os.mkfifo(path)  # nobody writes to it: it would block
    assert "expected a regular file" in error_of(lambda: read_config(copied))
