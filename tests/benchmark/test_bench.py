"""The benchmark: each candidate against the network, ideal times by hand, and what the command writes."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.tables import bench_table
from torch import nn

import dsnet
from dsnet import runtime
from dsnet.benchmark.api import WARM_UP, bench
from dsnet.benchmark.candidates import Candidate, Candidates, batches_per_call
from dsnet.benchmark.conditions import _cpu_mhz, conditions
from dsnet.benchmark.results import Baseline, BenchResult
from dsnet.benchmark.static_baselines import StaticNetwork, compile_static, static_networks
from dsnet.benchmark.workloads import CASCADE_SHARE, Mix, mix_of
from dsnet.cli import main
from dsnet.cli.parsers.common import seconds as parse_seconds
from dsnet.core.cuda_graphs import StreamPool
from dsnet.core.timer import TimeLimit, TimeUpError
from dsnet.counts import human
from dsnet.errors import DsnetError
from dsnet.report.bench import bench_page, bench_plot, bench_text
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors.grouped import GroupedExecutor
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork
from dsnet.runtime.forced_routes import sample_routes
from dsnet.runtime.partition.segments import pack
from tests.support import assert_close, error_of
from tests.support.bench_result import MIXED, bench_result
from tests.support.networks import network, plan_of

BATCH = 6


def candidates_of(
    model: dsnet.Supernet, compiled: CompiledNetwork, mix: Mix, batch: int = BATCH
) -> tuple[dict[str, Candidate], torch.Tensor]:
    """All candidates at a batch size, and the images that they run."""
    x = torch.randn(batch, *compiled.image_shape, generator=torch.Generator().manual_seed(0))
    return Candidates(model, compiled, mix, {}).at(batch), x.to(compiled.precision)


def run(candidate: Candidate) -> Any:  # noqa: ANN401
    return candidate.run()


def logits_at(model: dsnet.Supernet, x: torch.Tensor, routes: list[int]) -> torch.Tensor:
    """The logits of each image at its route, one by one."""
    return torch.cat([model(x[i : i + 1], route) for i, route in enumerate(routes)])


def table_of(result: BenchResult) -> str:
    """The table of the documents, from the JSON file of a result."""
    plain = json.loads(json.dumps(result.to_dict()))
    return bench_table("x", {"machine": "here", "date": "today", **plain})


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny"])
@torch.no_grad()
def test_every_candidate_computes_the_logits_of_the_images_routes(name: str) -> None:
    model = network(name)
    candidates, x = candidates_of(model, plan_of(name, "eager").network, MIXED)
    batches = candidates["gated"].batches
    routes = sample_routes(MIXED.shares, batches * BATCH)
    for key in ("gated", "slicing", "indexing"):
        outputs = run(candidates[key])
        assert len(outputs) == batches
        for number, output in enumerate(outputs):
            expected = logits_at(model, x, routes[number * BATCH : (number + 1) * BATCH])
            assert_close(output.logits, expected, 1e-4)
    assert_close(run(candidates["masking"]), logits_at(model, x, routes[:BATCH]), 1e-4)
    for key in ("largest", "full"):
        assert_close(run(candidates[key]), model(x, model.space.largest), 1e-4)
    steps = sample_routes(MIXED.cascade.final_shares, batches * BATCH)
    for number, output in enumerate(run(candidates["cascade"])):
        final = [MIXED.cascade.routes[step] for step in steps[number * BATCH : (number + 1) * BATCH]]
        assert sorted(output.routes.tolist()) == sorted(final)
        assert_close(output.logits, logits_at(model, x, output.routes.tolist()), 1e-4)
    for route in (0, 1, 3):
        assert_close(run(candidates[f"alone {route}"])[0], model(x, route), 1e-4)
    for route in (1, 3):
        assert_close(run(candidates[f"suffix {route}"]), model(x, route), 1e-4)


@torch.no_grad()
def test_grouped_graphs_take_the_same_routes() -> None:
    model, compiled = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", "eager").network
    image = torch.zeros(1, 3, *compiled.image_size)
    choices = model.gate(0).choices
    segments = pack(model, [choices])
    calls = {key: get_backend("eager").convert(s.module, image)(image) for key, s in segments.items()}
    executor = GroupedExecutor(
        calls, image=image, space=model.space, scored=[choices], sizes=(1, BATCH), streams=StreamPool()
    )
    candidates, x = candidates_of(model, dataclasses.replace(compiled, graph_executor=executor), MIXED)
    routes = sample_routes(MIXED.shares, candidates["gated"].batches * BATCH)
    gated = run(candidates["gated"])
    assert torch.cat([output.routes for output in gated]).tolist() == routes
    assert_close(gated[0].logits, logits_at(model, x, routes[:BATCH]), 1e-4)
    steps = sample_routes(MIXED.cascade.final_shares, candidates["cascade"].batches * BATCH)
    for number, output in enumerate(run(candidates["cascade"])):
        final = [MIXED.cascade.routes[step] for step in steps[number * BATCH : (number + 1) * BATCH]]
        assert sorted(output.routes.tolist()) == sorted(final), "the same number of images at each route"
    run(candidates["alone 0"])


@torch.no_grad()
def test_single_images_run_the_stand_alone_networks_in_turn() -> None:
    model, compiled = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", "eager").network
    candidates, _ = candidates_of(model, compiled, MIXED, batch=1)
    routes = sample_routes(MIXED.shares, candidates["in turn"].batches)
    for route, (logits,) in zip(routes, run(candidates["in turn"]), strict=True):
        assert_close(logits, run(candidates[f"alone {route}"])[0], 1e-6)


def test_a_call_runs_several_small_batches_so_that_all_routes_occur() -> None:
    few, many = mix_of(network("ds_mbnet_tiny"), "uniform"), mix_of(network("ds_resnet_tiny"), "uniform")
    assert [batches_per_call(few, batch) for batch in (1, 4, 8, 32)] == [20, 5, 2, 1]
    assert [batches_per_call(many, batch) for batch in (1, 7, 12, 32)] == [20, 3, 2, 1]


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


def test_json_has_the_keys_of_committed_results() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "bench-mbnet-triton-baselines-h200.json"
    committed = json.loads(path.read_text(encoding="utf-8"))
    provenance = {
        "benchmark",
        "machine",
        "python",
        "date",
        "version",
        "commit",
        "commit_of",
        "dirty",
        "command",
    }
    plain = json.loads(json.dumps(bench_result().to_dict()))
    assert set(plain) == set(committed) - provenance
    assert set(plain["results"][0]) == set(committed["results"][0])
    assert set(plain["baselines"][0]) == set(committed["baselines"][0])
    assert plain["results"][0]["times"]["full"] == {"median": 10.0, "low": 9.0, "high": 11.0}
    assert plain["baselines"][0]["way"] == "twin"
    assert (plain["twin"], plain["twin_backend"]) == ("mobilenet_v1", "onnxruntime")


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
            run(candidates[key])
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


# --- static networks, and conditions ---------------------------------------------------------------------
def test_static_networks_are_those_of_the_family() -> None:
    names = ("ds_mbnet", "ds_resnet_plus", "ds_vit_plus", "ds_mbnet_cifar")
    networks = [static_networks(dsnet.create_model(name, device="meta")) for name in names]
    assert [[static.name for static in group] for group in networks] == [
        ["mobilenet_v1", "mobilenet_v1 × 0.5"],
        ["resnet50"],
        ["deit"],
        [],
    ]


def test_the_half_width_mobilenet_has_the_papers_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = plan_of("ds_mbnet_tiny", "eager").network
    compiled = dataclasses.replace(compiled, image_size=(224, 224))
    monkeypatch.setattr(
        "dsnet.benchmark.static_baselines.bucketed_programs", lambda *args, **options: compiled.segments
    )
    monkeypatch.setattr("dsnet.benchmark.static_baselines._milliseconds_per_image", lambda *args: 1.0)
    half = StaticNetwork("half", "mobilenet_v1", {"width": 0.5})
    baseline, _ = compile_static(half, compiled, (1,), any_backend=False)
    assert baseline == Baseline("half", "mobilenet_v1 × 0.5", "eager", baseline.madds)
    assert baseline.madds == pytest.approx(149.5e6, rel=1e-3)


def test_static_networks_run_on_the_fastest_backend_or_on_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = [name for name in ("eager", "onnxruntime") if _usable(name)]
    monkeypatch.setattr("dsnet.benchmark.static_baselines.list_backends", lambda: usable)
    small = nn.Sequential(nn.Conv2d(3, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    monkeypatch.setattr("dsnet.benchmark.static_baselines.create_model", lambda name: small)
    monkeypatch.setattr("dsnet.benchmark.static_baselines.madds", lambda module, image_size: 1)
    speed = {"eager": 3.0, "onnxruntime": 1.0}
    timed = []

    def pretend(*args: object) -> float:
        name = usable[len(timed)]
        timed.append(name)
        return speed[name]

    monkeypatch.setattr("dsnet.benchmark.static_baselines._milliseconds_per_image", pretend)
    compiled, static = plan_of("ds_mbnet_tiny", "eager").network, StaticNetwork("twin", "small", {})
    baseline, program = compile_static(static, compiled, (2,), any_backend=True, buckets=(1,))
    assert timed == usable
    assert baseline.backend == min(usable, key=lambda name: speed[name])
    x = torch.randn(2, 3, *compiled.image_size, generator=torch.Generator().manual_seed(0))
    assert_close(program(x)[0], small(x), 1e-4)
    timed.clear()
    baseline, _ = compile_static(static, compiled, (2,), any_backend=False, buckets=(1,))
    assert (baseline.backend, timed) == ("eager", ["eager"])


def _usable(name: str) -> bool:
    return get_backend(name).unavailable(torch.device("cpu"), torch.float32) is None


def test_clocks_are_read_where_the_machine_reports_them(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor: 0\ncpu MHz\t\t: 2400.5\nprocessor: 1\ncpu MHz\t\t: 3000.5\n", encoding="utf-8"
    )
    assert _cpu_mhz(file) == 2700.5
    file.write_text("processor: 0\n", encoding="utf-8")
    assert _cpu_mhz(file) is None
    assert _cpu_mhz(tmp_path / "nowhere") is None
    now = conditions(torch.device("cpu"), (0.5, 0.4, 0.3))
    assert (now.threads, now.load, now.gpu_mhz) == (torch.get_num_threads(), (0.5, 0.4, 0.3), None)


# --- output ----------------------------------------------------------------------------------------------


def test_the_table_states_times_ratios_and_conditions() -> None:
    text = bench_text(bench_result())
    lines = [line.split() for line in text.splitlines()]
    assert ["masking", "20.00", "18.00", "to", "22.00", "200%"] in lines
    assert ["largest,", "no", "plan", "30.00", "27.00", "to", "33.00", "300%"] in lines
    assert ["gated", "plan", "80.00", "72.00", "to", "88.00", "50%", "0.80"] in lines
    assert ["gated:", "multiply-adds", "25%"] in lines
    assert ["gated:", "ideal", "64.00", "40%"] in lines
    assert ["cascade", "plan", "8.00", "7.20", "to", "8.80", "80%", "0.75"] in lines
    assert ["mobilenet_v1", "(onnxruntime)", "9.00", "8.10", "to", "9.90", "90%"] in lines
    assert "2 threads, 2450 MHz (CPU), load 1.50 before" in text
    assert "a test: 50% at 0 (1.00k), 25% at 1 (2.00k), 25% at 3 (4.00k)" in text
    assert "route 0 for all images, then route 1 for 50%, then route 3 for 25%" in text
    many = dataclasses.replace(MIXED, shares=dict.fromkeys(range(20), 1 / 20))
    assert "20 from 0 to 19, at most 5%" in bench_text(dataclasses.replace(bench_result(), mix=many))


def test_the_plot_shows_theory_ideal_and_measured_time_by_batch() -> None:
    plot = bench_plot(bench_result()).svg("A <fast> one")
    heights = [float(h) for h in re.findall(r'class="bar".*? height="([\d.]+)"', plot)]
    assert len(heights) == 6
    assert heights[:3] == heights[3:], "the same shares at both batch sizes"
    theory, ideal, measured = heights[:3]
    assert (ideal / theory, measured / theory) == (pytest.approx(1.6, 0.01), pytest.approx(2.0, 0.01))
    assert "measured time, batch 16: 50.0%" in plot
    assert "A &lt;fast&gt; one" in plot
    shown = bench_page(bench_result())
    assert shown.count("<svg") == 2  # for wide pages and for narrow ones
    assert shown.count("<table>") == 2
    assert "<td>mobilenet_v1 (onnxruntime)</td>" in shown


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
