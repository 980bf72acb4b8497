"""Plans of detectors: the choice of their backend, and CUDA graphs, replayed without a GPU."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import dsnet
from dsnet import runtime
from dsnet.detection import postprocess as found_boxes
from dsnet.detection.deploy import plan as detecting
from dsnet.detection.deploy._partition import split_detector
from dsnet.detection.deploy.plan import DetectorPlan
from dsnet.detection.eval.metrics import Detections
from dsnet.detection.model.fssd import Detector
from dsnet.detection.postprocess import best_boxes, decode_detections
from dsnet.errors import DsnetError
from dsnet.runtime import api
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors.grouped import GroupedExecutor
from tests.support import assert_close, error_of, images
from tests.support.detectors import NAMES, TABLE
from tests.support.detectors import detector as detector_of


@pytest.mark.parametrize("known", [True, False])
def test_auto_times_the_backends_that_run_the_whole_detector(known: bool) -> None:
    asked: list[Sequence[str]] = []

    def choose(model: object, *, candidates: Sequence[str], **given: Any) -> str:  # noqa: ANN401
        asked.append(candidates)
        return "eager"

    detector = Detector(dsnet.create_model("ds_mbnet_tiny"), 2, TABLE).eval()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(api, "choose_backend", choose))
        if not known:
            patches.enter_context(mock.patch.object(api, "unsupported", return_value="a reason"))
        plan = runtime.compile(detector)
    assert plan.network.backend == "eager"
    assert ("triton" in asked[0]) is known
    assert {"eager", "inductor", "openvino"} <= set(asked[0])


def recorded(detector: Detector, size: int, routes: list[int] | None = None) -> DetectorPlan:
    backend = type(get_backend("cudagraphs"))
    with (
        mock.patch.object(backend, "unavailable", return_value=None),
        mock.patch.object(backend, "captures", return_value=True),
    ):
        return runtime.compile(
            detector, backend="cudagraphs", image_size=size, batch_buckets=(1, 4), routes=routes
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_shared_head_runs_mixed_batches(name: str) -> None:
    detector, size = detector_of(name), 32
    network = detector.network
    x = images(network, 7, size=size)
    plan = recorded(detector, size)
    executor = plan.network.executor
    assert isinstance(executor, GroupedExecutor)
    assert executor.head is not None
    expected, found = detector(x), plan.run(x)
    assert torch.equal(found.routes, detector.route(x))
    for got, want in zip(found.output, expected, strict=True):
        assert_close(got, want, 1e-10)
    ways = [network.space[i % len(network.space)] for i in range(7)]  # whatever the gate would take
    given = torch.tensor([route.choices for route in ways])
    mixed = plan.split(executor.run_assigned(x, given).logits)
    for i, route in enumerate(ways):
        alone = detector(x[i : i + 1], route)
        assert_close(mixed.offsets[i : i + 1], alone.offsets, 1e-10)
        assert_close(mixed.logits[i : i + 1], alone.logits, 1e-10)
    for route in (network.space.smallest, network.space.largest):
        assert_close(plan(x, route).logits, detector(x, route).logits, 1e-10)
        state = plan.network.run_prefix(x)  # as a session asks, part by part
        row = plan.network.run_last_segment(state, route.choices)
        assert_close(plan.split(row).logits, detector(x, route).logits, 1e-10)


def test_a_plan_of_some_routes() -> None:
    detector = detector_of(NAMES[0])
    x = images(detector.network, 3, size=32)
    assert_close(recorded(detector, 32, [1])(x, 1).logits, detector(x, 1).logits, 1e-10)
    plan = recorded(detector, 32, [0, 3])
    executor = plan.network.executor
    assert isinstance(executor, GroupedExecutor)
    found = plan.split(executor.run_assigned(x, torch.tensor([[3], [0], [3]])).logits)
    for i, number in enumerate((3, 0, 3)):
        assert_close(found.logits[i : i + 1], detector(x[i : i + 1], number).logits, 1e-10)


@pytest.mark.parametrize("choices", [(0, 2, 3), (1,)])
@pytest.mark.parametrize("name", NAMES)
def test_segments_that_end_with_the_fused_map(name: str, choices: tuple[int, ...]) -> None:
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


def rows_of(plan: DetectorPlan, images: int, seed: int = 0) -> Tensor:
    """DetectorOutput like those of the plan, of which some are sure."""
    answers = plan.network.classes
    draw = torch.Generator().manual_seed(seed)
    row = torch.randn(images, answers, generator=draw) * 2
    return row.to(plan.network.device, plan.network.precision)


def plainly(plan: DetectorPlan, row: Tensor, **setting: float) -> list[Detections]:
    return decode_detections(*plan.split(row), plan.priors, **setting)  # type: ignore[arg-type]


def check_same(found: list[Detections], expected: list[Detections]) -> None:
    for own, right in zip(found, expected, strict=True):
        for name in ("boxes", "scores", "classes"):
            np.testing.assert_array_equal(getattr(own, name), getattr(right, name))
            assert getattr(own, name).dtype == getattr(right, name).dtype


def padded_boxes(*given: Tensor, max_detections: int, **setting: float) -> Tensor:
    """Find boxes, padded to a fixed number of rows as the kernels pad them."""
    found = best_boxes(*given, max_detections=max_detections, **setting)
    return torch.cat([found, found.new_full((len(found), max_detections - found.shape[1], 6), -1.0)], 1)


@pytest.fixture
def has_static_shape() -> Iterator[None]:
    """As on a GPU."""
    with (
        mock.patch.object(detecting, "has_static_shape", lambda device, priors, classes, most: most > 0),
        mock.patch.object(detecting, "best_boxes", padded_boxes),
    ):
        yield


def in_threads(plan: DetectorPlan, times: int, **setting: Any) -> None:  # noqa: ANN401
    """Two of them at once, each with answers of its own."""
    given = [rows_of(plan, 2, seed) for seed in (1, 2)]
    expected = [plainly(plan, row, **setting) for row in given]
    wrong: list[BaseException] = []

    def call(number: int) -> None:
        try:
            for _ in range(times):
                check_same(plan.boxes(given[number], **setting), expected[number])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_boxes_without_kernels() -> None:
    detector = detector_of(NAMES[0])
    plan, x = recorded(detector, 16), images(detector.network, 3, size=16)
    check_same(
        plan.detect(x, score=0.1, max_detections=7), plainly(plan, plan.plan(x), score=0.1, max_detections=7)
    )
    assert plan.decoder is not None
    assert not plan.decoder.graphs
    eager = runtime.compile(detector, backend="eager", image_size=16)
    assert eager.decoder is None
    check_same(eager.detect(x, 1), plainly(eager, eager.plan(x, 1), score=0.3))
    assert eager.boxes(eager.plan(x)[:0]) == plan.boxes(plan.plan(x)[:0]) == []
    with pytest.raises(DsnetError, match="as this plan returns, got"):
        plan.boxes(plan.plan(x)[:, :1])
    with pytest.raises(DsnetError, match="at least 0, not -1"):
        plan.detect(x, max_detections=-1)


@pytest.mark.usefixtures("has_static_shape")
def test_boxes_by_captured_graphs() -> None:
    plan = recorded(detector_of(NAMES[0]), 16)
    assert plan.decoder is not None
    for count in (1, 2, 3, 4, 6):  # there is room for 4
        for score, most in ((0.3, 200), (0.3, 3), (0.6, 200)):
            row = rows_of(plan, count, count)
            found = plan.boxes(row, score=score, max_detections=most)
            check_same(found, plainly(plan, row, score=score, max_detections=most))
            assert all(0 < len(own.scores) <= most for own in found)
    assert len(plan.decoder.graphs) == 3 * 3  # for 1, 2 and 4 images
    row = rows_of(plan, 2).float()
    check_same(plan.boxes(row, overlap=0.1), plainly(plan, row, score=0.3, overlap=0.1))
    for most in (200, 0):
        nothing = plan.boxes(row, score=1.0, max_detections=most)
        assert [(own.boxes.shape, own.scores.shape) for own in nothing] == [((0, 4), (0,))] * 2
    assert plan.boxes(row[:0]) == []


@pytest.mark.usefixtures("has_static_shape")
def test_detections_by_captured_graphs() -> None:
    detector = detector_of(NAMES[0])
    plan, x = recorded(detector, 16), images(detector.network, 3, size=16)
    setting: dict[str, Any] = {"score": 0.1, "max_detections": 7}
    check_same(plan.detect(x, **setting), plainly(plan, plan.plan(x), **setting))
    with torch.inference_mode():
        check_same(plan.detect(x, 1, **setting), plainly(plan, plan.plan(x, 1), **setting))


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs Triton, and no GPU: there kernels are compiled",
)
def test_boxes_by_kernels() -> None:
    plan = recorded(detector_of(NAMES[0]), 16)
    assert plan.decoder is not None
    row = rows_of(plan, 1)
    with mock.patch.object(found_boxes, "_has_kernels", return_value=True):
        check_same(plan.boxes(row, score=0.5), plainly(plan, row, score=0.5))
    assert len(plan.decoder.graphs) == 1


@pytest.mark.usefixtures("has_static_shape")
def test_detections_are_copies() -> None:
    plan = recorded(detector_of(NAMES[0]), 16)
    given = [rows_of(plan, 2, seed) for seed in (1, 2)]
    first, second = [plan.boxes(row) for row in given]
    check_same(first, plainly(plan, given[0], score=0.3))
    check_same(second, plainly(plan, given[1], score=0.3))
    assert first[0].scores.tolist() != second[0].scores.tolist()


@pytest.mark.usefixtures("has_static_shape")
def test_threads_share_captured_graphs() -> None:
    in_threads(recorded(detector_of(NAMES[0]), 16), 2, score=0.3)


@pytest.mark.usefixtures("has_static_shape")
def test_the_number_of_captured_graphs_is_limited() -> None:
    plan = recorded(detector_of(NAMES[0]), 16)
    assert plan.decoder is not None
    row = rows_of(plan, 1)
    with mock.patch.object(detecting, "MAX_GRAPHS", 2):
        for score in (0.3, 0.4, 0.5, 0.3):
            check_same(plan.boxes(row, score=score), plainly(plan, row, score=score))
    assert [key[2] for key in plan.decoder.graphs] == [0.5, 0.3]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudagraphs", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_plans_on_a_gpu(name: str, backend: str) -> None:
    detector = copy.deepcopy(detector_of(name)).cuda().float()
    network = detector.network
    x = images(network, 7, size=32).cuda()
    plan = runtime.compile(detector, backend=backend, image_size=32, batch_buckets=(1, 4))
    assert torch.equal(plan.route(x), detector.route(x))
    executor = plan.network.executor
    ways = [network.space[i % len(network.space)] for i in range(7)]
    given = torch.tensor([route.choices for route in ways], device="cuda")
    for _ in range(2):
        found = plan.split(executor.run_assigned(x, given).logits)
        for i, route in enumerate(ways):
            alone = detector(x[i : i + 1], route)
            assert_close(found.offsets[i : i + 1], alone.offsets, 1e-3)
            assert_close(found.logits[i : i + 1], alone.logits, 1e-3)
    together = plan.detect(x, score=0.0, max_detections=5)
    for i in (0, 5):
        (alone_found,) = plan.detect(x[i : i + 1], score=0.0, max_detections=5)
        assert alone_found.boxes == pytest.approx(together[i].boxes, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudagraphs", "triton"])
def test_boxes_on_a_gpu(backend: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    detector = copy.deepcopy(detector_of(NAMES[0])).cuda().float()
    plan = runtime.compile(detector, backend=backend, image_size=32, batch_buckets=(1, 4))
    assert plan.decoder is not None
    for count in (1, 3, 4, 7, 2):
        for row in (rows_of(plan, count, count), plan.plan(images(detector.network, count, size=32).cuda())):
            for score, most in ((0.1, 200), (0.3, 3), (1.0, 200)):
                setting: dict[str, Any] = {"score": score, "max_detections": most}
                check_same(plan.boxes(row, **setting), plainly(plan, row, **setting))
    assert {key[0] for key in plan.decoder.graphs} == {1, 2, 4}
    given = [rows_of(plan, 4, seed) for seed in (1, 2)]
    for row, own in zip(given, [plan.boxes(row) for row in given], strict=True):
        check_same(own, plainly(plan, row, score=0.3))
    in_threads(plan, 20, score=0.3)


@pytest.mark.parametrize(
    "mode", [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)], ids=["inference", "autocast"]
)
def test_a_plan_does_not_depend_on_the_mode_it_is_compiled_in(
    mode: contextlib.AbstractContextManager[object],
) -> None:
    detector = copy.deepcopy(detector_of(NAMES[0])).float()
    x = images(detector.network, 3, size=32).float()
    plain = recorded(detector, 32)
    with mode:
        made = recorded(detector, 32)
    for a, b in zip(made(x), plain(x), strict=True):
        assert a.dtype == torch.float32
        assert_close(a, b, 1e-6)  # last bits depend on where in memory the weights lie
    executor = made.network.executor
    assert "routed by its gate" in error_of(lambda: executor.run_cascade(x, (0, 1), (0.5,)))
