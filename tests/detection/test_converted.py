"""Detectors on converted networks."""

from __future__ import annotations

import torch

import dsnet
from dsnet import runtime
from dsnet.detection.model.fssd import Detector
from tests.support import assert_close, spread_gates
from tests.support.detectors import TABLE
from tests.support.small_networks import plain_cnn, random_images, randomise_module


def test_packed_routes_of_a_detector_equal_slices_of_the_converted_network() -> None:
    """Maps of strides 2 and 4 come from slices of the network, or from its extracted routes."""
    network = randomise_module(plain_cnn().double(), seed=1).eval()
    model = dsnet.convert(network, random_images(1, 32), widths=(0.25, 0.5, 1.0))
    x = random_images(6, 32)
    detector = Detector(model, 3, TABLE, generator=torch.Generator().manual_seed(0)).eval()
    detector = detector.double().requires_grad_(False)
    spread_gates(model, x)
    assert len(set(model.route(x).flatten().tolist())) > 1
    plans = [
        runtime.compile(detector, backend="eager", memory=memory, image_size=32)
        for memory in ("packed", "shared")
    ]
    packed, shared = (plan.boxes(plan.plan(x), score=0.0) for plan in plans)
    for one, other in zip(packed, shared, strict=True):
        assert len(one.scores) > 0
        for field in ("scores", "boxes"):
            assert_close(*(torch.as_tensor(getattr(d, field)) for d in (one, other)), 1e-6)
