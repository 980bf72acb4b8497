"""The passes of a training step against the loss of all routes together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.detection.model.fssd import Detector
from dsnet.detection.train._loss import PriorTargets, multibox_loss
from dsnet.detection.train._route_passes import GraphedRoutePasses, RoutePasses
from tests.support import assert_close
from tests.support.boxes import SIZE, TABLE, made_up, reference_targets
from tests.support.replays import pretend_cuda


def setting(name: str) -> tuple[Detector, Tensor, PriorTargets]:
    torch.manual_seed(0)
    detector = Detector(dsnet.create_model(name, dtype=torch.float64), 2, TABLE).train()
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    images, boxes, classes = made_up(4)
    targets = reference_targets(detector.priors(SIZE), [box.double() for box in boxes], classes)
    return detector, images.double(), targets


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_mbnet_plus_tiny"])
def test_passes_equal_the_mean_loss_of_all_routes(name: str) -> None:
    detector, x, targets = setting(name)
    whole, space = copy.deepcopy(detector), detector.network.space
    routes = [space.largest, space.smallest, space[1]]
    passes = RoutePasses(detector).step(x, targets, routes)
    losses = [multibox_loss(*answers, targets).mean() for answers in whole.outputs(x, routes)]
    torch.stack(losses).mean().backward()
    assert_close(
        torch.stack([loss.offsets + loss.classes for loss in passes]), torch.stack(losses), 1e-6
    )  # losses are float32
    for (key, a), b in zip(detector.named_parameters(), whole.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6), key
    for a, b in zip(detector.buffers(), whole.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_mbnet_plus_tiny"])
def test_replays_equal_eager_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    detector, x, targets = setting(name)
    other, space = copy.deepcopy(detector), detector.network.space
    ours, theirs = GraphedRoutePasses(detector), RoutePasses(other)
    for number in range(3):
        routes = [space.largest, space.smallest, space[1 + number % 2]]
        seen = x + number
        rolled = PriorTargets(*(tensor.roll(number, 0) for tensor in targets))
        for network in (detector, other):
            if number != 2:  # the third step adds to the gradients of the second
                network.zero_grad()
        assert ours.step(seen, rolled, routes) == theirs.step(seen, rolled, routes)
        for (key, a), b in zip(detector.named_parameters(), other.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), key
            assert a.grad is None or torch.equal(a.grad, b.grad), key
        for a, b in zip(detector.buffers(), other.buffers(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_mbnet_plus_tiny"])
def test_cuda_graphs_equal_eager_passes(name: str) -> None:
    detector, x, targets = setting(name)
    detector, x = detector.cuda().float(), x.cuda().float()
    targets = PriorTargets(*(tensor.cuda() for tensor in targets))
    other, space = copy.deepcopy(detector), detector.network.space
    ours, theirs = GraphedRoutePasses(detector), RoutePasses(other)
    for number in range(4):
        routes = [space.largest, space.smallest, space[1 + number % 2]]
        for network in (detector, other):
            network.zero_grad()
        losses, expected = (p.step(x + number, targets, routes) for p in (ours, theirs))
        assert_close(
            torch.stack([*map(torch.stack, losses)]), torch.stack([*map(torch.stack, expected)]), 1e-4
        )
        for (key, a), b in zip(detector.named_parameters(), other.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), key
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-2, atol=1e-4), key
        for a, b in zip(detector.buffers(), other.buffers(), strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5)
