"""The JSON form of results, and the conditions that they state."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dsnet.benchmark._conditions import _cpu_mhz, conditions
from tests.support.bench_result import bench_result


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
