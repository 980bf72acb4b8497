"""The detector: outputs in any batch, priors that do not depend on the route, costs of all layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsnet
from dsnet.detection.boxes import priors_per_position
from dsnet.detection.model.fssd import Detector, FssdTable
from dsnet.detection.train._loss import multibox_loss
from tests.support import assert_close, error_of, images
from tests.support.boxes import reference_targets
from tests.support.detectors import NAMES, TABLE, detector


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [16, 32])
def test_every_route_predicts_each_prior(name: str, size: int) -> None:
    made = detector(name)
    x = images(made.network, 2, size=size)
    priors = made.priors(size)
    assert made.sizes(size) == [(size // 2, size // 2), (size // 4, size // 4)]
    assert len(priors) == (size // 2) ** 2 * priors_per_position((2.0,)) + (
        size // 4
    ) ** 2 * priors_per_position((2.0, 3.0))
    answers = [made(x, route) for route in made.network.space]
    for found in answers:
        assert found.offsets.shape == (2, len(priors), 4)
        assert found.logits.shape == (2, len(priors), 4)
    assert not torch.equal(answers[0].logits, answers[-1].logits)


@pytest.mark.parametrize("name", NAMES)
def test_routed_outputs_equal_those_of_the_route_for_any_batch(name: str) -> None:
    made = detector(name)
    x = images(made.network, 9, size=16)
    found, routes = made(x), made.route(x).tolist()
    assert len(set(routes)) > 1
    for i, route in enumerate(routes):
        for got, alone, gated in zip(found, made(x[i : i + 1], route), made(x[i : i + 1]), strict=True):
            assert_close(got[i : i + 1], alone, 1e-9)
            assert_close(got[i : i + 1], gated, 1e-9)
    assert made(x[:0]).offsets.shape == (0, len(made.priors(16)), 4)


def test_a_position_predicts_its_own_priors() -> None:
    """What one position of a map is changed by is what its priors are answered by."""
    made = detector("ds_mbnet_tiny")
    seen: list[Tensor] = []
    hook = made.pyramid[1].register_forward_hook(lambda module, given, y: seen.append(y))
    found = made(images(made.network, 1, size=16), 0)
    hook.remove()
    (y,) = seen
    first = (16 // 2) ** 2 * priors_per_position((2.0,))
    i, j, prior = 2, 1, 3
    at = first + (i * 4 + j) * priors_per_position((2.0, 3.0)) + prior
    window = nn.functional.pad(y, [1] * 4)[0, :, i : i + 3, j : j + 3]
    head = made.kinds[1]
    assert isinstance(head, nn.Conv2d)
    assert head.bias is not None
    weight, bias = head.weight[prior * 4 : prior * 4 + 4], head.bias[prior * 4 : prior * 4 + 4]
    assert_close(found.logits[0, at], (weight * window).sum((1, 2, 3)) + bias, 1e-9)
    centre = made.priors(16)[at, :2].tolist()
    assert centre == pytest.approx([(j + 0.5) / 4, (i + 0.5) / 4])


@pytest.mark.parametrize("name", NAMES)
def test_costs_equal_those_of_the_layers_that_ran(name: str) -> None:
    made = detector(name)
    counted: list[int] = []

    def count(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        ins = given[0].shape[1] // getattr(module, "groups", 1) if not isinstance(module, nn.Conv2d) else None
        kernel = module.kernel_size[0] if isinstance(module, nn.Conv2d) else module.kernel
        counted.append(y[0].numel() * kernel**2 * (given[0].shape[1] if ins is None else ins))

    own = (made.projections, made.pyramid, made.places, made.kinds)
    layers = [m for part in own for m in part.modules() if type(m).__name__ in ("SlicedConv2d", "Conv2d")]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    for route in (made.network.space.smallest, made.network.space.largest):
        counted.clear()
        made(images(made.network, 1, size=16), route)
        network_alone = made.cost(route, 16).madds() - sum(counted)
        head = made.network.head.cost(list(made.network.feature_shapes(route, 16).values())[-1], None)[0]
        assert network_alone == dsnet.madds(made.network, route, 16) - head.madds()
    for hook in hooks:
        hook.remove()


def test_every_parameter_gets_gradients_and_every_norm_a_key_per_route() -> None:
    made = Detector(dsnet.create_model("ds_mbnet_tiny"), 2, TABLE).train()
    assert {norm.keys for norm in made.norms()} == {len(made.network.space)}
    assert len(made.norms()) == 2 + 1 + 2
    x, priors = torch.randn(4, 3, 16, 16), made.priors(16)
    boxes = [torch.tensor([[0.1, 0.1, 0.6, 0.7]])] * 4
    targets = reference_targets(priors, boxes, [torch.tensor([1])] * 4)
    loss = multibox_loss(*made(x, 2), targets).mean()
    loss.backward()
    without = [n for n, p in made.named_parameters() if p.grad is None and not n.startswith("network.")]
    assert without == []
    stem = made.network.get_parameter("stem.conv.weight").grad
    assert stem is not None
    assert float(stem.abs().sum()) > 0


def test_unsuitable_networks_and_tables_are_errors() -> None:
    assert "one gate" in error_of(lambda: Detector(dsnet.create_model("ds_resnet_tiny"), 2, TABLE))
    message = error_of(lambda: Detector(dsnet.create_model("ds_mbnet_tiny"), 2))
    assert "no features of stride 16, 32, only of 1, 2, 4, 8" in message
    assert "(at least 1), got 1" in error_of(lambda: FssdTable(ratios=((2.0,),)))
    assert "strides must rise" in error_of(lambda: FssdTable(strides=(16, 8)))
    assert "strides must rise" in error_of(lambda: FssdTable(strides=()))
    assert "at least 1" in error_of(lambda: FssdTable(project=0))


def test_the_detector_of_the_paper_has_about_its_cost() -> None:
    """DS-MBNet-S and -L at 320 pixels: 2.3 and 3.2 billion multiply-adds (Table "voc"), gates included."""
    made = Detector(dsnet.create_model("ds_mbnet"), 20)
    small, large = (made.cost(route, 320).madds() / 1e9 for route in (0, 13))
    assert 2.2 < small < 2.5
    assert 3.1 < large < 3.4
