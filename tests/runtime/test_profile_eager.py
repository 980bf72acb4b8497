"""Measuring puts every time in its place; `dsnet profile` shows and writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dsnet
from dsnet.cli import main
from dsnet.routing import CostTable, LatencyTable
from dsnet.runtime import profile as profiling
from dsnet.runtime.profile import profile
from dsnet.training import save_checkpoint
from tests.support import error_of

NAMES = ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured() -> dict[str, LatencyTable]:
    """Profile every tiny network in training mode and check that it is unchanged."""
    tables = {}
    for name in NAMES:
        model = dsnet.create_model(name).train()
        model.head.eval()
        flags = {key: module.training for key, module in model.named_modules()}
        state = {key: value.clone() for key, value in model.state_dict().items()}
        drawn = torch.get_rng_state()
        tables[name] = profile(model, batches=(3, 1), repeats=2)
        assert torch.equal(drawn, torch.get_rng_state())
        assert {key: module.training for key, module in model.named_modules()} == flags
        after = model.state_dict()
        assert list(after) == list(state)
        assert all(torch.equal(after[key], value) for key, value in state.items())
    return tables


@pytest.mark.parametrize("name", NAMES)
def test_every_segment_has_a_time(name: str, measured: dict[str, LatencyTable]) -> None:
    table, model = measured[name], dsnet.create_model(name)
    assert table.batches == (1, 3)
    for batch in table.batches:
        times = table.at(batch)
        parts = [times.prefix, *(t for gate in times.segments for row in gate for t in row)]
        assert all(0 < t.p50 <= t.p95 for t in parts)
        assert table.costs(batch).fits(model)
        for route in model.space:
            assert table.costs(batch).of(route.choices) == pytest.approx(times.of(route.choices).p50 / batch)
    assert (table.model, table.image_size, table.dtype) == (model.spec, (16, 16), "float32")
    assert (table.kind, table.backend, table.memory) == ("cpu", "eager", "shared")
    assert (table.threads, table.backend_version) == (torch.get_num_threads(), torch.__version__)
    assert LatencyTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    table.check(model, CPU)


@pytest.mark.parametrize("name", [*NAMES, "ds_resnet_cifar"])  # the last one has four gates
def test_every_time_belongs_to_its_segment_and_calls_alternate(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock returns multiply-adds, so the table must equal the computed one."""
    model = dsnet.create_model(name, dtype=torch.float64)
    expected = CostTable.of_model(model, 32)
    ran: list[tuple[int, ...]] = []

    def clock(call: Any, device: torch.device) -> float:  # noqa: ANN401  (a partial)
        history = () if call.func.__name__ == "run_prefix" else call.args[1]
        if history not in ran:
            result = call()
            if len(history) == len(model.gates):
                assert result.shape == (2, 10)
            else:
                assert result.gate == len(history)
                assert result.x.shape[0] == 2
        ran.append(history)
        if ran.count(()) <= profiling.WARM_UP:
            return 1e15
        previous = history[-2] if len(history) > 1 else None
        return expected.segment(len(history) - 1, previous, history[-1]) if history else expected.prefix

    monkeypatch.setattr(profiling, "timed_on_device", clock)
    seen: list[tuple[int, str]] = []

    def watch(items: Any, total: int, label: str) -> Any:  # noqa: ANN401  (as it came)
        seen.append((total, label))
        return items

    table = profile(model, batches=(2,), repeats=2, image_size=32, progress=watch)
    assert table.at(2).prefix.p50 == expected.prefix
    assert [[[t.p95 for t in row] for row in gate] for gate in table.at(2).segments] == [
        [list(row) for row in gate] for gate in expected.segments
    ]
    sizes = [len(row) for row in model.slice_table]
    parts = 1 + sum(size * before for size, before in zip(sizes, (1, *sizes), strict=False))
    rounds = profiling.WARM_UP + 2
    assert seen == [(rounds, "batch 2: round")]
    assert len(set(ran)) == parts
    assert ran == ran[:parts] * rounds
    assert (table.image_size, table.dtype) == ((32, 32), "float64")


def test_statistics_of_one_route_are_enough() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model.train()(x, 1)
    model.eval()
    assert "recalibrate" in error_of(lambda: model(x, 0))
    states = [model.key_states(route) for route in model.space]
    assert profile(model, repeats=1).costs().fits(model)
    assert [model.key_states(route) for route in model.space] == states


def test_the_largest_route_takes_longer_than_the_smallest() -> None:
    model = dsnet.create_model("ds_mbnet_cifar")
    times = profile(model, batches=(4,), repeats=5).at(4)
    small, large = (times.of(route.choices).p50 for route in (model.space.smallest, model.space.largest))
    assert large > 1.2 * small  # 4.5 times the multiply-adds


def test_settings_that_cannot_be_profiled() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    assert "batches must be positive integers, not none" in error_of(lambda: profile(model, batches=()))
    assert "not 4, 0" in error_of(lambda: profile(model, batches=(4, 0)))
    assert "not '4'" in error_of(lambda: profile(model, batches=("4",)))  # type: ignore[arg-type]
    assert "repeats must be" in error_of(lambda: profile(model, repeats=0))
    assert "the nearest that runs is 16 × 16" in error_of(lambda: profile(model, image_size=17))
    meta = dsnet.create_model("ds_mbnet_tiny", device="meta")
    assert "on meta cannot be timed; move it to cpu or cuda" in error_of(lambda: profile(meta))


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = dsnet.create_model("ds_resnet_cifar", device="cuda")
    table = profile(model, batches=(1, 4096), repeats=10)  # 256 images are bound by launches
    assert (table.kind, table.device) == ("cuda", torch.cuda.get_device_name())
    table.check(model, torch.device("cuda"))
    small, large = (
        table.at(4096).of(route.choices).p50 for route in (model.space.smallest, model.space.largest)
    )
    assert large > 1.5 * small > 0
    assert "not cpu" in error_of(lambda: table.check(model, CPU))


