"""Stage II of detectors: handmade losses, and that only the gate learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dsnet
from dsnet.core.seeding import seeded
from dsnet.core.settings import override
from dsnet.detection.data.dataset import Boxes
from dsnet.detection.io import Preprocessing, SavedDetector
from dsnet.detection.model.fssd import Detector, DetectorOutput
from dsnet.detection.train._gate import DetectorGateTask, gate_losses, mix_outputs
from dsnet.detection.train._loss import PriorTargets, correct_shares, multibox_loss, prior_targets
from dsnet.detection.train._task import calibrate_detector_bn
from dsnet.detection.train.config import DetectionConfig, DetectionDataConfig, DetectorGateConfig
from dsnet.training import Checkpoint
from dsnet.training.loop import LoopConfig, TrainingLoop
from dsnet.training.stage1.joint import gumbel_one_hot
from dsnet.training.stage2.losses import Strategy
from tests.support import error_of, randomise
from tests.support.boxes import SIZE, TABLE, made_up


def some_answers(
    routes: int = 3, images: int = 4, priors: int = 12
) -> tuple[list[DetectorOutput], PriorTargets]:
    draw = torch.Generator().manual_seed(0)
    answers = [
        DetectorOutput(
            torch.randn(images, priors, 4, generator=draw), torch.randn(images, priors, 3, generator=draw)
        )
        for _ in range(routes)
    ]
    classes = torch.zeros(images, priors, dtype=torch.long)
    classes[:, 2] = 1
    return answers, PriorTargets(torch.zeros(images, priors, 4), classes)


def test_a_one_hot_draw_selects_the_outputs_of_a_route() -> None:
    answers, targets = some_answers()
    taken = [0, 2, 1, 2]
    draw = torch.eye(3)[taken].requires_grad_()
    found = mix_outputs(answers, draw)
    for image, route in enumerate(taken):
        assert torch.equal(found.offsets[image], answers[route].offsets[image])
        assert torch.equal(found.logits[image], answers[route].logits[image])
    costs = torch.tensor([1.0, 2.0, 4.0])
    terms = gate_losses(
        torch.zeros(4, 3), draw, answers, targets, costs, total=8.0, gate=DetectorGateConfig()
    )
    own = [DetectorOutput(*(part[i : i + 1] for part in answers[route])) for i, route in enumerate(taken)]
    each = [
        multibox_loss(*a, PriorTargets(targets.offsets[i : i + 1], targets.classes[i : i + 1]))
        for i, a in enumerate(own)
    ]
    total = sum(float(loss.offsets + loss.classes) for loss in each) / 4
    assert terms["target"].item() == pytest.approx(total, rel=1e-5)
    assert terms["complexity"].item() == pytest.approx((1 / 16 + 1 + 1 / 4 + 1) / 4 / 4)
    assert terms["sgs"].item() == pytest.approx(float(torch.tensor(3.0).log()))
    terms["target"].backward()
    assert draw.grad is not None
    assert float(draw.grad.abs().min(1).values.max()) > 0


@pytest.mark.parametrize(("ratio", "wanted"), [(1.0, [0, 2, 2, 0]), (1e9, [0, 0, 0, 0])])
def test_images_are_easy_if_the_smallest_route_has_nearly_the_same_loss(
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
    draw = torch.eye(3)[wanted]
    gate = DetectorGateConfig(ratio=ratio)
    terms = gate_losses(scores, draw, answers, targets, torch.ones(3), total=1.0, gate=gate)
    assert terms["sgs"].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("strategy", "wanted"), [("try_best", [0, 2, 2]), ("give_up", [0, 2, 0])])
def test_the_strategy_decides_about_images_that_the_largest_route_does_not_solve(
    strategy: Strategy, wanted: list[int]
) -> None:
    """An easy image, one that only the largest route solves, and one that it does better but not well."""
    answers, targets = some_answers(images=3)
    logits = torch.zeros(3, 12, 3)
    logits[..., 0] = 9.0
    for image, (small, large) in enumerate([(9.0, 9.0), (-9.0, 9.0), (-9.0, -2.0)]):
        for route, value in ((0, small), (2, large)):
            answers[route].offsets[image] = 0
            answers[route].logits[image] = logits[image]
            answers[route].logits[image, 2] = torch.tensor([0.0, value, 0.0])
    assert correct_shares(answers[2].logits, targets).tolist() == [1, 1, 0]
    scores = torch.zeros(3, 3)
    scores[torch.arange(3), wanted] = 50.0
    gate = DetectorGateConfig(strategy=strategy)
    terms = gate_losses(scores, torch.eye(3)[wanted], answers, targets, torch.ones(3), total=1.0, gate=gate)
    assert terms["sgs"].item() == pytest.approx(0, abs=1e-6)


def test_shares_of_priors_with_the_right_class() -> None:
    logits = torch.eye(3)[torch.tensor([[1, 2, 0, 1], [1, 0, 0, 0]])]
    classes = torch.tensor([[1, 1, 2, 0], [0, 0, 0, 0]])
    assert correct_shares(logits, PriorTargets(torch.zeros(2, 4, 4), classes)).tolist() == pytest.approx(
        [1 / 3, 1]
    )


def test_bad_settings_are_errors() -> None:
    assert "solved must be at least 0 and at most 1, not 1.5" in error_of(
        lambda: DetectorGateConfig(solved=1.5)
    )
    wrong = error_of(lambda: override(DetectionConfig(), {"gate.strategy": "give up"}))
    assert "try_best" in wrong
    assert "give_up" in wrong


def training_of(gate: DetectorGateConfig) -> tuple[DetectorGateTask, torch.Tensor, Boxes]:
    """A tiny detector whose gate is to learn, with images and boxes."""
    torch.manual_seed(0)
    images, boxes, classes = made_up(8)
    detector = Detector(dsnet.create_model("ds_mbnet_tiny"), 2, TABLE)
    calibrate_detector_bn(detector, [images])
    padded = Boxes(torch.zeros(8, 2, 4), torch.full((8, 2), -1))
    for row, (own, kinds) in enumerate(zip(boxes, classes, strict=True)):
        padded.corners[row, : len(own)], padded.classes[row, : len(own)] = own, kinds
    found = SavedDetector(
        detector,
        ("red", "blue"),
        Preprocessing(SIZE, (0.5,) * 3, (0.25,) * 3),
        Checkpoint(tensors={}, data={}),
    )
    config = DetectionConfig(data=DetectionDataConfig(root="-", size=SIZE), gate=gate)
    task = DetectorGateTask(config, found, len(images), lambda number: [(images, padded)])
    return task, images, padded


def test_costs_are_shares_of_the_largest_route_of_the_whole_network() -> None:
    gate, images, boxes = training_of(DetectorGateConfig(space="0,1"))
    detector = gate.detector
    first, second, largest = (detector.cost(route, SIZE).madds() for route in (0, 1, 3))
    head = detector.network.gate(0).routing
    assert head is not None
    for taken, cost in ((0, first), (1, second)):
        with torch.no_grad():  # every draw falls on this choice
            head.last.weight.zero_()
            head.last.bias.copy_(100.0 * torch.eye(2)[taken])
        paid = gate.losses(images, boxes)["complexity"]
        assert paid.item() == pytest.approx((cost / largest) ** 2, rel=1e-5)


def test_a_step_runs_the_prefix_once_with_the_same_losses() -> None:
    gate, images, boxes = training_of(DetectorGateConfig())
    detector = gate.detector
    randomise(detector)
    with torch.no_grad():  # the same as two passes: the gate's own, and one for all routes
        targets = prior_targets(gate.priors, boxes)
        answers = list(detector.outputs(images, gate.routes))
        state = detector.network.run_prefix(images)
    scores = detector.network.gate_scores(state)
    draw = gumbel_one_hot(scores, seeded(0, "gate"))
    two = gate_losses(scores, draw, answers, targets, gate.costs, total=gate.total, gate=gate.config.gate)
    calls: list[object] = []
    first = detector.network.chain(())[0].block
    handle = first.register_forward_hook(lambda *_: calls.append(None))
    one = gate.losses(images, boxes)
    handle.remove()
    assert len(calls) == 1
    assert list(one) == list(two)
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_only_the_gate_learns(tmp_path: Path) -> None:
    settings = DetectorGateConfig(
        space="0,3", epochs=30, batch=8, target=0.0, sgs=0.0, complexity=5.0, lr=0.5
    )
    gate, images, _ = training_of(settings)
    detector = gate.detector
    assert [route.number for route in gate.routes] == [0, 3]
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    TrainingLoop(gate, LoopConfig(epochs=30, save_minutes=None), tmp_path).run()
    changed = {name for name, value in detector.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".routing." in name for name in changed)
    assert detector.route(images).tolist() == [0] * 8  # cost alone: the cheapest


@pytest.mark.gpu
def test_heads_on_a_gpu_equal_those_on_the_host() -> None:
    here, there = dsnet.create_model("ds_mbnet_tiny"), dsnet.create_model("ds_mbnet_tiny").cuda()
    for network in (here, there):
        network.reset_routing(generator=torch.Generator().manual_seed(3))
    ours, theirs = (network.gate(0).routing for network in (here, there))
    assert ours is not None
    assert theirs is not None
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert b.is_cuda
        assert torch.equal(a, b.cpu())
