"""Times of a plan's parts: every one in its place, and together near what the plan takes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsnet
from dsnet import runtime
from dsnet.cli import main
from dsnet.core.timer import timed
from dsnet.models import Factory
from dsnet.models.options import ConvOptions
from dsnet.models.resnet import DS_RESNET_TINY, ResNet
from dsnet.routing import CostTable, LatencyTable
from dsnet.runtime import _autotune as autotune
from dsnet.runtime import profile as profiling
from dsnet.runtime import profile_plan
from dsnet.runtime.executors.host import HostExecutor
from dsnet.runtime.executors.segment_calls import SegmentCalls
from tests.support import error_of, images

CPU = torch.device("cpu")
BACKENDS = ["eager", pytest.param("openvino", marks=pytest.mark.slow)]


def watched_plans(monkeypatch: pytest.MonkeyPatch) -> list[runtime.Plan]:
    """Return a list that collects the plans that profiling compiles."""
    plans: list[runtime.Plan] = []

    def make(*args: Any, **settings: Any) -> runtime.Plan:  # noqa: ANN401  (compile's own)
        plans.append(runtime.compile(*args, **settings))
        return plans[-1]

    monkeypatch.setattr("dsnet.runtime.profile.make_plan", make)
    return plans


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_together_take_as_long_as_the_plan(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if importlib.util.find_spec("openvino" if backend == "openvino" else "torch") is None:
        pytest.skip("openvino is not installed")
    plans, model = watched_plans(monkeypatch), dsnet.create_model("ds_mbnet_tiny", activation="relu")
    for _ in range(3):  # others work on these cores, too
        table = profile_plan(model, backend=backend, batches=(8, 1), repeats=15)
        ratios = []
        for batch, number in itertools.product((1, 8), (0, 3)):
            call = functools.partial(plans[-1], images(model, batch, size=16), number)
            taken = statistics.median(timed(call, CPU) for _ in range(15))
            ratios.append(table.at(batch).of((number,)).p50 / taken)
        if all(1 / 3 < ratio < 3 for ratio in ratios):
            break
    else:
        pytest.fail(f"parts take {ratios} of the plan's time")
    table.save(tmp_path / "t.json")
    assert LatencyTable.load(tmp_path / "t.json") == table
    facts = (table.model, table.image_size, table.kind, table.backend, table.memory, table.dtype)
    assert facts == (model.spec, (16, 16), "cpu", backend, "packed", "float32")
    package = importlib.import_module("torch" if backend == "eager" else backend)
    assert table.backend_version == str(package.__version__)
    table.check(model, CPU)


def three_gates() -> dsnet.Supernet:
    """Behind the second gate there are more histories than pairs of choices."""
    table = replace(
        DS_RESNET_TINY, strides=(1, 2, 1), slices=(*DS_RESNET_TINY.slices, DS_RESNET_TINY.slices[1])
    )
    return ResNet("three_gates", table, ConvOptions(), Factory()).eval()


@pytest.mark.parametrize(
    ("build", "parts"),
    [(lambda: dsnet.create_model("ds_vit_plus_tiny"), 1 + 3), (three_gates, 1 + 4 + 2 * 16)],
)
def test_every_time_belongs_to_its_segment(
    build: Callable[[], dsnet.Supernet], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock returns multiply-adds. Only the first history of each pair of choices is compiled."""
    model, plans = build(), watched_plans(monkeypatch)
    expected = CostTable.of_model(model, 16)
    rows = {}

    def clock(call: Any, device: torch.device) -> float:  # noqa: ANN401  (a partial)
        history = () if call.func.__name__ == "run_prefix" else call.args[1]
        if history not in rows:
            rows[history] = len(call() if len(history) == len(model.gates) else call().x)
        previous = history[-2] if len(history) > 1 else None
        return expected.segment(len(history) - 1, previous, history[-1]) if history else expected.prefix

    monkeypatch.setattr(profiling, "timed_on_device", clock)
    table = profile_plan(model, backend="eager", batches=(2,), repeats=1, image_size=16)
    assert table.at(2).prefix.p50 == expected.prefix
    assert [[[t.p50 for t in row] for row in gate] for gate in table.at(2).segments] == [
        [list(row) for row in gate] for gate in expected.segments
    ]
    assert set(rows.values()) == {2}
    assert len(plans[0].network.segments) == len(rows) == parts


