"""The benchmark of plans: every way against the network, ideals by hand, a table, a file and a picture."""

from __future__ import annotations

import argparse
import copy
import dataclasses
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
from dsnet.benchmark.candidates import Others, Ways, batches_for, make_ways
from dsnet.benchmark.conditions import _cpu_mhz, conditions
from dsnet.benchmark.static_network import Baseline, Static, baselines, static_network, twin_name
from dsnet.benchmark.workloads import CASCADE_SHARE, Mix, mix_of
from dsnet.cli import main
from dsnet.cli.parsers.common import seconds as parse_seconds
from dsnet.core.cuda_graphs import StreamPool
from dsnet.core.time_limit import TimeLimit, TimeUpError
from dsnet.counts import human
from dsnet.errors import DsnetError
from dsnet.report.bench import bench_page, bench_plot, bench_text
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors.grouped import GroupedExecutor
from dsnet.runtime.executors.host import CompiledNetwork
from dsnet.runtime.forced_routes import decisions
from dsnet.runtime.partition.segments import pack
from tests.support import assert_close, error_of
from tests.support.bench_result import MIXED, made_up
from tests.support.networks import network, plan_of

BATCH = 6


def ways_of(
    model: dsnet.Supernet, compiled: CompiledNetwork, mix: Mix, batch: int = BATCH
) -> tuple[Ways, torch.Tensor]:
    """All ways, and the images that they run."""
    shape = (batch, 3, *compiled.image_size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(compiled.precision)
    return make_ways(model, compiled, mix, batch, {}, Others(model, compiled, mix)), x


def answers(model: dsnet.Supernet, x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """Every image at its route, one by one."""
    return torch.cat([model(x[i : i + 1], number) for i, number in enumerate(numbers)])


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny"])
@torch.no_grad()
def test_every_way_gives_images_what_their_routes_say(name: str) -> None:
    model = network(name)
    ways, x = ways_of(model, plan_of(name, "eager").network, MIXED)
    batches = ways.batches["gated"]
    drawn = decisions(MIXED.shares, batches * BATCH)
    for way in ("gated", "slicing", "indexing"):
        found: Any = ways.calls[way]()
        assert len(found) == batches
        for number, output in enumerate(found):
            expected = answers(model, x, drawn[number * BATCH : (number + 1) * BATCH])
            assert_close(output.logits, expected, 1e-4)
    largest: Any = ways.calls["largest"]()
    assert_close(largest, model(x, model.space.largest), 1e-4)
    masked: Any = ways.calls["masking"]()
    assert_close(masked, answers(model, x, drawn[:BATCH]), 1e-4)
    ends = decisions(MIXED.cascade.answered, batches * BATCH)
    cascade: Any = ways.calls["cascade"]()
    for number, output in enumerate(cascade):
        reached = [MIXED.cascade.routes[end] for end in ends[number * BATCH : (number + 1) * BATCH]]
        assert sorted(output.routes.tolist()) == sorted(reached)
        assert_close(output.logits, answers(model, x, output.routes.tolist()), 1e-4)
    for number in (0, 1, 3):
        alone: Any = ways.calls[f"alone {number}"]()
        assert_close(alone[0], model(x, number), 1e-4)
    for number in (1, 3):
        behind: Any = ways.calls[f"suffix {number}"]()
        assert_close(behind, model(x, number), 1e-4)
    full: Any = ways.calls["full"]()
    assert_close(full, model(x, model.space.largest), 1e-4)


@torch.no_grad()
def test_recorded_programs_take_the_same_routes() -> None:
    model, compiled = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", "eager").network
    image = torch.zeros(1, 3, *compiled.image_size)
    own = model.gate(0).choices
    parts = pack(model, [own])
    calls = {h: get_backend("eager").convert(p.module, image)(image) for h, p in parts.items()}
    executor = GroupedExecutor(
        calls, image=image, space=model.space, scored=[own], sizes=(1, BATCH), streams=StreamPool()
    )
    ways, x = ways_of(model, dataclasses.replace(compiled, graph_executor=executor), MIXED)
    drawn = decisions(MIXED.shares, ways.batches["gated"] * BATCH)
    found: Any = ways.calls["gated"]()
    assert torch.cat([output.routes for output in found]).tolist() == drawn
    assert_close(found[0].logits, answers(model, x, drawn[:BATCH]), 1e-4)
    ends = decisions(MIXED.cascade.answered, ways.batches["cascade"] * BATCH)
    cascade: Any = ways.calls["cascade"]()
    for number, output in enumerate(cascade):
        wanted = [MIXED.cascade.routes[end] for end in ends[number * BATCH : (number + 1) * BATCH]]
        assert sorted(output.routes.tolist()) == sorted(wanted), "so many of each, whoever they are"
    ways.calls["alone 0"]()


@torch.no_grad()
def test_single_images_meet_networks_in_turn() -> None:
    model, compiled = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", "eager").network
    ways = make_ways(model, compiled, MIXED, 1, {}, Others(model, compiled, MIXED))
    found: Any = ways.calls["in turn"]()
    drawn = decisions(MIXED.shares, ways.batches["in turn"])
    for number, (logits,) in zip(drawn, found, strict=True):
        alone: Any = ways.calls[f"alone {number}"]()
        assert_close(logits, alone[0], 1e-6)


def test_a_small_batch_meets_the_mix_in_several() -> None:
    few, many = mix_of(network("ds_mbnet_tiny"), "uniform"), mix_of(network("ds_resnet_tiny"), "uniform")
    assert [batches_for(few, batch) for batch in (1, 4, 8, 32)] == [20, 5, 2, 1]
    assert [batches_for(many, batch) for batch in (1, 7, 12, 32)] == [20, 3, 2, 1]


def test_ideal_ratio_and_theory_are_what_they_say() -> None:
    model = network("ds_mbnet_tiny")
    found = bench(model, batches=(1, 6), mix={0: 0.75, 3: 0.25}, backend="eager", repeats=2)
    cost = {number: dsnet.madds(model, number) for number in (0, 3)}
    assert found.theory == pytest.approx(cost[3] / (0.75 * cost[0] + 0.25 * cost[3]))
    for result in found.results:
        ms = {way: spread.median for way, spread in result.times.items()}
        assert result.ideal == pytest.approx(0.75 * ms["alone 0"] + 0.25 * ms["alone 3"])
        assert result.ideal_cascade == pytest.approx(ms["alone 0"] + CASCADE_SHARE * ms["suffix 3"])
        assert result.ratio == pytest.approx(result.ideal / ms["gated"])
        assert result.ratio_stream == pytest.approx(result.ideal / ms["stream"])
        assert result.speedup == pytest.approx(ms["full"] / ms["gated"])
        assert all(0 < spread.low <= spread.median <= spread.high for spread in result.times.values())
        assert {"masking", "indexing", "slicing"} <= set(ms)
        assert ("in turn" in ms) == (result.batch == 1)
    plain = json.loads(json.dumps(found.to_dict()))
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
    ms = {way: spread.median for way, spread in result.times.items()}
    assert {way for way in ms if way.startswith("alone")} == {"alone 0", "alone 7", "alone 15"}
    assert result.ideal == pytest.approx(0.25 * ms["alone 0"] + 0.5 * ms["alone 7"] + 0.25 * ms["alone 15"])
    assert "gates do not decide" in error_of(lambda: bench(narrowed(model), mix=mix, backend="eager"))


def narrowed(model: dsnet.Supernet) -> dsnet.Supernet:
    fewer = dsnet.create_model(model.name).eval()
    for stage in range(len(fewer.gates)):
        fewer.gate(stage).replace_routing((0, 1))
    return fewer


def test_the_largest_route_of_a_narrowed_gate_is_timed_beside_that_of_the_network() -> None:
    """What this gate can never take is no measure of what routing saves."""
    model = copy.deepcopy(network("ds_mbnet_tiny"))
    model.reset_routing(model.space.narrow([0, 1]))
    found = bench(model, batches=(2,), backend="eager", repeats=1)
    (result,) = found.results
    assert (found.largest, found.gate_largest) == (3, 1)
    assert result.speedup_gate == pytest.approx(
        result.times["gate largest"].median / result.times["gated"].median
    )
    plain = json.loads(json.dumps(found.to_dict()))
    assert (plain["largest"], plain["gate_largest"]) == (3, 1)
    assert plain["madds"] == {str(number): dsnet.madds(model, number) for number in (0, 1, 3)}
    text = bench_text(found)
    assert "largest of the gate (route 1)" in text
    assert f"50% at 0 ({human(plain['madds']['0'])})" in text
    table = bench_table("x", {**plain, "date": "today"})
    assert "route 1 (gate's largest)" in table
    compiled = runtime.compile(model, backend="eager", routes=[0, 1, 3]).network
    ways = make_ways(model, compiled, found.mix, 2, {}, None)
    ran: list[int] = []
    run_route = CompiledNetwork.run_route
    with mock.patch.object(
        CompiledNetwork,
        "run_route",
        lambda self, x, route: (ran.append(route.number), run_route(self, x, route))[1],
    ):
        for way in ("gate largest", "full"):
            ways.calls[way]()
    assert ran == [1, 3]
    whole = bench(network("ds_mbnet_tiny"), batches=(2,), backend="eager", repeats=1)
    assert "gate largest" not in whole.results[0].times
    assert whole.results[0].speedup_gate == whole.results[0].speedup


@pytest.mark.parametrize("stage", ["programs", "networks", "first", "rounds", "batch", "never"])
def test_a_time_limit_ends_with_what_was_measured(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over when a certain stage begins, wherever that is."""
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
            late = label.startswith("batch 2: round") and stage == "rounds" and number == WARM_UP + 2
            if late or label.startswith(starts.get(stage, "none")):
                over.append(True)
            yield item

    monkeypatch.setattr(TimeLimit, "over", property(lambda self: bool(over)))
    ask = lambda: bench(  # noqa: E731
        model, batches=(2, 3), backend="eager", repeats=4, time_limit=60, progress=progress
    )
    if stage in ("programs", "networks"):
        assert "nothing was measured within the time limit of 60 s" in error_of(ask)
        return
    found = ask()
    missing = {
        "first": ("3 of 4 rounds of batch 2", "batch 3"),
        "rounds": ("2 of 4 rounds of batch 2", "batch 3"),
        "batch": ("batch 3",),
        "never": (),
    }
    assert found.missing == missing[stage]
    assert [result.batch for result in found.results] == ([2, 3] if stage == "never" else [2])
    assert found.results[0].rounds == {"first": 1, "rounds": 2}.get(stage, 4)
    if found.missing:
        assert f"missing, for lack of time: {', '.join(found.missing)}" in bench_text(found)
    assert found.to_dict()["missing"] == found.missing


def test_what_is_no_time_limit() -> None:
    for wrong in (0, -1, True, "5", float("nan")):
        error = error_of(
            lambda wrong=wrong: bench(network("ds_mbnet_tiny"), backend="eager", time_limit=wrong)
        )
        assert "a time limit is a number of seconds above 0" in error


def test_static_networks_that_there_is_no_time_for_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(name: str, *args: object, **more: Any) -> Static:  # noqa: ANN401
        if more["options"]:
            raise TimeUpError
        return Static(name, "eager", plan_of("ds_mbnet_tiny", "eager").network.segments[()], 1)

    both = [Baseline("mobilenet_v1", {}), Baseline("mobilenet_v1", {"width": 0.5})]
    monkeypatch.setattr("dsnet.benchmark.api.static_network", slow)
    monkeypatch.setattr("dsnet.benchmark.api.baselines", lambda model: both)
    found = bench(network("ds_mbnet_tiny"), batches=(2,), backend="eager", repeats=1)
    assert found.missing == ("mobilenet_v1 × 0.5",)
    assert [(own.way, own.name, own.backend) for own in found.baselines] == [
        ("twin", "mobilenet_v1", "eager")
    ]
    assert "twin" in found.results[0].times
    assert "mobilenet_v1 (eager)" in bench_table("x", {**found.to_dict(), "date": "today"})


def test_quick_leaves_out_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsnet.benchmark.api.QUICK_BACKENDS", {"cpu": ("triton", "eager")})
    found = bench(network("ds_mbnet_tiny"), batches=(2,), quick=True, repeats=1)
    assert found.backend == "eager"
    assert not {"masking", "indexing", "slicing", "largest"} & set(found.results[0].times)
    text = bench_text(found)
    assert "gated plan" in text
    assert not re.search("^masking", text, re.M)
    assert bench_plot(found).svg()


# --- the static network, and the machine ---------------------------------------------------------------
def test_the_static_network_is_of_the_family() -> None:
    names = ("ds_mbnet", "ds_resnet_plus", "ds_vit_plus", "ds_mbnet_cifar")
    twins = [twin_name(dsnet.create_model(name, device="meta")) for name in names]
    assert twins == ["mobilenet_v1", "resnet50", "deit", None]


def test_a_mobilenet_at_half_width_is_a_baseline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        n: [b.name for b in baselines(dsnet.create_model(n, device="meta"))]
        for n in ("ds_mbnet", "ds_resnet")
    }
    assert found == {"ds_mbnet": ["mobilenet_v1", "mobilenet_v1 × 0.5"], "ds_resnet": ["resnet50"]}
    compiled = dataclasses.replace(plan_of("ds_mbnet_tiny", "eager").network, image_size=(224, 224))
    monkeypatch.setattr(
        "dsnet.benchmark.static_network._timed", lambda *args: {"eager": (1.0, compiled.segments[()])}
    )
    half = static_network("mobilenet_v1", compiled, (1,), any_backend=False, options={"width": 0.5})
    assert (half.name, half.madds) == ("mobilenet_v1 × 0.5", pytest.approx(149.5e6, rel=1e-3))


def test_the_static_network_runs_on_the_fastest_backend_or_on_the_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usable = [name for name in ("eager", "onnxruntime") if _works(name)]
    monkeypatch.setattr("dsnet.benchmark.static_network.list_backends", lambda: usable)
    small = nn.Sequential(nn.Conv2d(3, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    monkeypatch.setattr("dsnet.benchmark.static_network.create_model", lambda name: small)
    speed = {"eager": 3.0, "onnxruntime": 1.0}
    seen = []

    def pretend(run: object, *args: object) -> float:
        name = usable[len(seen)]
        seen.append(name)
        return speed[name]

    monkeypatch.setattr("dsnet.benchmark.static_network._an_image", pretend)
    compiled = plan_of("ds_mbnet_tiny", "eager").network
    found = static_network("mobilenet_v1", compiled, (2,), any_backend=True, buckets=(1,))
    assert seen == usable
    assert found.backend == min(usable, key=lambda name: speed[name])
    x = torch.randn(2, 3, *compiled.image_size, generator=torch.Generator().manual_seed(0))
    assert_close(found.run(x)[0], small(x), 1e-4)
    seen.clear()
    assert static_network("mobilenet_v1", compiled, (2,), any_backend=False, buckets=(1,)).backend == "eager"
    assert seen == ["eager"]


def _works(name: str) -> bool:
    return get_backend(name).unavailable(torch.device("cpu"), torch.float32) is None


def test_clocks_are_stated_where_the_machine_says_them(tmp_path: Path) -> None:
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


# --- what people see -------------------------------------------------------------------------------------


def test_the_table_says_what_was_measured_and_where() -> None:
    text = bench_text(made_up())
    lines = [line.split() for line in text.splitlines()]
    assert ["masking", "20.00", "18.00", "to", "22.00", "200%"] in lines
    assert ["largest,", "no", "plan", "30.00", "27.00", "to", "33.00", "300%"] in lines
    assert ["gated", "plan", "80.00", "72.00", "to", "88.00", "50%", "0.80"] in lines
    assert ["gated:", "multiply-adds", "25%"] in lines
    assert ["gated:", "ideal", "64.00", "40%"] in lines
    assert ["cascade", "plan", "8.00", "7.20", "to", "8.80", "80%", "0.75"] in lines
    assert ["mobilenet_v1", "(onnxruntime)", "9.00", "8.00", "to", "10.00", "90%"] in lines
    assert "2 threads, 2450 MHz (CPU), load 1.50 before" in text
    assert "a test: 50% at 0, 25% at 1, 25% at 3" in text
    assert "route 0 for all images, then route 1 for 50%, then route 3 for 25%" in text
    many = dataclasses.replace(MIXED, shares=dict.fromkeys(range(20), 1 / 20))
    assert "20 from 0 to 19, at most 5%" in bench_text(dataclasses.replace(made_up(), mix=many))


def test_the_picture_shows_theory_ideal_and_measured_by_batch() -> None:
    picture = bench_plot(made_up()).svg("A <fast> one")
    heights = [float(h) for h in re.findall(r'class="bar".*? height="([\d.]+)"', picture)]
    assert len(heights) == 6
    assert heights[:3] == heights[3:], "the same shares at both batch sizes"
    theory, ideal, measured = heights[:3]
    assert (ideal / theory, measured / theory) == (pytest.approx(1.6, 0.01), pytest.approx(2.0, 0.01))
    assert "measured time, batch 16: 50.0%" in picture
    assert "A &lt;fast&gt; one" in picture
    shown = bench_page(made_up())
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
def test_times_are_written_in_seconds_minutes_and_hours(text: str, seconds: float) -> None:
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
        (["--out", "no/such/folder/x.json"], "in a folder that is there"),
        (["--plot", "no/such/folder/x.svg"], "--plot takes a file in a folder that is there"),
        (["--plot", "x.png"], "writes .svg or .html"),
        (["--router", "gate"], "are for --mix measured"),
    ],
)
def test_what_cannot_be_benched(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "ds_mbnet_tiny", "--repeats", "1", "--batch", "1", "--backend", "eager", *words]) == 2
    )
    assert says in capsys.readouterr().err


def test_help_shows_how(capsys: pytest.CaptureFixture[str]) -> None:
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
