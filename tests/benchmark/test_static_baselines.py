"""Static networks to compare with: those of the family, on the fastest backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import dsnet
from dsnet.benchmark._static_baselines import StaticNetwork, compile_static, static_networks
from dsnet.benchmark.results import Baseline
from dsnet.runtime.backends.base import get_backend
from tests.support import assert_close
from tests.support.networks import plan_of


def _usable(name: str) -> bool:
    return get_backend(name).unavailable(torch.device("cpu"), torch.float32) is None


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
        "dsnet.benchmark._static_baselines.bucketed_programs", lambda *args, **options: compiled.segments
    )
    monkeypatch.setattr("dsnet.benchmark._static_baselines._milliseconds_per_image", lambda *args: 1.0)
    half = StaticNetwork("half", "mobilenet_v1", {"width": 0.5})
    baseline, _ = compile_static(half, compiled, (1,), any_backend=False)
    assert baseline == Baseline("half", "mobilenet_v1 × 0.5", "eager", baseline.madds)
    assert baseline.madds == pytest.approx(149.5e6, rel=1e-3)


def test_static_networks_run_on_the_fastest_backend_or_on_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = [name for name in ("eager", "onnxruntime") if _usable(name)]
    monkeypatch.setattr("dsnet.benchmark._static_baselines.list_backends", lambda: usable)
    small = nn.Sequential(nn.Conv2d(3, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    monkeypatch.setattr("dsnet.benchmark._static_baselines.create_model", lambda name: small)
    monkeypatch.setattr("dsnet.benchmark._static_baselines.madds", lambda module, image_size: 1)
    speed = {"eager": 3.0, "onnxruntime": 1.0}
    timed = []

    def pretend(*args: object) -> float:
        name = usable[len(timed)]
        timed.append(name)
        return speed[name]

    monkeypatch.setattr("dsnet.benchmark._static_baselines._milliseconds_per_image", pretend)
    compiled, static = plan_of("ds_mbnet_tiny", "eager").network, StaticNetwork("twin", "small", {})
    baseline, program = compile_static(static, compiled, (2,), any_backend=True, buckets=(1,))
    assert timed == usable
    assert baseline.backend == min(usable, key=lambda name: speed[name])
    x = torch.randn(2, 3, *compiled.image_size, generator=torch.Generator().manual_seed(0))
    assert_close(program(x)[0], small(x), 1e-4)
    timed.clear()
    baseline, _ = compile_static(static, compiled, (2,), any_backend=False, buckets=(1,))
    assert (baseline.backend, timed) == ("eager", ["eager"])
