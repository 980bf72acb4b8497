"""The single-stage baseline: gradients of the gate are unbiased, weights learn at the drawn routes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import dsnet
from dsnet.core.distributed.ranks import ALONE, Ranks
from dsnet.core.settings import to_plain
from dsnet.counts import Shape
from dsnet.data.transforms.augment import Augment
from dsnet.models.counting import prefix_cost
from dsnet.recipes import get_recipe
from dsnet.routing import CostTable
from dsnet.training.api import train
from dsnet.training.config import MixConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from dsnet.training.stage1.joint import JointObjective, gumbel_one_hot, reinforce
from dsnet.training.stage1.views import Views
from tests.support import assert_close, error_of, randomise

CHANNELS = ((0.5,) * 3, (0.25,) * 3)


def task(
    name: str, method: str, image_sizes: tuple[int, ...] | None = None, **scheme: float
) -> JointObjective:
    options = {} if image_sizes is None else {"image_sizes": image_sizes}
    config = TrainConfig(model=name, scheme=SchemeConfig(name="label", joint=method, **scheme))
    model = randomise(dsnet.create_model(name, **options)).train()
    views = Views(Augment(), MixConfig(), CHANNELS, seed=0, rank=0, device=torch.device("cpu"))
    return JointObjective(config, model, views, ranks=ALONE, image_size=16)


def batch(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (1, count, 3, 16, 16), dtype=torch.uint8, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def test_gumbel_draws_follow_the_softmax_and_pass_its_gradient() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20_000, 1).requires_grad_()
    drawn = gumbel_one_hot(scores, torch.Generator().manual_seed(0))
    assert set(drawn.detach().round().unique().tolist()) == {0.0, 1.0}
    assert_close(drawn.detach().mean(0), F.softmax(scores[0].detach(), 0), 0.02)
    drawn[:, 2].sum().backward()
    assert (scores.grad[:, 2] > 0).all()
    assert (scores.grad[:, 0] < 0).all()


def test_reinforce_is_unbiased_against_the_expectation_written_out() -> None:
    """Three routes with known losses: the mean of many estimates is the gradient of Σ p L."""
    losses = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    scores = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad((F.softmax(scores, 0) * losses).sum(), scores)[0]
    draws = torch.multinomial(
        F.softmax(scores.detach(), 0), 200_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    for baseline in (0.0, 1.2):
        value = reinforce(losses[draws], F.log_softmax(scores, 0)[draws], baseline)
        assert (torch.autograd.grad(value, scores)[0] - expected).abs().max() < 0.01


@pytest.mark.parametrize(
    ("name", "method"),
    [("ds_mbnet_tiny", "gumbel"), ("ds_mbnet_tiny", "reinforce"), ("ds_resnet_tiny", "reinforce")],
)
def test_gate_and_weights_both_learn(name: str, method: str) -> None:
    joint = task(name, method)
    losses = joint.step(*batch(), 0)
    assert all(value.isfinite() for value in losses.values())
    groups = joint.groups(1e-4)
    learnt = [p for group in groups for p in group["params"] if p.grad is not None and p.grad.abs().sum() > 0]
    heads = [p for gate in joint.model.gates for p in gate.routing.parameters()]
    assert {id(p) for p in heads} <= {id(p) for p in learnt}
    assert len(learnt) > 0.9 * sum(len(group["params"]) for group in groups)


@pytest.mark.parametrize("method", ["gumbel", "reinforce"])
def test_routes_that_were_not_drawn_get_no_gradient(method: str) -> None:
    joint = task("ds_mbnet_tiny", method)
    head = joint.model.gate(0).routing
    with torch.no_grad():
        head.last.weight.zero_()
        head.last.bias.copy_(torch.tensor([50.0, 0.0, 0.0, 0.0]))  # everyone draws the smallest route
    joint.step(*batch(), 0)
    width = joint.model.space.smallest.stages[-1].width
    weight = joint.model.head.classifier.weight
    assert weight.grad[:, :width].abs().sum() > 0
    assert weight.grad[:, width:].abs().sum() == 0


@pytest.mark.parametrize("method", ["gumbel", "reinforce"])
@pytest.mark.parametrize("number", [1, 6])  # of 8 and of 16 pixels
def test_weights_of_several_image_sizes_learn_at_the_drawn_route(method: str, number: int) -> None:
    """All images draw one route: gradients and statistics are those of training this route alone."""
    joint = task("ds_mbnet_tiny", method, (8, 16), complexity=0.0)
    alone = copy.deepcopy(joint.model)
    head = joint.model.gate(0).routing
    with torch.no_grad():
        head.last.weight.zero_()
        head.last.bias.zero_()[number] = 60.0
    images, labels = batch()
    losses = joint.step(images, labels, 0)
    (x,), _ = joint.views(images, labels, count=1, step=0, classes=10)
    loss = F.cross_entropy(alone(x, number), labels)
    loss.backward()
    assert losses["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    for (name, mine), theirs in zip(joint.model.named_parameters(), alone.parameters(), strict=True):
        if ".routing." in name or theirs.grad is None:
            assert mine.grad is None or ".routing." in name or not mine.grad.any(), name
        else:
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5), name
    statistics = [
        {name: v for name, v in model.state_dict().items() if name.endswith((".mean", ".var"))}
        for model in (joint.model, alone)
    ]
    gate_key = {0}  # the thumbnail's prefix runs for the gate
    for name, mine in statistics[0].items():
        keys = [key for key in range(len(mine)) if key not in gate_key]
        assert torch.allclose(mine[keys], statistics[1][name][keys], atol=1e-5), name


def test_costs_of_several_image_sizes_include_the_thumbnail() -> None:
    joint = task("ds_mbnet_tiny", "reinforce", (8, 16))
    table = CostTable.of_model(joint.model)
    for route in joint.model.space:
        thumbnail = 0 if route.image_size == 8 else table.prefix
        expected = (dsnet.madds(joint.model, route) + thumbnail) / dsnet.madds(joint.model, 7)
        assert joint.costs[route.choices] == pytest.approx(expected)


def test_a_heavy_penalty_drives_the_gate_to_the_smallest_route(tmp_path: Path) -> None:
    for method in ("gumbel", "reinforce"):
        config = TrainConfig(
            scheme=SchemeConfig(name="label", joint=method, complexity=30.0),
            optim=OptimConfig(lr=0.1, epochs=3, batch=64),
            run=RunConfig(device="cpu"),
        )
        train(config, tmp_path / method)
        model = dsnet.training.load_model(tmp_path / method)
        images, _ = batch(32)
        routes = model.route(images[0].float() / 255)[:, 0]
        assert (routes == 0).float().mean() > 0.9


@pytest.mark.parametrize("method", ["gumbel", "reinforce"])
def test_labels_are_smoothed(method: str) -> None:
    """With the same draws, losses differ only by the smoothing of the labels."""
    plain, smoothed = (task("ds_mbnet_tiny", method, smoothing=s) for s in (0.0, 0.25))
    choices = []
    for joint in (plain, smoothed):
        head = joint.model.gate(0).routing
        with torch.no_grad():  # everyone draws the second route
            head.last.weight.zero_()
            head.last.bias.copy_(torch.tensor([0.0, 90.0, 0.0, 0.0]))
        choices.append(joint.step(*batch(), 0))
    name = "gate/label" if method == "gumbel" else "drawn/label"
    images, labels = batch()
    model = task("ds_mbnet_tiny", method).model
    (x,), _ = plain.views(images, labels, count=1, step=0, classes=10)
    log_p = model(x, 1).log_softmax(1).detach()
    hard = -log_p.gather(1, labels[:, None]).mean()
    even = -log_p.mean()
    assert choices[0][name].item() == pytest.approx(hard.item(), rel=1e-5)
    assert choices[1][name].item() == pytest.approx((0.75 * hard + 0.25 * even).item(), rel=1e-5)


def test_recipes_of_one_and_two_stages_differ_only_in_the_stages() -> None:
    one, two = (to_plain(get_recipe(f"imagenet_ds_mbnet_{name}").config) for name in ("joint", "label"))
    assert one["scheme"].pop("joint") == "gumbel"
    assert two["scheme"].pop("joint") is None
    for group in two:
        assert one[group] == two[group], group
    assert two["scheme"]["smoothing"] == 0.1
    assert two["scheme"]["add"]


def test_unsupported_settings_are_errors() -> None:
    assert "no drop_path and no dropout" in error_of(lambda: task("ds_mbnet_tiny", "gumbel", dropout=0.1))
    for method in ("gumbel", "reinforce"):
        message = error_of(lambda method=method: task("ds_resnet_tiny", method, (8, 16)))
        assert "no gate that decides between its routes" in message
    assert "for networks with one gate" in error_of(lambda: task("ds_resnet_tiny", "gumbel"))
    config = TrainConfig(scheme=SchemeConfig(name="label", joint="gumbel"))
    model = dsnet.create_model("ds_mbnet_tiny")
    views = Views(Augment(), MixConfig(), CHANNELS, seed=0, rank=0, device=torch.device("cpu"))
    assert "one rank" in error_of(
        lambda: JointObjective(config, model, views, ranks=Ranks(world=2), image_size=16)
    )


@pytest.mark.parametrize("method", ["gumbel", "reinforce"])
def test_gates_and_weights_learn_together_over_image_sizes(method: str) -> None:
    """Every size that an image drew trains its prefix and its statistics; the thumbnail counts."""
    objective = task("ds_mbnet_tiny", method, (8, 16))
    model = objective.model
    head = model.gate(0).routing
    with torch.no_grad():  # the largest size alone
        head.last.weight.zero_()
        head.last.bias.copy_(torch.tensor([100.0 * (r.image_size == 16) for r in model.space]))
    stem = model.networks[0].stem.norm
    before = stem.mean.clone()
    seen: list[tuple[int, bool]] = []
    stem.register_forward_hook(lambda m, args, out: seen.append((args[0].shape[-1], out.requires_grad)))
    values = objective.step(*batch(), 1)
    assert torch.isfinite(values["loss"])
    assert (stem.mean != before).any(1).tolist() == [True, True]
    assert {grad for size, grad in seen if size == 8} == {True}
    assert (16, True) in seen
    table = CostTable.of_model(model)
    for route in model.space:
        looked = prefix_cost(model.members[0].network, Shape(3, 8, 8))[0].madds()
        cost = dsnet.madds(model, route) + looked * (route.image_size == 16)
        assert objective.costs[route.choices] == cost / table.largest


def test_joint_training_over_image_sizes_needs_one_gate() -> None:
    message = error_of(lambda: task("ds_resnet_tiny", "reinforce", (8, 16)))
    assert "has no gate" in message
