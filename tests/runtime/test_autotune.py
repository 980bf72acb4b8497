"""The fastest backend is measured once and cached."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from dsnet import runtime
from dsnet.runtime import _autotune as autotune
from dsnet.runtime._autotune import cache_file, choose_backend
from tests.support import assert_close, error_of
from tests.support.networks import network, pictures

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSNET_CACHE", str(tmp_path / "cache"))


def fake_times(monkeypatch: pytest.MonkeyPatch, *times: dict[str, float]) -> list[int]:
    """Make measurements return these times in turn; the returned list grows with every measurement."""
    remaining, measurements = list(times), list[int]()

    def measure(*args: object) -> dict[str, float]:
        measurements.append(1)
        return remaining.pop(0)

    monkeypatch.setattr(autotune, "_measure", measure)
    return measurements


def test_the_fastest_backend_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("ds_mbnet_tiny")
    measurements = fake_times(
        monkeypatch, {"eager": 2.0, "onnxruntime": 1.0}, {"eager": 1.0, "onnxruntime": 2.0}
    )
    choose = functools.partial(
        choose_backend, model, device=CPU, precision=torch.float32, candidates=["eager", "onnxruntime"]
    )
    assert choose() == "onnxruntime"
    assert choose() == "onnxruntime"
    assert len(measurements) == 1
    assert choose(image_size=32) == "eager"
    assert len(measurements) == 2


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", "5"])
def test_a_damaged_cache_is_replaced(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text, encoding="utf-8")
    measurements = fake_times(monkeypatch, {"eager": 1.0})
    model = network("ds_mbnet_tiny")
    choose_backend(model, device=CPU, precision=torch.float32, candidates=["eager"])
    assert measurements
    assert list(json.loads(cache_file().read_text(encoding="utf-8")).values()) == [{"eager": 1.0}]


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("DSNET_CACHE", str(tmp_path / "file"))
    model = network("ds_mbnet_tiny")
    assert choose_backend(model, device=CPU, precision=torch.float32, candidates=["eager"]) == "eager"


def test_a_backend_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("ds_mbnet_tiny")

    def fail(self: object, module: object, example: object) -> None:
        raise RuntimeError("no compiler")

    def choose(*names: str) -> str:
        return choose_backend(model, device=CPU, precision=torch.float32, candidates=names)

    def cached() -> dict[str, dict[str, float]]:
        times: dict[str, dict[str, float]] = json.loads(cache_file().read_text(encoding="utf-8"))
        return times

    monkeypatch.setattr(type(runtime.get_backend("inductor")), "convert", fail)
    assert choose("eager", "inductor") == "eager"
    ((key, times),) = cached().items()
    assert set(times) == {"eager"}
    assert times["eager"] > 0
    assert "inductor: RuntimeError: no compiler" in error_of(lambda: choose("inductor"))
    cache_file().write_text(json.dumps({key: {"eager": None}}), encoding="utf-8")
    assert choose("eager", "inductor") == "eager"
    assert cached()[key]["eager"] > 0, "invalid times are measured again"


def test_plans_choose_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("ds_mbnet_tiny")
    fake_times(monkeypatch, dict.fromkeys(runtime.list_backends(), 2.0) | {"eager": 1.0}, {"eager": 1.0})
    x = pictures(model, 3)
    for memory in ("packed", "shared"):
        plan = runtime.compile(model, memory=memory)
        assert plan.network.backend == "eager"
        assert_close(plan(x, 1), model(x, 1), 1e-5)
    says = error_of(
        lambda: choose_backend(model, device=CPU, precision=torch.bfloat16, candidates=["onnxruntime"])
    )
    assert "none of the backends onnxruntime" in says
