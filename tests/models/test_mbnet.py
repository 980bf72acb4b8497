"""MobileNetV1 as a supernet of one route equals the plain network, and is routed without decisions."""

from __future__ import annotations

import torch

import dsnet
from dsnet import runtime
from dsnet.detection.model.fssd import Detector
from tests.support import assert_close, error_of


def test_mbnet_equals_the_plain_network() -> None:
    network: dsnet.Supernet = dsnet.create_model("mbnet", num_classes=7)
    plain = dsnet.create_model("mobilenet_v1", num_classes=7)
    assert len(network.space) == 1
    assert dsnet.madds(network, 0) == dsnet.madds(plain)
    theirs = [(tuple(p.shape)) for p in plain.parameters()]
    assert sorted(tuple(p.shape) for p in network.parameters()) == sorted(theirs)
    weights = [p for name, p in network.named_parameters() if p.ndim == 4]
    others = [p for p in plain.parameters() if p.ndim == 4]
    with torch.no_grad():
        for own, other in zip(weights, others, strict=True):  # in the order of the layers
            other.copy_(own)
        linear = [p for name, p in plain.named_parameters() if name.startswith("head")]
        linear[0].copy_(network.head.classifier.weight)
        linear[1].copy_(network.head.classifier.bias)
    x = torch.randn(2, 3, 64, 64)
    assert_close(network(x, 0), plain.eval()(x), 1e-5)


def test_mbnet_has_one_choice() -> None:
    network: dsnet.Supernet = dsnet.create_model("mbnet", num_classes=5)
    x = torch.randn(3, 3, 64, 64)
    assert network.route(x).tolist() == [[0]] * 3
    assert torch.equal(network(x), network(x, 0))
    network.reset_routing()
    assert "nothing to decide" in error_of(lambda: network.gate(0).replace_routing((0, 1)))
    plan = runtime.compile(network, backend="eager", image_size=64)
    assert_close(plan(x), network(x), 1e-5)
    assert_close(dsnet.extract(network, 0)(x), network(x), 1e-5)


def test_a_detector_runs_on_mbnet() -> None:
    detector = Detector(dsnet.create_model("mbnet"), 3).eval()
    x = torch.randn(2, 3, 64, 64)
    answers, alone = detector(x), detector(x[1:], 0)
    assert answers.logits.shape == (2, len(detector.priors(64)), 4)
    assert_close(answers.logits[1:], alone.logits, 1e-5)
    plan = runtime.compile(detector, backend="eager", image_size=64)
    assert_close(plan(x).offsets, answers.offsets, 1e-5)
