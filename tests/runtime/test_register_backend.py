"""Backends that a user registers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dsnet import runtime
from dsnet.cli import main
from dsnet.runtime._autotune import cache_file, choose_backend
from dsnet.runtime.backends import base
from tests.support import assert_close, error_of
from tests.support.networks import network, pictures


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the test's backends afterwards."""
    monkeypatch.setattr(base, "_BACKENDS", dict(base._BACKENDS))


def register_traced(*, any_batch: bool = True, reason: str | None = None) -> type[runtime.Backend]:
    @runtime.register_backend("traced")
    class Traced(runtime.Backend):
        buckets = (1, 2)
        sizes: tuple[int, ...] = ()

        def compile(self, module: nn.Module, *examples: Tensor) -> nn.Module:
            Traced.sizes += (len(examples[0]),)
            return torch.jit.trace(module, examples, check_trace=False)

        def any_batch(self, device: torch.device) -> bool:
            return any_batch

        def unavailable(self, device: torch.device, precision: torch.dtype) -> str | None:
            return reason

    return Traced


@pytest.mark.parametrize("any_batch", [True, False])
def test_plans_run_on_a_registered_backend(any_batch: bool) -> None:
    backend = register_traced(any_batch=any_batch)
    model = network("ds_mbnet_tiny")
    plan = runtime.compile(model, backend="traced", routes=[0, 3])
    for count in (1, 3):
        x = pictures(model, count)
        assert_close(plan(x, 3), model(x, 3), 1e-4)
    assert sorted(backend.sizes) == ([1] * 3 if any_batch else [1] * 3 + [2] * 3)
    assert plan.network.backend == backend.name == "traced"


def test_auto_times_a_registered_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSNET_CACHE", str(tmp_path))
    model, cpu = network("ds_mbnet_tiny"), torch.device("cpu")
    register_traced()
    choose_backend(model, device=cpu, precision=torch.float32, candidates=["eager", "traced"])
    (times,) = json.loads(cache_file().read_text(encoding="utf-8")).values()
    assert set(times) == {"eager", "traced"}
    assert runtime.list_backends()[-1] == "traced"


def test_reasons_and_unknown_names_are_errors() -> None:
    model = network("ds_mbnet_tiny")
    register_traced(reason="it needs a fan")
    assert "backend traced cannot be used: it needs a fan" in error_of(
        lambda: runtime.compile(model, backend="traced")
    )
    message = error_of(lambda: runtime.compile(model, backend="trace"))
    assert "unknown backend 'trace'; possible: auto, eager" in message
    assert "openvino, traced" in message


@pytest.mark.parametrize("name", ["traced", "eager", "openvino"])
def test_names_are_registered_once(name: str) -> None:
    register_traced()
    message = error_of(lambda: runtime.register_backend(name)(type("Other", (runtime.Backend,), {})))
    assert f"backend '{name}' is registered already; registered: eager, " in message


def test_names_and_classes_are_checked() -> None:
    subclass = type("Mine", (runtime.Backend,), {})
    assert "'auto' is not a possible name" in error_of(lambda: runtime.register_backend("auto")(subclass))
    assert "derived from Backend" in error_of(lambda: runtime.register_backend("mine")(cast(Any, nn.Module)))


SOURCE = """
import torch
from dsnet import runtime

@runtime.register_backend("scripted")
class Scripted(runtime.Backend):
    def compile(self, module, *examples):
        return torch.jit.trace(module, examples, check_trace=False)
"""


def test_commands_know_backends_of_imported_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scripted_backend.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    command = ["profile", "ds_mbnet_tiny", "--repeats", "1", "--threads", "1", "--json", "--backend"]
    assert main([*command, "scripted"]) == 2
    assert "unknown backend 'scripted'" in capsys.readouterr().err
    assert main([*command, "scripted", "--import", "scripted_backend"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["backend"] == "scripted"
    assert main([*command, "script", "--import", "scripted_backend"]) == 2
    assert "openvino, scripted" in capsys.readouterr().err
