"""The choice of a backend: the fastest, measured once, remembered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dsnet import runtime
from dsnet.runtime import autotune as choose
from dsnet.runtime.autotune import cache_file, choose_backend
from tests.support import assert_close, error_of
from tests.support.networks import network, pictures

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSNET_CACHE", str(tmp_path / "cache"))


def given_times(monkeypatch: pytest.MonkeyPatch, *times: dict[str, float]) -> list[int]:
    """Makes measurements give these, one after the other; counts them."""
    left, made = list(times), list[int]()

    def measure(*args: object) -> dict[str, float]:
        made.append(1)
        return left.pop(0)

    monkeypatch.setattr(choose, "_measure", measure)
    return made


def test_the_fastest_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("ds_mbnet_tiny")
    made = given_times(monkeypatch, {"eager": 2.0, "onnxruntime": 1.0}, {"eager": 1.0, "onnxruntime": 2.0})
    names = ["eager", "onnxruntime"]
    ask = lambda **more: choose_backend(  # noqa: E731
        model, device=CPU, precision=torch.float32, candidates=names, **more
    )
    first, again = ask(), ask()
    assert (first.name, first.measured) == ("onnxruntime", True)
    assert (again.name, again.measured) == ("onnxruntime", False)
    assert ask(image_size=32).name == "eager"  # another case, measured for itself
    assert len(made) == 2


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", "5"])
def test_a_damaged_memory_is_made_anew(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text, encoding="utf-8")
    given_times(monkeypatch, {"eager": 1.0})
    model = network("ds_mbnet_tiny")
    assert choose_backend(model, device=CPU, precision=torch.float32, candidates=["eager"]).measured
    assert list(json.loads(cache_file().read_text(encoding="utf-8")).values()) == [{"eager": 1.0}]


def test_a_memory_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("DSNET_CACHE", str(tmp_path / "file"))
    model = network("ds_mbnet_tiny")
    found = choose_backend(model, device=CPU, precision=torch.float32, candidates=["eager"])
    assert found.name == "eager"
    assert found.milliseconds["eager"] > 0


def test_one_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("ds_mbnet_tiny")

    def fail(self: object, module: object, example: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(type(runtime.get_backend("inductor")), "convert", fail)
    ask = lambda names: choose_backend(  # noqa: E731
        model, device=CPU, precision=torch.float32, candidates=names
    )
    assert set(ask(["eager", "inductor"]).milliseconds) == {"eager"}
    assert "inductor: RuntimeError: no compiler" in error_of(lambda: ask(["inductor"]))
    key = next(iter(json.loads(cache_file().read_text(encoding="utf-8"))))
    cache_file().write_text(json.dumps({key: {"eager": None}}), encoding="utf-8")
    assert ask(["eager", "inductor"]).measured


def test_plans_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("ds_mbnet_tiny")
    given_times(monkeypatch, dict.fromkeys(runtime.list_backends(), 2.0) | {"eager": 1.0}, {"eager": 1.0})
    x = pictures(model, 3)
    for memory in ("packed", "shared"):
        plan = runtime.compile(model, memory=memory)
        assert plan.network.backend == "eager"
        assert_close(plan(x, 1), model(x, 1), 1e-5)
    says = error_of(
        lambda: choose_backend(model, device=CPU, precision=torch.bfloat16, candidates=["onnxruntime"])
    )
    assert "none of the backends onnxruntime" in says
