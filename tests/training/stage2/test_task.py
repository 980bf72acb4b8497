"""Runs of Stage II: gates learn, weights stay, cached signals give the results of online training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.calibration import collect
from dsnet.calibration.difficulty import difficulties, gate_reports, mutual_information
from dsnet.core.checkpoint import load_checkpoint
from dsnet.core.distributed.ranks import ALONE, Ranks
from dsnet.core.seeding import seeded
from dsnet.data.transforms.augment import Augment
from dsnet.errors import DsnetError
from dsnet.gate import HeadForm
from dsnet.models.loading import build_network, load_model
from dsnet.routing import CostTable
from dsnet.training import GateConfig, open_trained, train_gate
from dsnet.training.api import train
from dsnet.training.callbacks import Callback
from dsnet.training.classifier_task import ClassifierTask
from dsnet.training.config import MixConfig, OptimConfig
from dsnet.training.stage1.joint import gumbel_one_hot
from dsnet.training.stage1.views import Views
from dsnet.training.stage2._cache import compute_signals
from dsnet.training.stage2.calibrate import calibrate_run
from dsnet.training.stage2.task import GateObjective
from tests.support import error_of, random_model
from tests.support.routed_run import BASE


def trained(folder: Path, model: str, epochs: int = 3) -> Path:
    train(replace(BASE, model=model, optim=replace(BASE.optim, epochs=epochs)), folder)
    return folder


@pytest.fixture(scope="module")
def mbnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "mbnet", "ds_mbnet_tiny")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "resnet", "ds_resnet_tiny", epochs=1)


def heads(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if ".routing." in name}


pytestmark = pytest.mark.xdist_group("stage2")


@pytest.mark.parametrize("passes", [0, 2])
def test_weights_stay_bit_identical(mbnet: Path, passes: int) -> None:
    before = load_model(mbnet, "final").state_dict()
    outcome = train_gate(mbnet, GateConfig(passes=passes, epochs=2), save_as="moved", device="cpu")
    after = load_model(mbnet, "moved").state_dict()
    assert outcome.done
    assert outcome.cached_passes == passes
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved
    assert moved <= set(heads(after))


def test_several_gates_learn_and_weights_stay(resnet: Path) -> None:
    before = load_model(resnet, "final").state_dict()
    outcome = train_gate(resnet, GateConfig(epochs=1), device="cpu")
    after = load_model(resnet, "gated").state_dict()
    assert outcome.cached_passes == 0
    assert len(outcome.reports) == 2
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name.split(".")[1] for name in moved} == {"0", "1"}  # both gates
    assert moved <= set(heads(after))
    lines = [
        json.loads(line) for line in (resnet / "gated.stage2" / "metrics.jsonl").read_text().splitlines()
    ]
    told = {f"{what}/gate_{gate}" for what in ("entropy", "information") for gate in (0, 1)}
    assert {"gate/target", "gate/complexity", "gate/sgs", *told} <= set(lines[0])
    assert sum(lines[0][f"taken/gate_1/{choice}"] for choice in range(4)) == pytest.approx(1)


def test_a_transformers_gate_learns(tmp_path: Path) -> None:
    optim = OptimConfig(kind="adamw", lr=2e-3, weight_decay=0.05, epochs=1, batch=64)
    train(replace(BASE, model="ds_vit_plus_tiny", optim=optim), tmp_path / "vit")
    outcome = train_gate(tmp_path / "vit", GateConfig(goal="value", epochs=3), device="cpu")
    assert outcome.cached_passes == 3
    before, after = (load_model(tmp_path / "vit", name).state_dict() for name in ("final", "gated"))
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved
    assert moved <= set(heads(after))
    made = calibrate_run(tmp_path / "vit", device="cpu").calibration
    assert set(made.routers) == {"gate", "cascade", "single"}


def test_cached_and_online_training_give_the_same_heads(mbnet: Path) -> None:
    """With as many passes as epochs, both make the same steps on the same views."""
    for name, passes in (("run", 0), ("kept", 3)):
        config = GateConfig(passes=passes, epochs=3, even=True, batch=64)
        train_gate(mbnet, config, save_as=name, device="cpu")
    run, kept = (heads(load_model(mbnet, name).state_dict()) for name in ("run", "kept"))
    new = dsnet.create_model("ds_mbnet_tiny")
    assert any((run[name] - heads(new.state_dict())[name]).abs().max() > 0.01 for name in run)
    for name in run:
        assert torch.allclose(run[name].float(), kept[name].float(), atol=1e-5), name


def test_losses_of_a_step_equal_the_formulas() -> None:
    """λ1 CLS + λ2 CP + λ3 SGS from logits, costs and scores, worked out here."""
    model = dsnet.create_model("ds_mbnet_tiny")
    model.load_state_dict(random_model("ds_mbnet_tiny", torch.float32).state_dict())
    config = GateConfig(target=0.7, complexity=0.3, sgs=2.0)
    views = Views(
        Augment(), MixConfig(), ((0.0,) * 3, (1 / 255,) * 3), seed=0, rank=0, device=torch.device("cpu")
    )
    task = GateObjective(config, model, views, costs=CostTable.of_model(model))
    images = torch.randint(
        0, 3, (1, 32, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    labels = model(images[0].float(), 0).argmax(1)
    labels[16:] = (labels[16:] + 1) % 10
    paid = task.step(images, labels, 0)
    scores = model.gate_scores(model.run_prefix(images[0].float())).detach()
    drawn = gumbel_one_hot(scores, seeded(0, "gate", 0, 0)).argmax(1)
    logits = torch.stack([model(images[0].float(), route) for route in model.space], 1).detach()
    every = torch.arange(32)
    decided = scores.argmax(1)
    easy, solved = (logits[:, end].argmax(1) == labels for end in (0, -1))
    kinds = torch.where(easy, 0, torch.where(solved, 1, 2))
    assert paid["information/gate_0"].item() == pytest.approx(mutual_information(decided, kinds), abs=1e-5)
    assert paid["taken/gate_0/2"].item() == pytest.approx((decided == 2).double().mean().item())
    target = torch.nn.functional.cross_entropy(logits[every, drawn], labels)
    madds = torch.tensor([dsnet.madds(model, route) for route in model.space]).double()
    penalty = (madds[drawn] / madds[-1]).square().mean()
    easy = logits[:, 0].argmax(1) == labels
    sgs = torch.nn.functional.cross_entropy(scores, torch.where(easy, 0, 3))
    assert easy.sum() >= 16
    assert paid["gate/target"].item() == pytest.approx(target.item(), rel=1e-5)
    assert paid["gate/complexity"].item() == pytest.approx(penalty.item(), rel=1e-5)
    assert paid["gate/sgs"].item() == pytest.approx(sgs.item(), rel=1e-5)
    total = 0.7 * target + 0.3 * penalty + 2.0 * sgs
    assert paid["loss"].item() == pytest.approx(total.item(), rel=1e-5)
    assert all(p.grad is not None for p in task.parameters)
    assert all(p.grad is None for n, p in model.named_parameters() if ".routing." not in n)


def test_signals_are_cached_by_image(mbnet: Path) -> None:
    run = open_trained(mbnet, "final", device="cpu")
    views = Views(Augment(), MixConfig(), run.channels, seed=0, rank=0, device=torch.device("cpu"))
    objective = GateObjective(GateConfig(), run.model, views, costs=CostTable.of_model(run.model))
    config = replace(run.config, optim=OptimConfig(batch=50))
    task = ClassifierTask(config, objective, run.held_out, None, ranks=ALONE, callback=Callback(), data={})
    outputs = collect(run.model, run.seen(run.held_out))
    assert torch.equal(compute_signals(task, objective, 0).right, outputs.correct)


def test_heads_of_each_form_are_saved_and_loaded(mbnet: Path) -> None:
    for number, (config, form) in enumerate(
        [
            (GateConfig(head="scalar", epochs=1, passes=1), HeadForm(kind="scalar")),
            (
                GateConfig(first_layer="separate", width=24, epochs=1, passes=1, space="1,3"),
                HeadForm(separate=True, width=24),
            ),
        ]
    ):
        train_gate(mbnet, config, save_as=f"form{number}", device="cpu")
        model = load_model(mbnet, f"form{number}")
        assert model.gate(0).form == form
        assert model.gate(0).choices == config.routes(model).choices[0]
        assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


def test_a_value_gate_learns_the_routes_accuracies(mbnet: Path) -> None:
    config = GateConfig(goal="value", lr=0.2, epochs=10)
    train_gate(mbnet, config, save_as="value", device="cpu")
    run = open_trained(mbnet, "value", device="cpu")
    outputs = collect(run.model, run.seen(run.train))
    reached = outputs.correct.double().mean(0)
    assert torch.allclose(outputs.scores[0][0].double().mean(0), reached, atol=0.05)


def test_gates_trained_on_held_out_images_are_evaluated_on_others(mbnet: Path) -> None:
    train_gate(mbnet, GateConfig(images="held_out", epochs=1, passes=1), save_as="held", device="cpu")
    run = open_trained(mbnet, "held", device="cpu")
    judged = run.calibration_images()
    assert 0 < len(judged) < len(run.held_out)
    plain = open_trained(mbnet, "final", device="cpu")
    assert len(plain.calibration_images()) == len(plain.held_out)


@contextmanager
def alone() -> Iterator[Ranks]:
    yield ALONE


class _Stop(Callback):
    """Stops at a step by a signal."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, epoch: int, images: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_resumed_run_gives_the_same_heads(mbnet: Path) -> None:
    config = GateConfig(passes=0, epochs=2)
    train_gate(mbnet, config, save_as="whole", device="cpu")
    stopped = train_gate(mbnet, config, save_as="parts", device="cpu", callback=_Stop(25))
    assert not stopped.done
    assert not (mbnet / "parts").exists()
    other = GateConfig(passes=0, epochs=2, lr=0.1)
    assert "other settings" in error_of(
        lambda: train_gate(mbnet, other, save_as="parts", device="cpu", resume=True)
    )
    patient = replace(config, timeout_minutes=60)  # changes nothing of what is learnt
    limits = []
    with mock.patch(
        "dsnet.training.stage2.api.joined", lambda *a, timeout, **o: limits.append(timeout) or alone()
    ):
        assert train_gate(mbnet, patient, save_as="parts", device="cpu", resume=True).done
    assert limits == [3600]
    whole, parts = (heads(load_model(mbnet, name).state_dict()) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_resuming_with_other_weights_is_an_error(mbnet: Path) -> None:
    config = GateConfig(passes=0, epochs=2)
    assert not train_gate(mbnet, config, save_as="other", device="cpu", callback=_Stop(5)).done
    message = error_of(
        lambda: train_gate(mbnet, config, name="best", save_as="other", device="cpu", resume=True)
    )
    assert "other weights" in message


def test_reports_by_hand(mbnet: Path) -> None:
    run = open_trained(mbnet, "final", device="cpu")
    outputs = collect(run.model, run.seen(run.held_out))
    costs = CostTable.of_model(run.model)
    (report,) = gate_reports(replace(outputs, scores=(torch.zeros_like(outputs.scores[0]),)), costs)
    assert report.choice_counts == {0: len(outputs), 1: 0, 2: 0, 3: 0}
    assert report.static
    assert (report.entropy, report.information) == (0, 0)
    kinds = difficulties(outputs)
    for n in range(len(outputs)):
        expected = 0 if outputs.correct[n, 0] else 1 if outputs.correct[n, 3] else 2
        assert kinds[n].item() == expected
    a = torch.tensor([0, 0, 1, 1])
    assert mutual_information(a, a) == pytest.approx(1.0)
    assert mutual_information(a, torch.tensor([0, 1, 0, 1])) == pytest.approx(0.0)


SPACES = {"S": (0.0, 0.5, 1.0), "M": (1.0, 0.5, 1.0), "L": (0.0, 0.0, 1.0)}  # (CLS, CP, SGS), the paper's


def test_spaces_of_all_routes_differ_in_their_loss_weights(resnet: Path) -> None:
    learnt, said = {}, list[str]()
    for space, weights in ((None, SPACES["M"]), ("S", SPACES["S"])):
        config = GateConfig(space=space, epochs=1, batch=600)
        train_gate(resnet, config, save_as=f"to-{space}", device="cpu", said=said.append)
        saved = load_checkpoint(resnet, f"to-{space}")
        gate = saved.data["gate"]
        assert (gate["space"], gate["target"], gate["complexity"], gate["sgs"]) == (space, *weights)
        assert build_network(saved).gate(0).choices == (0, 1, 2, 3)
        learnt[space] = torch.cat([value.flatten() for value in heads(dict(saved.tensors["model"])).values()])
    assert not torch.equal(learnt["S"], learnt[None])
    assert "all 16 routes, loss weights target=1, complexity=0.5, sgs=1" in said[0]
    assert "space S: all 16 routes, loss weights target=0, complexity=0.5, sgs=1" in said[1]


@pytest.mark.parametrize("name", ["ds_resnet", "ds_resnet_cifar", "ds_resnet_tiny"])
def test_loss_weights_in_the_settings_override_those_of_the_space(name: str) -> None:
    model = dsnet.create_model(name, device="meta")
    for space, weights in SPACES.items():
        assert GateConfig(space=space).weights(model) == weights
        assert GateConfig(space=space).resolved(model).routes(model) == model.space.narrow(list(model.space))
        assert GateConfig(space=space, target=2.0).weights(model) == (2.0, *weights[1:])
    mine = GateConfig(space="S", target=1.0, sgs=0.0)
    assert mine.resolved(model) == GateConfig(space="S", target=1.0, complexity=0.5, sgs=0.0)
    assert "(complexity by the space)" in mine.chosen(model)
    assert mine.resolved(model).resolved(model) == mine.resolved(model)
    one = dsnet.create_model("ds_mbnet", device="meta")
    assert GateConfig(space="S").weights(one) == SPACES["M"]
    assert "space S: 4 of 14 routes, loss weights target=1, complexity=0.5, sgs=1" in GateConfig(
        space="S"
    ).chosen(one)
    assert "ds_resnet has no space" not in error_of(lambda: GateConfig(space="XL").resolved(one))
    assert "it has S, M, L" in error_of(lambda: GateConfig(space="XL").resolved(model))
    plus = dsnet.create_model(name.replace("resnet", "resnet_plus"), device="meta")
    assert plus.gate_weights == {}


def test_settings_that_do_not_fit_are_errors(mbnet: Path, resnet: Path, tmp_path: Path) -> None:
    def wrong(**settings: object) -> str:
        return error_of(lambda: train_gate(mbnet, GateConfig(**settings), device="cpu"))  # type: ignore[arg-type]

    assert "nothing to learn" in wrong(target=0, complexity=0, sgs=0)
    assert "ds_mbnet_tiny has no space 'S'; it has no named spaces" in wrong(space="S")
    assert "no route 9" in wrong(space="0,9")
    assert "more than" in wrong(batch=10**6)
    assert "needs a first layer" in wrong(width=8)
    assert "t.json" in wrong(latency=str(tmp_path / "t.json"))
    message = error_of(lambda: train_gate(resnet, GateConfig(passes=2), device="cpu"))
    assert "several gates" in message
    assert "one gate" in error_of(lambda: train_gate(resnet, GateConfig(goal="value"), device="cpu"))
    for name in ("final", "last", "a/b", "../x", ""):
        assert "saved as" in error_of(lambda name=name: train_gate(mbnet, GateConfig(), save_as=name))
    with pytest.raises(DsnetError, match="has no checkpoint"):
        train_gate(tmp_path, GateConfig(), device="cpu")
    saved = load_checkpoint(mbnet, "final")
    assert saved.data["network"]["heads"] == [{"kind": "onehot", "separate": False, "width": None}]
