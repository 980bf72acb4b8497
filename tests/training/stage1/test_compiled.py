"""Training with torch.compile makes the same steps as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsnet.training import load_checkpoint
from dsnet.training.api import train
from dsnet.training.config import OptimConfig, RunConfig, SchemeConfig, TrainConfig


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
    eager, compiled = (load_checkpoint(tmp_path / name, "last") for name in ("eager", "compiled"))
    for key, value in eager.tensors["model"].items():
        ours = compiled.tensors["model"][key]
        assert (ours.double() - value.double()).abs().max() <= 1e-3 * max(1.0, value.abs().max().item()), key
