"""Training with torch.compile makes the same steps as without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.routes import Route
from dsnet.slicing import Mode
from dsnet.training import Average, Projector, Scheme, Stage1, load_checkpoint
from dsnet.training.api import train
from dsnet.training.config import OptimConfig, RunConfig, SchemeConfig, TrainConfig
from dsnet.training.stage1._compiled import compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # raised inside torch.compile, which hides it
@pytest.mark.parametrize(("model", "scheme"), [("ds_mbnet_tiny", "h-ib+mvco"), ("ds_resnet_tiny", "label")])
def test_a_compiled_run_reaches_the_same_weights(tmp_path: Path, model: str, scheme: str) -> None:
    config = TrainConfig(
        model=model,
        scheme=SchemeConfig(name=scheme, alpha=0.9),
        optim=OptimConfig(lr=0.05, epochs=1, batch=256),
        run=RunConfig(device="cpu"),
    )
    train(config, tmp_path / "eager")
    train(replace(config, run=replace(config.run, compile=True)), tmp_path / "compiled")
    eager, own = (load_checkpoint(tmp_path / name, "last") for name in ("eager", "compiled"))
    for key, value in eager.tensors["model"].items():
        ours = own.tensors["model"][key]
        assert (ours.double() - value.double()).abs().max() <= 1e-3 * max(1.0, value.abs().max().item()), key


@pytest.mark.parametrize("scheme", ["label", "h-ib"])
def test_all_networks_of_a_step_over_image_sizes_are_compiled(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def compile_(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        def call(x: Tensor, route: Route, mode: Mode | None = None) -> object:
            calls.append(route.number)
            return function(x, route, mode)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    model = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16)).train()
    own = Scheme.parse(scheme)
    average = Average(model) if own.uses_average else None
    projector = Projector.of(model) if own.hierarchical else None
    stage = Stage1(scheme=own, average=average, projector=projector)
    routes = (model.space.largest, model.space[1], model.space.smallest)
    stage.step(compiled(model), routes, [torch.randn(8, 3, 16, 16)], torch.arange(8))
    assert calls == [route.number for route in routes]
