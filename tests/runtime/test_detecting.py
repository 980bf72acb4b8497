"""Plans of detectors: how their backend is chosen, and programs as a GPU replays them, without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

import dsnet
from dsnet import runtime
from dsnet.detection.fssd import Detector
from dsnet.runtime import making
from dsnet.runtime.backends import get_backend
from dsnet.runtime.choose import Choice
from dsnet.runtime.detecting import DetectorPlan
from dsnet.runtime.detector_parts import split_detector
from dsnet.runtime.graphed import Graphed
from tests.detection.test_fssd import NAMES, TABLE
from tests.detection.test_fssd import detector as detector_of
from tests.support import assert_close, images


def test_auto_times_what_runs_all_of_a_detector() -> None:
    asked: list[Sequence[str]] = []

    def choose(model: object, *, candidates: Sequence[str], **given: Any) -> Choice:  # noqa: ANN401
        asked.append(candidates)
        return Choice("eager", {}, measured=True)

    detector = Detector(dsnet.create_model("ds_mbnet_tiny"), 2, TABLE).eval()
    with mock.patch.object(making, "choose_backend", choose):
        plan = runtime.compile(detector)
    assert plan.engine.backend == "eager"
    assert "triton" not in asked[0]
    assert {"eager", "inductor", "openvino"} <= set(asked[0])


def recorded(detector: Detector, size: int, routes: list[int] | None = None) -> DetectorPlan:
    backend = type(get_backend("cudagraphs"))
    with (
        mock.patch.object(backend, "missing", return_value=None),
        mock.patch.object(backend, "recorded", return_value=True),
    ):
        return runtime.compile(
            detector, backend="cudagraphs", image_size=size, batch_buckets=(1, 4), routes=routes
        )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_behind_the_projections_runs_for_all_routes_at_once(name: str) -> None:
    detector, size = detector_of(name), 32
    network = detector.network
    x = images(network, 7, size=size)
    plan = recorded(detector, size)
    graphed = plan.engine.graphed
    assert isinstance(graphed, Graphed)
    assert graphed.end is not None
    expected, found = detector(x), plan.run(x)
    assert torch.equal(found.routes, detector.route(x))
    for got, want in zip(found.answers, expected, strict=True):
        assert_close(got, want, 1e-10)
    ways = [network.space[i % len(network.space)] for i in range(7)]  # whatever the gate would take
    given = torch.tensor([route.choices for route in ways])
    mixed = plan._answers(graphed.run(x, given=given).logits)
    for i, route in enumerate(ways):
        alone = detector(x[i : i + 1], route)
        assert_close(mixed.offsets[i : i + 1], alone.offsets, 1e-10)
        assert_close(mixed.logits[i : i + 1], alone.logits, 1e-10)
    for route in (network.space.smallest, network.space.largest):
        assert_close(plan(x, route).logits, detector(x, route).logits, 1e-10)
        state = plan.engine.enter(x)  # as a session asks, part by part
        row = plan.engine.finish(state, route.choices)
        assert_close(plan._answers(row).logits, detector(x, route).logits, 1e-10)


def test_some_routes_of_a_detector() -> None:
    detector = detector_of(NAMES[0])
    x = images(detector.network, 3, size=32)
    assert_close(recorded(detector, 32, [1])(x, 1).logits, detector(x, 1).logits, 1e-10)
    plan = recorded(detector, 32, [0, 3])
    graphed = plan.engine.graphed
    assert isinstance(graphed, Graphed)
    found = plan._answers(graphed.run(x, given=torch.tensor([[3], [0], [3]])).logits)
    for i, number in enumerate((3, 0, 3)):
        assert_close(found.logits[i : i + 1], detector(x[i : i + 1], number).logits, 1e-10)


@pytest.mark.parametrize("choices", [(0, 2, 3), (1,)])
@pytest.mark.parametrize("name", NAMES)
def test_parts_that_end_with_the_fused_map(name: str, choices: tuple[int, ...]) -> None:
    detector = detector_of(name)
    x = images(detector.network, len(choices), size=16)
    parts, end = split_detector(detector, choices, fused=True, image_size=16)
    features, _ = parts[()].module(x)
    rows = torch.cat([parts[c,].module(features[i : i + 1]) for i, c in enumerate(choices)])
    assert rows.shape == (len(choices), end.numbers)
    answers = end.module(rows, torch.arange(len(choices)))
    for i, route in enumerate(choices):
        alone = detector(x[i : i + 1], route)
        assert_close(answers[i], torch.cat([alone.offsets.flatten(), alone.logits.flatten()]), 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudagraphs", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, backend: str) -> None:
    detector = copy.deepcopy(detector_of(name)).cuda().float()
    network = detector.network
    x = images(network, 7, size=32).cuda()
    plan = runtime.compile(detector, backend=backend, image_size=32, batch_buckets=(1, 4))
    assert torch.equal(plan.route(x), detector.route(x))
    graphed = plan.engine.graphed
    assert graphed is not None
    ways = [network.space[i % len(network.space)] for i in range(7)]
    given = torch.tensor([route.choices for route in ways], device="cuda")
    for _ in range(2):
        found = plan._answers(graphed.run(x, given=given).logits)
        for i, route in enumerate(ways):
            alone = detector(x[i : i + 1], route)
            assert_close(found.offsets[i : i + 1], alone.offsets, 1e-3)
            assert_close(found.logits[i : i + 1], alone.logits, 1e-3)
    together = plan.detect(x, score=0.0, most=5)
    for i in (0, 5):
        (alone_found,) = plan.detect(x[i : i + 1], score=0.0, most=5)
        assert alone_found.boxes == pytest.approx(together[i].boxes, abs=1e-3)
