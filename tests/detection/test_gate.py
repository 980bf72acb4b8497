"""What a detector's gate pays, by hand; and that nothing else learns."""

from __future__ import annotations

import pytest
import torch

import dsnet
from dsnet.detection.calibrate import recalibrate_detector
from dsnet.detection.config import BoxData, DetectConfig, DetectorGate
from dsnet.detection.fssd import Answers, Detector
from dsnet.detection.gate import GateTraining, gate_terms, mixed
from dsnet.detection.loss import Targets, multibox_loss
from dsnet.detection.pictures import Boxes
from dsnet.detection.saved import Prepared, SavedDetector
from dsnet.training import Checkpoint
from dsnet.training.loop import Watch
from tests.detection.test_learning import SIZE, TABLE, made_up


def some_answers(routes: int = 3, images: int = 4, priors: int = 12) -> tuple[list[Answers], Targets]:
    draw = torch.Generator().manual_seed(0)
    answers = [
        Answers(
            torch.randn(images, priors, 4, generator=draw), torch.randn(images, priors, 3, generator=draw)
        )
        for _ in range(routes)
    ]
    classes = torch.zeros(images, priors, dtype=torch.long)
    classes[:, 2] = 1
    return answers, Targets(torch.zeros(images, priors, 4), classes)


def test_a_one_hot_draw_takes_a_routes_answers() -> None:
    answers, targets = some_answers()
    taken = [0, 2, 1, 2]
    draw = torch.eye(3)[taken].requires_grad_()
    found = mixed(answers, draw)
    for image, route in enumerate(taken):
        assert torch.equal(found.offsets[image], answers[route].offsets[image])
        assert torch.equal(found.logits[image], answers[route].logits[image])
    terms = gate_terms(torch.zeros(4, 3), draw, answers, targets, torch.tensor([1.0, 2.0, 4.0]), 1.1)
    own = [Answers(*(part[i : i + 1] for part in answers[route])) for i, route in enumerate(taken)]
    each = [
        multibox_loss(*a, Targets(targets.offsets[i : i + 1], targets.classes[i : i + 1]))
        for i, a in enumerate(own)
    ]
    total = sum(float(loss.place + loss.kind) for loss in each) / 4
    assert terms["target"].item() == pytest.approx(total, rel=1e-5)
    assert terms["complexity"].item() == pytest.approx((1 / 16 + 1 + 1 / 4 + 1) / 4)
    assert terms["sgs"].item() == pytest.approx(float(torch.tensor(3.0).log()))
    terms["target"].backward()
    assert draw.grad is not None
    assert float(draw.grad.abs().min(1).values.max()) > 0


@pytest.mark.parametrize(("ratio", "wanted"), [(1.0, [0, 2, 2, 0]), (1e9, [0, 0, 0, 0])])
def test_easy_images_are_those_that_the_smallest_route_answers_nearly_as_well(
    ratio: float, wanted: list[int]
) -> None:
    answers, targets = some_answers()
    with torch.no_grad():
        for image in (1, 2):  # there the largest route is right
            answers[2].offsets[image] = 0
            answers[2].logits[image] = -2.0
            answers[2].logits[image, torch.arange(12), targets.classes[image]] = 2.0
        for image in (0, 3):
            for part in (0, 1):
                answers[2][part][image] = answers[0][part][image]
    scores = torch.zeros(4, 3)
    scores[torch.arange(4), wanted] = 50.0  # a gate that is sure of it pays nothing
    terms = gate_terms(scores, torch.eye(3)[wanted], answers, targets, torch.ones(3), ratio)
    assert terms["sgs"].item() == pytest.approx(0, abs=1e-6)


def test_the_gate_learns_and_nothing_else() -> None:
    torch.manual_seed(0)
    images, boxes, classes = made_up(8)
    detector = Detector(dsnet.create_model("ds_mbnet_tiny"), 2, TABLE)
    recalibrate_detector(detector, [images])
    padded = Boxes(torch.zeros(8, 2, 4), torch.full((8, 2), -1))
    for row, (own, kinds) in enumerate(zip(boxes, classes, strict=True)):
        padded.corners[row, : len(own)], padded.classes[row, : len(own)] = own, kinds
    config = DetectConfig(
        data=BoxData(root="-", size=SIZE),
        gate=DetectorGate(space="0,3", epochs=30, batch=8, target=0.0, sgs=0.0, complexity=5.0, lr=0.5),
    )
    found = SavedDetector(
        detector, ("red", "blue"), Prepared(SIZE, (0.5,) * 3, (0.25,) * 3), Checkpoint(tensors={}, data={})
    )
    gate = GateTraining(config, found, None)
    assert [route.number for route in gate.routes] == [0, 3]
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    gate.train(lambda epoch: iter([(images, padded)]), 1, Watch())
    changed = {name for name, value in detector.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".routing." in name for name in changed)
    assert detector.route(images).tolist() == [0] * 8  # cost alone: the cheapest


@pytest.mark.gpu
def test_heads_on_a_gpu_are_those_on_the_host() -> None:
    here, there = dsnet.create_model("ds_mbnet_tiny"), dsnet.create_model("ds_mbnet_tiny").cuda()
    for network in (here, there):
        network.reset_routing(generator=torch.Generator().manual_seed(3))
    ours, theirs = (network.gate(0).routing for network in (here, there))
    assert ours is not None
    assert theirs is not None
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert b.is_cuda
        assert torch.equal(a, b.cpu())
