"""A tiny detector on generated images: squares and stripes on noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.detection import GroundTruth, mean_average_precision
from dsnet.detection.boxes import encode, to_centres
from dsnet.detection.model.fssd import Detector
from dsnet.detection.postprocess import decode_detections
from dsnet.detection.train._loss import multibox_loss
from dsnet.detection.train._task import calibrate_detector_bn
from dsnet.slicing import KeyState
from tests.support import assert_close, error_of
from tests.support.boxes import SIZE, TABLE, made_up, reference_targets


def test_outputs_decode_to_boxes() -> None:
    priors = to_centres(torch.tensor([[0.1, 0.1, 0.5, 0.5], [0.12, 0.1, 0.5, 0.5], [0.6, 0.6, 0.9, 0.9]]))
    boxes = torch.tensor([[0.2, 0.1, 0.5, 0.4], [0.2, 0.1, 0.5, 0.42], [0.5, 0.5, 1.2, 0.8]])
    logits = torch.tensor([[0.0, 3.0, 0.0], [0.0, 2.0, 0.0], [0.0, -9.0, 1.0]])[None]
    (found,) = decode_detections(encode(boxes, priors)[None], logits, priors, score=0.2)
    likely = logits[0].softmax(1)
    assert found.classes.tolist() == [0, 1]  # the second is a repetition of the first
    assert found.scores.tolist() == pytest.approx([likely[0, 1].item(), likely[2, 2].item()])
    assert found.boxes[0].tolist() == pytest.approx([0.2, 0.1, 0.5, 0.4], abs=1e-6)
    assert found.boxes[1].tolist() == pytest.approx([0.5, 0.5, 1.0, 0.8], abs=1e-6)  # cut at the border
    assert decode_detections(torch.zeros(0, 3, 4), torch.zeros(0, 3, 3), priors) == []
    (nothing,) = decode_detections(encode(boxes, priors)[None], logits - torch.tensor([-99.0, 0, 0]), priors)
    assert nothing.boxes.shape == (0, 4)


def test_every_route_learns_eight_images() -> None:
    torch.manual_seed(0)
    detector = Detector(dsnet.create_model("ds_mbnet_tiny"), 2, TABLE).train()
    images, boxes, classes = made_up(8)
    targets = reference_targets(detector.priors(SIZE), boxes, classes)
    space = detector.network.space
    optimiser = torch.optim.AdamW(detector.parameters(), lr=5e-3)
    steps = 120
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 5e-3 * (1 - step / steps)
        optimiser.zero_grad()
        between = space[1 + step % (len(space) - 2)]
        for answers in list(detector.outputs(images, [space.largest, space.smallest, between])):
            multibox_loss(*answers, targets).mean().backward(retain_graph=True)
        optimiser.step()
    assert calibrate_detector_bn(detector, [images]) == 8
    truths = [
        GroundTruth(box.double().numpy(), kind.numpy()) for box, kind in zip(boxes, classes, strict=True)
    ]
    detector.eval()
    for route in space:
        found = decode_detections(*detector(images, route), detector.priors(SIZE))
        assert mean_average_precision(found, truths, "voc2010").mean > 0.9, route


def test_calibrated_statistics_equal_those_of_the_pass() -> None:
    detector = Detector(dsnet.create_model("ds_mbnet_tiny", dtype=torch.float64), 2, TABLE)
    x = torch.randn(16, 3, SIZE, SIZE, dtype=torch.float64)
    assert calibrate_detector_bn(detector, [x]) == 16
    assert all(state is KeyState.CALIBRATED for norm in detector.norms() for state in norm.states)
    route = detector.network.space[2]
    fused: list[Tensor] = []
    hook = detector.norm.register_forward_hook(lambda module, given, y: fused.append(given[0]))
    detector.eval()(x, route)
    hook.remove()
    assert_close(detector.norm.mean[2], fused[0].mean((0, 2, 3)), 1e-6)
    assert_close(detector.norm.var[2], fused[0].var((0, 2, 3), unbiased=False), 1e-6)
    assert "no images" in error_of(lambda: calibrate_detector_bn(detector, []))
