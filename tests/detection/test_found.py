"""Boxes of answers against plain loops; suppression by a kernel, which Triton's interpreter runs here."""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsnet.detection import found as module
from dsnet.detection.boxes import decode, iou, kept_of
from dsnet.detection.found import _Graphed, best_boxes, detections_of
from dsnet.detection.suppress import kept_of_sorted

Row = tuple[list[float], float, int]
seeds = st.integers(0, 10**6)
interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs Triton, and no GPU: there kernels are compiled",
)


def answers(images: int, count: int, kinds: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Few different numbers: many scores and many boxes are equal, some boxes have no area."""
    draw = torch.Generator().manual_seed(seed)
    offsets = torch.randint(-2, 3, (images, count, 4), generator=draw) * 1.0
    offsets[:, :, 2:][torch.rand(images, count, 2, generator=draw) < 0.1] = -1000.0
    logits = torch.randint(-1, 3, (images, count, 1 + kinds), generator=draw) * 1.0
    priors = torch.randint(1, 5, (count, 4), generator=draw) / 8
    return offsets, logits, priors


def by_hand(given: tuple[Tensor, Tensor, Tensor], score: float, overlap: float, most: int) -> list[list[Row]]:
    offsets, logits, priors = given
    boxes = decode(offsets.float(), priors).clamp(0, 1)
    likely = logits.float().softmax(2)
    rows: list[list[Row]] = []
    for image in range(len(logits)):
        own: list[Row] = []
        for kind in range(logits.shape[2] - 1):
            column = likely[image, :, 1 + kind]
            kept: list[int] = []
            for place in column.topk(len(column)).indices.tolist():  # which of equals is first is its matter
                box = boxes[image, place][None]
                if float(column[place]) > score and all(
                    float(iou(boxes[image, other][None], box)) <= overlap for other in kept
                ):
                    kept.append(place)
            own += [(boxes[image, place].tolist(), float(column[place]), kind) for place in kept]
        rows.append(sorted(own, key=lambda row: -row[1])[:most])
    return rows


@given(
    seed=seeds,
    images=st.integers(1, 3),
    count=st.integers(1, 12),
    kinds=st.integers(1, 3),
    score=st.sampled_from([0.01, 0.25, 0.5, 0.99]),
    overlap=st.sampled_from([0.0, 0.25, 0.5]),
    most=st.sampled_from([0, 1, 3, 200]),
)
@settings(max_examples=60, deadline=None)
def test_boxes_by_hand(
    seed: int, images: int, count: int, kinds: int, score: float, overlap: float, most: int
) -> None:
    given = answers(images, count, kinds, seed)
    expected = by_hand(given, score, overlap, most)
    found = detections_of(*given, score=score, overlap=overlap, most=most)
    for own, rows in zip(found, expected, strict=True):
        assert own.boxes.shape == (len(rows), 4)
        assert own.boxes.tolist() == [box for box, _, _ in rows]
        assert own.scores.tolist() == [likely for _, likely, _ in rows]
        assert own.classes.tolist() == [kind for _, _, kind in rows]
        assert (own.boxes.dtype, own.scores.dtype, own.classes.dtype) == (np.float64, np.float64, np.int64)


@interpreted
@given(
    seed=seeds,
    images=st.integers(1, 2),
    count=st.integers(1, 12),
    kinds=st.integers(1, 3),
    score=st.sampled_from([0.01, 0.25, 0.99]),
    most=st.sampled_from([1, 3, 200]),
)
@settings(max_examples=25, deadline=None)
def test_as_on_a_gpu(seed: int, images: int, count: int, kinds: int, score: float, most: int) -> None:
    given, setting = answers(images, count, kinds, seed), {"score": score, "overlap": 0.45, "most": most}
    expected = best_boxes(*given, **setting)
    with mock.patch.object(module, "_unaided", return_value=True):
        found = best_boxes(*given, **setting)
    assert found.shape == (images, min(most, kinds * count), 6)
    there = expected[:, :, 4] >= 0
    assert torch.equal(found[:, : expected.shape[1]][there], expected[there])
    assert int((found[:, :, 4] >= 0).sum()) == int(there.sum())


def test_what_is_not_a_number_is_not_found() -> None:
    offsets, logits, priors = answers(2, 10, 2, 0)
    logits[0, :5] = math.nan
    logits[1] = math.nan
    first, second = detections_of(offsets, logits, priors)
    (expected,) = detections_of(offsets[:1, 5:], logits[:1, 5:], priors[5:])
    assert first.boxes.tolist() == expected.boxes.tolist()
    assert len(first.scores) > 0
    assert second.boxes.shape == (0, 4)


@pytest.mark.parametrize(("images", "count", "kinds"), [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_nothing(images: int, count: int, kinds: int) -> None:
    found = detections_of(*answers(images, count, kinds, 0))
    assert [own.boxes.shape for own in found] == [(0, 4)] * images
    assert [own.classes.shape for own in found] == [(0,)] * images


def test_answers_in_a_graph_of_gradients() -> None:
    offsets, logits, priors = answers(2, 10, 2, 0)
    plain = detections_of(offsets, logits, priors)
    for own, alike in zip(plain, detections_of(offsets.requires_grad_(), logits, priors), strict=True):
        assert own.boxes.tolist() == alike.boxes.tolist()


@interpreted
@given(
    seed=seeds,
    rows=st.integers(1, 3),
    count=st.integers(1, 40),
    grid=st.sampled_from([4, 1000]),
    threshold=st.sampled_from([0.0, 0.3, 0.45]),
)
@settings(max_examples=40, deadline=None)
def test_the_kernel_keeps_the_same(seed: int, rows: int, count: int, grid: int, threshold: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    boxes = (torch.rand(rows, count, 4, generator=draw) * grid).round() / grid
    boxes[:, :, 2:] += boxes[:, :, :2] - 0.1  # some end before they begin
    boxes[torch.rand(rows, count, generator=draw) < 0.05] = math.nan
    there = torch.rand(rows, count, generator=draw) < 0.8
    expected = kept_of(boxes, torch.zeros(rows, count), there, threshold=threshold)
    assert torch.equal(kept_of_sorted(boxes, there, threshold=threshold), expected)


def test_graphs_are_few_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRAPHS", 2)
    monkeypatch.setattr(module, "IDLE", 3)
    graphed, function = _Graphed(), functools.partial(best_boxes, score=0.1, overlap=0.5, most=3)
    first, second = graphed._of("a", function), graphed._of("b", function)
    assert first is not function
    assert graphed._of("a", function) is first
    assert graphed._of("c", function) is function  # both are in use
    assert graphed._of("a", function) is first
    third = graphed._of("c", function)
    assert third not in (function, second)  # in place of the second
    assert graphed._of("c", function) is third
    assert graphed._of("a", function) is first
    assert graphed._of("b", function) is function


@pytest.fixture
def apart() -> tuple[Tensor, Tensor, Tensor]:
    """No two scores and no overlap and its limit are near each other; all but priors are bfloat16 exactly."""
    draw = torch.Generator().manual_seed(34)
    images, kinds, steps = 6, 3, torch.arange(128) / 128
    levels = torch.cat([(1 + steps) / 2, 1 + steps, 2 + 2 * steps])
    count = len(levels)
    offsets = torch.randn(images, count, 4, generator=draw).bfloat16().float()
    logits = torch.zeros(images, count, 1 + kinds)
    likeliest = torch.randint(1, 1 + kinds, (images, count, 1), generator=draw)
    logits.scatter_(2, likeliest, levels[torch.rand(images, count, generator=draw).argsort(1)][:, :, None])
    return offsets, logits, torch.rand(count, 4, generator=draw) * 0.2 + 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_finds_the_same_and_replays(apart: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    setting = {"score": 0.4, "overlap": 0.45, "most": 100}
    offsets, logits, priors = apart
    expected = detections_of(offsets, logits, priors, **setting)
    with (
        mock.patch.object(module, "best_boxes", wraps=best_boxes) as calls,
        mock.patch.object(module, "_GRAPHED", _Graphed()),
    ):
        for turn in range(3):
            given = (offsets.roll(turn, 0).to(dtype), logits.roll(turn, 0).to(dtype), priors)
            found = detections_of(*(part.to("cuda") for part in given), **setting)
            assert calls.call_count == 2  # before a graph is recorded, and then
            for image, own in enumerate(found):
                right = expected[(image - turn) % len(found)]
                np.testing.assert_allclose(own.scores, right.scores, atol=1e-5)
                np.testing.assert_allclose(own.boxes, right.boxes, atol=1e-5)
                assert own.classes.tolist() == right.classes.tolist()


@pytest.mark.gpu
def test_a_gpu_waits_for_nothing(apart: tuple[Tensor, Tensor, Tensor]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    given = [part.to("cuda") for part in apart]
    best_boxes(*given, score=0.4, overlap=0.45, most=100)  # kernels are compiled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not know of every wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            best_boxes(*given, score=0.4, overlap=0.45, most=100)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_threads_do_not_mix(apart: tuple[Tensor, Tensor, Tensor]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    offsets, logits, priors = (part.to("cuda") for part in apart)
    inputs = [offsets + 0.5 * number for number in range(4)]
    expected = [detections_of(given, logits, priors, score=0.4) for given in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def call(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for own, right in zip(
                    detections_of(inputs[number], logits, priors, score=0.4), expected[number], strict=True
                ):
                    if not np.array_equal(own.boxes, right.boxes):
                        wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
