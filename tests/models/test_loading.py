"""Checkpoints come back whole, and a killed writer leaves the last one as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dsnet
from dsnet.core.checkpoint import load_checkpoint
from dsnet.models.composite import CompositeNetwork
from dsnet.models.loading import build_network, load_model, save_checkpoint
from dsnet.slicing import KeyState
from dsnet.training.optim import make_optimizer, optimizer_tensors, parameter_groups, restore_optimizer
from tests.support import TINY, error_of, images, randomise, rewrite


@pytest.mark.parametrize("name", TINY)
def test_a_loaded_network_has_the_weights_statistics_and_heads(name: str, tmp_path: Path) -> None:
    model = randomise(dsnet.create_model(name, num_classes=7)).requires_grad_(False)
    if model.space.gates == 1:
        model.reset_routing(model.space.narrow([0, 2]), generator=torch.Generator().manual_seed(0))
    save_checkpoint(tmp_path, "last", model, step=3, data={"recipe": {"lr": 0.1}})
    again = load_model(tmp_path)
    assert not again.training
    assert again.spec == model.spec
    x = images(model, 5)
    assert torch.equal(again(x, 0), model(x, 0))
    assert torch.equal(again.route(x), model.route(x))
    assert again.gate(0).choices == model.gate(0).choices
    assert again.key_states(0) == {KeyState.CALIBRATED}
    assert load_checkpoint(tmp_path).data["recipe"] == {"lr": 0.1}


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_a_loaded_network_has_its_image_sizes(name: str, tmp_path: Path) -> None:
    model = randomise(dsnet.create_model(name, num_classes=7, image_sizes=(8, 16))).requires_grad_(False)
    if model.has_gate:
        model.reset_routing(model.space.narrow([0, 3, 4]), generator=torch.Generator().manual_seed(0))
    folder = save_checkpoint(tmp_path, "last", model, step=3)
    again = load_model(tmp_path)
    assert isinstance(again, CompositeNetwork)
    assert again.spec == model.spec
    assert again.space == model.space
    assert again.image_sizes == (8, 16)
    x = images(model, 5)
    for route in model.space:
        assert torch.equal(again(x, route), model(x, route))
        assert again.key_states(route) == {KeyState.CALIBRATED}
    if model.has_gate:
        assert again.gate(0).choices == (0, 3, 4)
        assert torch.equal(again.route(x), model.route(x))
    text = (folder / "checkpoint.json").read_text()
    rewrite(folder / "checkpoint.json", text.replace('"image_size": 8', '"image_size": 4'))
    assert "other routes" in error_of(lambda: load_model(tmp_path))


def test_a_checkpoint_without_image_sizes_has_no_trace_of_them(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "last", dsnet.create_model("ds_mbnet_tiny"), step=1)
    assert "image_size" not in (folder / "checkpoint.json").read_text()
    assert type(load_model(tmp_path)) is type(dsnet.create_model("ds_mbnet_tiny"))


@pytest.mark.parametrize("activation", ["relu", "hard_swish"])
def test_a_loaded_network_has_its_activation(activation: str, tmp_path: Path) -> None:
    model = randomise(dsnet.create_model("ds_mbnet_tiny", activation=activation)).requires_grad_(False)
    save_checkpoint(tmp_path, "last", model, step=1)
    again, x = load_model(tmp_path), images(model, 3)
    assert dict(again.spec.options) == {"activation": activation}
    assert torch.equal(again(x, 2), model(x, 2))
    plain = dsnet.create_model("ds_mbnet_tiny")
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(x, 2), model(x, 2))


def test_saving_moves_a_name_to_the_new_checkpoint_and_removes_old_ones(tmp_path: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, "last", model, step=step)
    save_checkpoint(tmp_path, "best", model, step=2)
    save_checkpoint(tmp_path, "best", model, step=3)
    kept = ["best", "best-00000003", "last", "last-00000002", "last-00000003"]  # last and the one before it
    assert sorted(p.name for p in tmp_path.iterdir()) == kept
    assert load_checkpoint(tmp_path, "best").data["step"] == 3
    assert load_checkpoint(tmp_path / "last-00000003").data["step"] == 3
    save_checkpoint(tmp_path, "last", model, step=3)  # the same step once more
    assert load_checkpoint(tmp_path).data["step"] == 3
    assert len(list(tmp_path.glob("last-*"))) == 2


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_restored_optimizer_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    def train(model: dsnet.Supernet, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model.train()(images(model, 8, seed=step), step % 4).square().sum().backward()
            optimizer.step()

    def begin() -> tuple[dsnet.Supernet, torch.optim.Optimizer]:
        model = dsnet.create_model("ds_mbnet_tiny", generator=torch.Generator().manual_seed(0))
        return model, make_optimizer(kind, parameter_groups([model], 1e-4), lr=0.01)

    straight, optimizer = begin()
    train(straight, optimizer, range(6))
    first, optimizer = begin()
    train(first, optimizer, range(3))
    save_checkpoint(tmp_path, "last", first, step=3, tensors={"optimizer": optimizer_tensors(optimizer)})
    saved = load_checkpoint(tmp_path)
    second = build_network(saved)
    optimizer = make_optimizer(kind, parameter_groups([second], 1e-4), lr=0.01)
    restore_optimizer(optimizer, saved.tensors["optimizer"])
    train(second, optimizer, range(3, 6))
    for (name, ours), theirs in zip(second.state_dict().items(), straight.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


WRITER = """
import sys, dsnet
from pathlib import Path
from dsnet.models.loading import (save_checkpoint)
model = dsnet.create_model("ds_mbnet_cifar")
step = 0
while True:
    step += 1
    save_checkpoint(Path(sys.argv[1]), "last", model, step=step)
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.031])
def test_a_killed_writer_leaves_a_whole_checkpoint(delay: float, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.stdout.readline()
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        printed = [2, *(int(line) for line in writer.stdout)]
    saved = load_checkpoint(tmp_path)
    assert saved.data["step"] >= printed[-1]
    before = f"last-{saved.data['step']:08d}"
    save_checkpoint(tmp_path, "last", build_network(saved), step=10**6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", before, "last-01000000"]


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    (tmp_path / ".last-00000007.123").mkdir()
    (tmp_path / ".last.123").write_text("last-00000007\n", encoding="utf-8")
    (tmp_path / ".last_good.123").write_text("of another name\n", encoding="utf-8")
    save_checkpoint(tmp_path, "last", model, step=8)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".last_good.123", "last", "last-00000008"]


def test_damaged_and_missing_checkpoints_are_errors(tmp_path: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    assert "it has none" in error_of(lambda: load_checkpoint(tmp_path))
    folder = save_checkpoint(tmp_path, "last", model, step=1)
    assert "no checkpoint 'best'; it has last" in error_of(lambda: load_checkpoint(tmp_path, "best"))
    data = json.loads((folder / "checkpoint.json").read_text())
    rewrite(folder / "checkpoint.json", json.dumps({**data, "format": 99}))
    assert "format 99" in error_of(lambda: load_checkpoint(tmp_path))
    (folder / "checkpoint.json").write_text(json.dumps(data))
    os.truncate(folder / "model.safetensors", 1000)
    assert "not a complete checkpoint" in error_of(lambda: load_checkpoint(tmp_path))


def test_names_with_a_common_beginning_are_kept_apart(tmp_path: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    for name in ("gated-S", "gated", "gated", "gated-2"):
        save_checkpoint(tmp_path, name, model, step=3)
    for name in ("gated-S", "gated", "gated-2"):
        assert load_checkpoint(tmp_path, name).data["step"] == 3
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x", "1", "a b", "ä"])
def test_invalid_names_are_refused(name: str, tmp_path: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    assert "name" in error_of(lambda: save_checkpoint(tmp_path / "run", name, model, step=1))
    assert not (tmp_path / "run").exists()


def test_a_missing_run_and_one_without_checkpoints_have_different_errors(tmp_path: Path) -> None:
    assert "no does not exist: expected the folder of a run" in error_of(
        lambda: load_checkpoint(tmp_path / "no")
    )
    (tmp_path / "file").write_text("")
    assert "file is a file: expected the folder of a run" in error_of(
        lambda: load_checkpoint(tmp_path / "file")
    )
    assert "has no checkpoint 'best'" in error_of(lambda: load_checkpoint(tmp_path, "best"))