def test_the_executor_that_serves_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run whole paths, as on a GPU: a segment's time is what it adds to the path before it."""
    model = dsnet.create_model("ds_resnet_tiny")
    expected = CostTable.of_model(model)
    ran: list[tuple[int, ...]] = []

    class Serving(HostExecutor):
        def segment_calls(self, x: torch.Tensor) -> SegmentCalls:
            calls = {path: functools.partial(ran.append, path) for path in super().segment_calls(x).calls}
            return SegmentCalls(calls, cumulative=True)

    def make(*args: Any, **settings: Any) -> runtime.Plan:  # noqa: ANN401  (compile's own)
        plan = runtime.compile(*args, **settings)
        return replace(plan, network=replace(plan.network, graph_executor=Serving(plan.network)))

    def clock(call: Any, device: torch.device) -> float:  # noqa: ANN401  (a partial)
        call()
        (path,) = call.args
        pairs = enumerate(zip((None, *path[:-1]), path, strict=True)) if path else ()
        return expected.prefix + sum(expected.segment(gate, *pair) for gate, pair in pairs)

    monkeypatch.setattr("dsnet.runtime.profile.make_plan", make)
    monkeypatch.setattr(profiling, "timed_on_device", clock)
    times = profile_plan(model, backend="eager", repeats=1).at()
    assert times.prefix.p50 == expected.prefix
    for gate, rows in enumerate(times.segments):
        for row, costs in zip(rows, expected.segments[gate], strict=True):
            assert [time.p50 for time in row] == pytest.approx(costs)
    assert len(ran) == (1 + 4 + 16) * (profiling.WARM_UP + 1)


def test_profiling_does_not_change_the_network() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    model.train()(images(model, 4), 1)  # statistics of one route
    model.reset_routing(model.space.narrow([0, 2]))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    table = profile_plan(model, backend="eager", precision="bfloat16", repeats=1)
    assert (table.dtype, table.at().choices) == ("bfloat16", (4,))
    assert (model.training, model.bn_key, model.gate(0).choices) == (True, "prefix", (0, 2))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    table.check(model, CPU)  # what serves in bfloat16 may be calibrated in float32


def test_auto_reports_the_backend_it_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSNET_CACHE", str(tmp_path))
    taken = dict.fromkeys(runtime.list_backends(), 2.0) | {"eager": 1.0}
    monkeypatch.setattr(autotune, "_measure", lambda *args: taken)
    words = ["profile", "ds_mbnet_tiny", "--backend", "auto", "--device", "cpu", "--repeats", "1"]
    assert main([*words, "--json"]) == 0
    table = LatencyTable.from_dict(json.loads(capsys.readouterr().out))
    assert (table.backend, table.memory) == ("eager", "packed")
    assert main(words) == 0
    assert f"a plan, eager {torch.__version__}, float32, on cpu" in capsys.readouterr().out


def test_settings_that_cannot_be_profiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    assert "unknown backend 'tensorrt'; possible: auto, eager" in error_of(
        lambda: profile_plan(model, backend="tensorrt")
    )
    assert "unknown precision 'int4'" in error_of(
        lambda: profile_plan(model, backend="eager", precision="int4")
    )
    assert "not 0" in error_of(lambda: profile_plan(model, batches=(0,)))
    assert "not a Linear" in error_of(lambda: profile_plan(torch.nn.Linear(1, 1)))  # type: ignore[arg-type]
    words = ["profile", "ds_mbnet_tiny", "--device", "cpu", "--backend", "openvino"]
    backend = type(runtime.get_backend("openvino"))
    monkeypatch.setattr(backend, "unavailable", lambda *args: "it is not installed: pip install it")
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "dsnet: backend openvino cannot be used: it is not installed: pip install it\n"
    )
