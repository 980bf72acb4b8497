"""Graphed steps on a CPU, where a replay runs the captured pass again."""

from __future__ import annotations

import copy

import pytest
import torch

import dsnet
from dsnet.slicing import KeyState, Mode
from dsnet.training import Scheme, Stage1
from dsnet.training.stage1._graphed_step import GraphedStep
from tests.support import error_of, images
from tests.support.replays import pretend_cuda
from tests.support.stage1 import KINDS, SCHEMES, setting


@pytest.fixture
def _cuda_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    monkeypatch.setattr("dsnet.training.stage1._graphed_step._check", lambda stage, device: None)


@pytest.mark.usefixtures("_cuda_in_name")
@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("name", KINDS)
def test_replays_equal_steps(name: str, text: str) -> None:
    model, stage, routes, views, labels = setting(name, text)
    other, other_stage = copy.deepcopy(model), copy.deepcopy(stage)
    steps = GraphedStep(stage, model)
    plan = [(routes, False), (routes, False), (routes[:1] + routes[2:], True), (routes, False)]
    for number, (chosen, labels_only) in enumerate(plan):
        seen = [view + number for view in views[: stage.scheme.views(len(chosen))]]
        for network in (model, other):
            if number != 2:  # the third step adds to the gradients of the second
                network.zero_grad()
        ours = steps.step(chosen, seen, labels.roll(number), labels_only=labels_only)
        theirs = other_stage.step(other, chosen, seen, labels.roll(number), labels_only=labels_only)
        assert torch.equal(ours.total, theirs.total)
        assert [n.terms for n in ours.networks] == [n.terms for n in theirs.networks]
        for (key, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), key
            assert a.grad is None or torch.equal(a.grad, b.grad), key
        for (key, a), b in zip(model.named_buffers(), other.buffers(), strict=True):
            assert torch.equal(a, b), key


@pytest.mark.usefixtures("_cuda_in_name")
def test_a_replay_marks_the_keys_it_updates() -> None:
    model, stage, _, views, labels = setting("ds_mbnet_tiny", "ib")
    routes = (model.space.largest, model.space.smallest)
    steps = GraphedStep(stage, model)
    for _ in range(2):
        dsnet.recalibrate(model, [images(model, 8)])
        steps.step(routes, views, labels)
        assert all(model.key_states(route) == {KeyState.RUNNING} for route in routes)
        assert KeyState.CALIBRATED in model.key_states(model.space[1])


@pytest.mark.usefixtures("_cuda_in_name")
def test_a_batch_of_another_size_runs_without_graphs() -> None:
    model, stage, routes, views, labels = setting("ds_mbnet_tiny", "ib")
    steps = GraphedStep(stage, model)
    steps.step(routes, views, labels)
    made = len(steps._captured)
    losses = steps.step(routes, [views[0][:4]], labels[:4])
    assert len(steps._captured) == made
    assert losses.total.isfinite()


def test_what_graphs_cannot_do_is_an_error() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    stage = Stage1(scheme=Scheme.parse("label"))
    assert "not on cpu; use Stage1.step" in error_of(lambda: GraphedStep(stage, model))
    model = dsnet.create_model("ds_mbnet_tiny", device="meta")
    assert "not on meta" in error_of(lambda: GraphedStep(stage, model))


def test_statistics_of_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
    stage = Stage1(scheme=Scheme.parse("label"), mode=Mode(statistics=lambda norm, x, key: (x, x)))
    message = error_of(lambda: GraphedStep(stage, model))
    assert "norm statistics" in message
    assert "batch at hand" in message
