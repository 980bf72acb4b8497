"""Benchmarks run on a CPU too, with tiny networks, and write what their tables are made from."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import imagenet_cascade, modelopt, mutation, pretrained, training
from torch import nn

import dsnet
from dsnet.calibration import collect
from dsnet.models.convert.sources import timm_network
from dsnet.routing import CostTable
from tests.support import need_timm
from tests.support.small_networks import SMALL_NETWORKS, random_images


def test_a_training_step_is_timed_beside_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "training.json"
    options = ["--device", "cpu", "--model", "ds_mbnet_tiny", "--batch", "8", "--repeats", "1"]
    training.main([*options, "--json", str(path)])
    assert "ds_mbnet_tiny" in capsys.readouterr().out
    (row,) = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert row["ratio"] == pytest.approx(row["step"] / row["sum"], rel=1e-3)
    assert row["sum"] == pytest.approx(sum(ms for name, ms in row["parts"].items() if name != "images"), 1e-3)
    assert set(row["parts"]) == {*(f"network {i}" for i in range(4)), "teacher", "update", "images"}


def test_sorting_channels_by_given_scores_leaves_a_network_the_same() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 6, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    ).eval()
    nn.init.uniform_(network.get_submodule("1").weight)
    nn.init.uniform_(network.get_submodule("4").weight)
    images, scores = torch.randn(2, 3, 16, 16), torch.rand(8)
    first = network.get_submodule("0").weight.detach().clone()
    with torch.no_grad():
        before = network(images)
        pretrained.sort_channels(network, {"0": scores}, images[:1])
        after = network(images)
    assert torch.equal(network.get_submodule("0").weight, first[scores.argsort(descending=True)])
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("text", ["lite0", "lite0=", "resnet=weights.pth"])
def test_a_pretrained_network_is_a_name_and_a_file(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=FILE"):
        pretrained.parse_source(text)


def test_layers_that_modelopt_does_not_know_are_replaced_by_equal_ones() -> None:
    need_timm()
    network = timm_network("tf_efficientnet_lite0", num_classes=5)
    before = modelopt.count_madds(network)
    modelopt.replace_layers(network, torch.randn(1, 3, modelopt.SIDE, modelopt.SIDE))  # it compares both
    kinds = {type(module).__name__ for module in network.modules()}
    assert not kinds & {"Conv2dSame", "BatchNormAct2d"}
    assert modelopt.count_madds(network) == before


def test_a_mutation_runs_the_tests_of_its_statement_the_fastest_first() -> None:
    text = (
        "LIMIT = 1\ndef double(x):\n    return (\n        x\n        + x\n    )\nequal = lambda x: x == 0\n"
    )
    finder = mutation.Finder("double.py", text)
    finder.visit(ast.parse(text))
    seconds = {"slow": 3.0, "other": 2.0, "fast": 1.0}
    record = mutation.Record(seconds, [], {"double.py": {"1": sorted(seconds), "3": ["slow", "fast"]}})
    found = {change.old: record.tests(change) for change in finder.mutations}
    every = ["fast", "other", "slow"]
    assert found == {"1": every, "+": ["fast", "slow"], "==": every, "0": every}


CACHED = """
import functools

from dsnet.errors import install_hint


@functools.cache
def hint():
    return install_hint("serve")


def test_first():
    assert hint()


def test_second():
    assert hint()


def test_other():
    pass
"""


def test_lines_belong_to_all_tests_that_use_a_cached_result(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_cached.py").write_text(CACHED, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "benchmarks.lines_per_test", "-p", "no:xdist", tmp_path],
        env={**os.environ, "LINES_PER_TEST": str(tmp_path / "lines.json"), "COVERAGE_CORE": "ctrace"},
        cwd=Path(__file__).parents[1],
        check=True,
    )
    record = json.loads((tmp_path / "lines.json").read_text(encoding="utf-8"))
    lines = record["lines"]["src/dsnet/errors.py"].values()
    tests = {tuple(test.split("::")[1] for test in own) for own in lines}
    assert tests == {("test_first", "test_other", "test_second"), ("test_first", "test_second")}
    assert len(record["seconds"]) == 3
    assert not record["failed"]


def test_a_paired_bootstrap_agrees_with_the_standard_error() -> None:
    values = torch.randn(2500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = imagenet_cascade.bootstrap(values.numpy())
    for column, (least, most) in enumerate(zip(low, high, strict=True)):
        mean, error = float(values[:, column].mean()), float(values[:, column].std()) / 50
        assert least == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
        assert most == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def test_the_best_pair_of_networks_is_chosen_on_calibration_images() -> None:
    networks = [SMALL_NETWORKS[name].full().float() for name in ("plain", "residual", "depthwise")]
    model = dsnet.cascade(networks, sizes=(16, 16, 16))
    costs = CostTable.of_model(model)
    x = random_images(64, dtype=torch.float32)
    with torch.no_grad():
        labels = model(x, 2).argmax(1)
    outputs = collect(model, [(x, labels)], list(model.space))
    pairs = imagenet_cascade.pairs_of(outputs, costs)
    assert {pair.routes for pair in pairs} <= {(0, 1), (0, 2), (1, 2)}
    accuracies = outputs.correct.double().mean(0).tolist()
    best = imagenet_cascade.as_accurate(pairs, accuracies[1])
    assert best is not None
    enough = [pair.point.cost for pair in pairs if pair.point.accuracy >= accuracies[1]]
    assert best.point.cost == min(enough)
    row = imagenet_cascade.evaluate(best, 1, outputs, costs)
    assert row["madds"] == pytest.approx(best.point.cost)
    assert row["top1"] == pytest.approx(100 * best.point.accuracy)
    assert row["difference"] == pytest.approx(100 * (best.point.accuracy - accuracies[1]))
    assert row["difference_interval"][0] <= row["difference"] <= row["difference_interval"][1]
    assert row["ratio"] == pytest.approx(row["madds"] / dsnet.madds(model, 1))
    for goal, number, pair in imagenet_cascade.choose(pairs, outputs, costs):
        assert pair.point.cost <= costs.of((number,)) * (1 + 1e-9)
        assert goal == "as expensive" or pair.point.accuracy >= accuracies[number] - 1e-9
        assert goal != "as accurate" or pair.routes[1] == number
    dearest = imagenet_cascade.as_expensive(pairs, costs.of((2,)))
    assert dearest is not None
    assert dearest.point.accuracy == max(p.point.accuracy for p in pairs if p.point.cost <= costs.of((2,)))
