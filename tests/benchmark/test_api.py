"""Benchmarks: ideal times and ratios, routes, time limits, and what a quick one leaves out."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.tables import bench_table

import dsnet
from dsnet import runtime
from dsnet.benchmark._candidates import Candidates
from dsnet.benchmark._static_baselines import StaticNetwork, static_networks
from dsnet.benchmark.api import WARM_UP, bench
from dsnet.benchmark.results import Baseline, BenchResult
from dsnet.benchmark.workloads import CASCADE_SHARE
from dsnet.core.timer import TimeLimit, TimeUpError
from dsnet.counts import human
from dsnet.report.bench import bench_plot, bench_text
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork
from tests.support import error_of
from tests.support.networks import network, plan_of


def table_of(result: BenchResult) -> str:
    """The table of the documents, from the JSON file of a result."""
    plain = json.loads(json.dumps(result.to_dict()))
    return bench_table("x", {"machine": "here", "date": "today", **plain})


def test_ideal_ratios_and_theory() -> None:
    model = network("ds_mbnet_tiny")
    benched = bench(model, batches=(1, 6), mix={0: 0.75, 3: 0.25}, backend="eager", repeats=2)
    cost = {number: dsnet.madds(model, number) for number in (0, 3)}
    assert benched.theory == pytest.approx(cost[3] / (0.75 * cost[0] + 0.25 * cost[3]))
    for result in benched.results:
        ms = {name: spread.median for name, spread in result.times.items()}
        assert result.ideal == pytest.approx(0.75 * ms["alone 0"] + 0.25 * ms["alone 3"])
        assert result.ideal_cascade == pytest.approx(ms["alone 0"] + CASCADE_SHARE * ms["suffix 3"])
        assert result.ratio == pytest.approx(result.ideal / ms["gated"])
        assert result.ratio_stream == pytest.approx(result.ideal / ms["stream"])
        assert result.speedup == pytest.approx(ms["full"] / ms["gated"])
        assert all(0 < spread.low <= spread.median <= spread.high for spread in result.times.values())
        assert {"masking", "indexing", "slicing"} <= set(ms)
        assert ("in turn" in ms) == (result.batch == 1)
    plain = json.loads(json.dumps(benched.to_dict()))
    assert plain["shares"] == {"0": 0.75, "3": 0.25}
    assert plain["cascade"] == {"routes": [0, 3], "shares": [1.0, 0.2]}
    assert plain["threads"] == torch.get_num_threads()
    assert {"cores", "cpu_mhz", "gpu_mhz", "load"} <= set(plain)
    assert (plain["mix"], plain["twin"], plain["twin_backend"]) == ("as given", None, None)
    for wrong in ({"batches": (0,)}, {"repeats": 0}, {"batches": ()}):
        assert "positive integers" in error_of(lambda wrong=wrong: bench(model, backend="eager", **wrong))


def test_several_gates() -> None:
    model = network("ds_resnet_tiny")
    mix = {0: 1, 7: 2, 15: 1}
    (result,) = bench(model, batches=(4,), mix=mix, backend="eager", repeats=1).results
    ms = {name: spread.median for name, spread in result.times.items()}
    assert {name for name in ms if name.startswith("alone")} == {"alone 0", "alone 7", "alone 15"}
    assert result.ideal == pytest.approx(0.25 * ms["alone 0"] + 0.5 * ms["alone 7"] + 0.25 * ms["alone 15"])
    narrowed = dsnet.create_model(model.name).eval()
    for stage in range(len(narrowed.gates)):
        narrowed.gate(stage).replace_routing((0, 1))
    assert "gates do not decide" in error_of(lambda: bench(narrowed, mix=mix, backend="eager"))


def test_the_largest_route_of_a_narrowed_gate_is_timed_beside_that_of_the_network() -> None:
    """A speed-up over a route that the gate never takes would not measure what routing saves."""
    model = copy.deepcopy(network("ds_mbnet_tiny"))
    model.reset_routing(model.space.narrow([0, 1]))
    benched = bench(model, batches=(2,), backend="eager", repeats=1)
    (result,) = benched.results
    assert (benched.largest, benched.gate_largest) == (3, 1)
    assert result.speedup_gate == pytest.approx(
        result.times["gate largest"].median / result.times["gated"].median
    )
    plain = json.loads(json.dumps(benched.to_dict()))
    assert (plain["largest"], plain["gate_largest"]) == (3, 1)
    assert plain["madds"] == {str(number): dsnet.madds(model, number) for number in (0, 1, 3)}
    text = bench_text(benched)
    assert "largest of the gate (route 1)" in text
    assert f"50% at 0 ({human(plain['madds']['0'])})" in text
    assert "route 1 (gate's largest)" in table_of(benched)
    compiled = runtime.compile(model, backend="eager", routes=[0, 1, 3]).network
    candidates = Candidates(model, compiled, benched.mix, {}, eager=False).at(2)
    routes_run: list[int] = []
    run_route = CompiledNetwork.run_route

    def record(self: CompiledNetwork, x: torch.Tensor, route: dsnet.Route) -> torch.Tensor:
        routes_run.append(route.number)
        return run_route(self, x, route)

    with mock.patch.object(CompiledNetwork, "run_route", record):
        for key in ("gate largest", "full"):
            candidates[key].run()
    assert routes_run == [1, 3]
    whole = bench(network("ds_mbnet_tiny"), batches=(2,), backend="eager", repeats=1)
    assert "gate largest" not in whole.results[0].times
    assert whole.results[0].speedup_gate == whole.results[0].speedup


@pytest.mark.parametrize("stage", ["programs", "networks", "first", "rounds", "batch", "never"])
def test_a_time_limit_returns_what_was_measured(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up when a certain stage begins."""
    model = network("ds_mbnet_tiny")
    over: list[bool] = []
    starts = {
        "programs": "program",
        "networks": "batch 2: stand",
        "batch": "batch 3: stand",
        "first": "batch 2: round",
    }

    def progress(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
        for number, item in enumerate(items):
            late = label.startswith("batch 2: round") and stage == "rounds" and number == WARM_UP + 1
            if late or label.startswith(starts.get(stage, "none")):
                over.append(True)
            yield item

    monkeypatch.setattr(TimeLimit, "over", property(lambda self: bool(over)))
    limited = functools.partial(
        bench, model, batches=(2, 3), backend="eager", repeats=4, time_limit=60, progress=progress
    )
    if stage in ("programs", "networks"):
        assert "nothing was measured within the time limit of 60 s" in error_of(limited)
        return
    benched = limited()
    missing = {
        "first": ("3 of 4 rounds of batch 2", "batch 3"),
        "rounds": ("2 of 4 rounds of batch 2", "batch 3"),
        "batch": ("batch 3",),
        "never": (),
    }
    assert benched.missing == missing[stage]
    assert [result.batch for result in benched.results] == ([2, 3] if stage == "never" else [2])
    assert benched.results[0].rounds == {"first": 1, "rounds": 2}.get(stage, 4)
    if benched.missing:
        assert f"missing, for lack of time: {', '.join(benched.missing)}" in bench_text(benched)
    assert benched.to_dict()["missing"] == benched.missing


def test_invalid_time_limits_are_refused() -> None:
    for wrong in (0, -1, True, "5", float("nan")):
        error = error_of(
            lambda wrong=wrong: bench(network("ds_mbnet_tiny"), backend="eager", time_limit=wrong)
        )
        assert "a time limit is a number of seconds above 0" in error


def test_static_networks_beyond_the_time_limit_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(static: StaticNetwork, *args: object, **options: object) -> tuple[Baseline, BucketedProgram]:
        if static.options:
            raise TimeUpError
        program = plan_of("ds_mbnet_tiny", "eager").network.segments[()]
        return Baseline(static.candidate, static.name, "eager", 1), program

    both = static_networks(dsnet.create_model("ds_mbnet", device="meta"))
    monkeypatch.setattr("dsnet.benchmark.api.compile_static", slow)
    monkeypatch.setattr("dsnet.benchmark.api.static_networks", lambda model: both)
    benched = bench(network("ds_mbnet_tiny"), batches=(2,), backend="eager", repeats=1)
    assert benched.missing == ("mobilenet_v1 × 0.5",)
    assert benched.baselines == (Baseline("twin", "mobilenet_v1", "eager", 1),)
    assert "twin" in benched.results[0].times
    assert "mobilenet_v1 (eager)" in table_of(benched)


def test_quick_leaves_out_the_network_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsnet.benchmark.api.QUICK_BACKENDS", {"cpu": ("triton", "eager")})
    benched = bench(network("ds_mbnet_tiny"), batches=(2,), quick=True, repeats=1)
    assert benched.backend == "eager"
    assert not {"masking", "indexing", "slicing", "largest"} & set(benched.results[0].times)
    text = bench_text(benched)
    assert "gated plan" in text
    assert not re.search("^masking", text, re.M)
    assert bench_plot(benched).svg()