# --- the command -----------------------------------------------------------------------------------------
def test_the_command_shows_every_route_and_writes_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "latency.json"
    args = ["profile", "ds_resnet_tiny", "--set", "num_classes=7", "--batch", "2", "1", "--repeats", "2"]
    assert main([*args, "--device", "cpu", "--out", str(out)]) == 0
    text, progress = capsys.readouterr()
    table, model = LatencyTable.load(out), dsnet.create_model("ds_resnet_tiny", num_classes=7)
    assert table.batches == (1, 2)
    table.check(model, CPU)
    assert progress == ""  # no terminal
    assert f"wrote {out}" in text
    for batch in (1, 2):
        block = text.split(f"\nbatch {batch}\n")[1].split("\n\n")[0]
        rows = re.findall(r"^ +(\d+) +(\d) (\d) +(\S+) +([\d.]+) +([\d.]+)  █+ (\d+)%$", block, re.M)
        assert [int(row[0]) for row in rows] == list(range(16))
        for number, first, second, madds, p50, p95, _ in rows:
            time = table.at(batch).of((int(first), int(second)))
            assert float(p50) == pytest.approx(time.p50 / batch, abs=6e-4)
            assert float(p95) == pytest.approx(time.p95 / batch, abs=6e-4)
            assert madds == dsnet.counts.human(dsnet.madds(model, int(number)))
        assert max(int(row[-1]) for row in rows) == 100
    assert "sum of its segments' medians" in " ".join(text.split())


def test_threads_are_restored_after_profiling(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [3]  # not the real ones: two threads on a busy machine may take a hundred times as long
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    args = ["profile", "ds_mbnet_tiny", "--repeats", "1", "--device", "cpu", "--json"]
    assert main([*args, "--threads", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["threads"] == 1
    assert main([*args, "--threads", "1", "--image-size", "17"]) == 2
    assert counts == [3, 1, 3, 1, 3]


def test_the_command_takes_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny", num_classes=5)
    save_checkpoint(tmp_path, "last", model, step=1, data={"recipe": {"data": {"size": 24}}})
    args = ["profile", str(tmp_path), "--repeats", "1", "--device", "cpu", "--json"]
    assert main(args) == 0
    table = LatencyTable.from_dict(json.loads(capsys.readouterr().out))
    assert (table.model, table.image_size) == (model.spec, (24, 24))  # what it was trained at
    assert main([*args, "--image-size", "16x32"]) == 0
    assert json.loads(capsys.readouterr().out)["image_size"] == [16, 32]
    assert main([*args, "--precision", "bfloat16"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"
    assert main([*args, "--set", "num_classes=7"]) == 2
    assert "has its options already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ds_mbnt"], ["'ds_mbnt'", "did you mean ds_mbnet", "no folder of that name"]),
        (["resnet50"], ["resnet50 is a static network"]),
        (["runs/nothing"], ["no folder runs/nothing", "dsnet train"]),
        (["{folder}"], ["{folder} has no checkpoint"]),
        (["ds_mbnet_tiny", "--out", "{folder}"], ["--out", "{folder}"]),
        (["ds_mbnet_tiny", "--out", "{folder}/no/table.json"], ["--out", "{folder}/no/table.json"]),
        (["ds_mbnet_tiny", "--set", "colour=red"], ["colour", "num_classes"]),
        (["ds_mbnet_tiny", "--image-size", "17"], ["17 × 17", "16 × 16"]),
        (["ds_mbnet_tiny", "--threads", "100000"], ["100000", "cores"]),
        (["ds_mbnet_tiny", "--backend", "tensorrt"], ["tensorrt", "eager", "openvino"]),
        (["ds_mbnet_tiny", "--device", "tpu"], ["'tpu'", "auto, cpu, cuda"]),
    ],
)
def test_the_command_reports_errors(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["profile", *(arg.format(folder=tmp_path) for arg in args)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("dsnet: ")
    assert len(error.splitlines()) == 1
    for word in words:
        assert word.format(folder=tmp_path) in error


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--help"], 0, ["Examples:", "--batch", "sum over its segments", "budgets", "--threads", "a plan"]),
        (["ds_mbnet_tiny", "--batch", "0"], 2, ["positive number"]),
        ([], 2, ["MODEL|RUN"]),
    ],
)
def test_the_command_helps(
    args: list[str], status: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["profile", *args])
    assert stopped.value.code == status
    text = "".join(capsys.readouterr())
    for word in words:
        assert word in text


def test_a_sample_of_many_routes_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsnet.cli.profile.MAX_ROWS", 5)
    assert main(["profile", "ds_resnet_tiny", "--repeats", "1", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^ +(\d+) +\d \d ", text, re.M) == ["0", "4", "8", "11", "15"]
    assert "5 of 16 routes, evenly spaced" in text
