"""Decoding of predictions against plain loops; Triton's interpreter runs the kernels without a GPU."""

from __future__ import annotations

import importlib.util
import math
import threading
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsnet.detection import postprocess as module
from dsnet.detection.boxes import decode, iou, nms
from dsnet.detection.eval.metrics import Detections
from dsnet.detection.postprocess import best_boxes, decode_detections
from dsnet.errors import DsnetError
from dsnet.kernels import nms as nms_kernels

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


def exact_answers(images: int, count: int, kinds: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """No exponential is rounded: scores are 0, 1, 1/2, 1/3, ..., and some answers are not numbers."""
    offsets, logits, priors = answers(images, count, kinds, seed)
    draw = torch.Generator().manual_seed(seed)
    offsets[:, :, 2:].clamp_(max=0.0)[offsets[:, :, 2:] > -1000] = 0.0
    offsets[torch.rand(images, count, generator=draw) < 0.05] = math.nan
    logits = torch.where(logits > 0, 0.0, -200.0)
    for value in (math.nan, math.inf, -math.inf):
        logits[torch.rand(images, count, 1 + kinds, generator=draw) < 0.05] = value
    return offsets, logits, torch.rand(count, 4, generator=draw) if seed % 2 else priors


def views(offsets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of the same memory, as a detector gives them."""
    rows = torch.cat([logits, offsets], 2)
    return rows[:, :, logits.shape[2] :], rows[:, :, : logits.shape[2]]


def by_hand(given: tuple[Tensor, Tensor, Tensor], score: float, overlap: float, most: int) -> list[list[Row]]:
    """Of equal scores the first counts as better."""
    offsets, logits, priors = given
    boxes = decode(offsets.float(), priors).clamp(0, 1)
    likely = logits.float().softmax(2).nan_to_num(0.0)
    rows: list[list[Row]] = []
    for image in range(len(logits)):
        own: list[Row] = []
        for kind in range(logits.shape[2] - 1):
            column = likely[image, :, 1 + kind]
            order = column.argsort(descending=True, stable=True)
            kept: list[int] = []
            for place in order[: module.CANDIDATES].tolist():
                box = boxes[image, place][None]
                if float(column[place]) > score and not bool((iou(boxes[image, kept], box) > overlap).any()):
                    kept.append(place)
            own += [(boxes[image, place].tolist(), float(column[place]), kind) for place in kept]
        rows.append(sorted(own, key=lambda row: -row[1])[:most])
    return rows


def check(found: list[Detections], expected: list[list[Row]]) -> None:
    for own, rows in zip(found, expected, strict=True):
        assert own.boxes.shape == (len(rows), 4)
        np.testing.assert_array_equal(own.boxes, np.array([box for box, _, _ in rows]).reshape(-1, 4))
        assert own.scores.tolist() == [likely for _, likely, _ in rows]
        assert own.classes.tolist() == [kind for _, _, kind in rows]
        assert (own.boxes.dtype, own.scores.dtype, own.classes.dtype) == (np.float64, np.float64, np.int64)


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
def test_boxes_of_handmade_predictions(
    seed: int, images: int, count: int, kinds: int, score: float, overlap: float, most: int
) -> None:
    given = answers(images, count, kinds, seed)
    expected = by_hand(given, score, overlap, most)
    found = decode_detections(*given, score=score, overlap=overlap, max_detections=most)
    check(found, expected)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, by which numbers are interpreted
@given(
    seed=seeds,
    images=st.integers(1, 2),
    count=st.integers(1, 40),
    kinds=st.integers(1, 3),
    candidates=st.sampled_from([1, 4, 5, 200]),
    score=st.sampled_from([-1.0, 0.01, 0.3, 1.0]),
    overlap=st.sampled_from([0.0, 0.25, 0.45]),
    most=st.sampled_from([1, 3, 200]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=25, deadline=None)
def test_kernels_on_handmade_predictions(
    seed: int,
    images: int,
    count: int,
    kinds: int,
    candidates: int,
    score: float,
    overlap: float,
    most: int,
    dtype: torch.dtype,
) -> None:
    offsets, logits, priors = exact_answers(images, count, kinds, seed)
    offsets, logits = views(offsets.to(dtype), logits.to(dtype))
    with (
        mock.patch.object(module, "CANDIDATES", candidates),
        mock.patch.object(module, "_has_kernels", return_value=True),
    ):
        expected = by_hand((offsets, logits, priors), score, overlap, most)
        check(
            decode_detections(offsets, logits, priors, score=score, overlap=overlap, max_detections=most),
            expected,
        )


def chain(count: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes each a step further, the first ones best, and the priors of some order; nothing is rounded."""
    priors = torch.tensor([0.0, 0.5, width / 256, 0.125]).repeat(count, 1)
    priors[:, 0] = (torch.arange(count) + 16) / 256
    logits = torch.stack([torch.zeros(count), torch.linspace(3, -1, count)], 1)[None]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return torch.zeros(1, count, 4), logits[:, order], priors[order]


@interpreted
@given(
    seed=seeds,
    count=st.sampled_from([1, 2, 31, 32, 33, 64, 65, 200, 210]),
    width=st.sampled_from([1, 3, 8, 32]),  # a box shares with the next 0, 1/2, 7/9, 31/33
    overlap=st.sampled_from([-1.0, 0.0, 0.45, 0.75, 0.9]),
)
@settings(max_examples=25, deadline=None)
def test_kernels_on_chains_of_suppression(seed: int, count: int, width: int, overlap: float) -> None:
    given = chain(count, width, seed)
    expected = by_hand(given, 0.01, overlap, 200)
    if count > 2 and overlap == 0.45 and width == 3:
        assert len(expected[0]) == (min(count, module.CANDIDATES) + 1) // 2  # each second one
    with mock.patch.object(module, "_has_kernels", return_value=True):
        (found,) = decode_detections(*given, score=0.01, overlap=overlap)
    boxes, scores, _ = zip(*expected[0], strict=True)
    np.testing.assert_array_equal(found.boxes, np.array(boxes))
    np.testing.assert_allclose(found.scores, scores, atol=1e-6)


@interpreted
def test_kernels_equal_torch(apart: tuple[Tensor, Tensor, Tensor]) -> None:
    given, setting = (
        (apart[0][:1], apart[1][:1], apart[2]),
        {"score": 0.01, "overlap": 0.45, "max_detections": 100},
    )
    expected = decode_detections(*given, **setting)
    with mock.patch.object(module, "_has_kernels", return_value=True):
        check_near(decode_detections(*given, **setting), expected)


@interpreted
def test_kernels_return_fixed_shapes_and_reject_bad_ones() -> None:
    offsets, logits, priors = answers(2, 10, 2, 0)
    setting = {"score": 0.1, "overlap": 0.45, "max_boxes": 3, "candidates": 4, "variances": (0.1, 0.2)}
    assert nms_kernels.select_boxes(offsets, logits, priors, **setting).shape == (2, 3, 6)
    assert nms_kernels.select_boxes(offsets, logits, priors, **{**setting, "max_boxes": 200}).shape == (
        2,
        8,
        6,
    )
    for own, alike in ((offsets[:, :9], priors), (offsets, priors[:9]), (offsets[:1], priors)):
        with pytest.raises(DsnetError, match="with the same p"):
            nms_kernels.select_boxes(own, logits, alike, **setting)
    with mock.patch.object(nms_kernels, "MAX_PRIORS", 9), pytest.raises(DsnetError, match="no more than 9"):
        nms_kernels.select_boxes(offsets, logits, priors, **setting)


def test_of_equal_scores_the_first_prior_is_kept() -> None:
    offsets, logits = torch.zeros(1, 300, 4), torch.zeros(1, 300, 2)
    logits[..., 1] = 30  # a probability of 1
    priors = torch.tensor([[0.5, 0.5, 0.4, 0.4]]).repeat(300, 1)
    priors[:, 0] += 1e-4 * torch.arange(300)
    boxes = decode(offsets[0], priors)
    expected = boxes[nms(boxes, logits.softmax(2)[0, :, 1])]
    (found,) = decode_detections(offsets, logits, priors)
    assert torch.from_numpy(found.boxes[:1]).float().equal(expected[:1])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"score": math.nan}, "score is a number"),
        ({"score": "a"}, "score is a number"),
        ({"overlap": None}, "overlap is a number"),
        ({"max_detections": -250}, "at least 0, not -250"),
        ({"max_detections": 1.5}, "at least 0, not 1.5"),
    ],
)
def test_bad_thresholds_are_errors(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(DsnetError, match=message):
        decode_detections(*answers(1, 10, 2, 0), **wanted)


def test_nan_predictions_give_no_boxes() -> None:
    offsets, logits, priors = answers(2, 10, 2, 0)
    logits[0, :5] = math.nan
    logits[1] = math.nan
    first, second = decode_detections(offsets, logits, priors)
    (expected,) = decode_detections(offsets[:1, 5:], logits[:1, 5:], priors[5:])
    assert first.boxes.tolist() == expected.boxes.tolist()
    assert len(first.scores) > 0
    assert second.boxes.shape == (0, 4)


@pytest.mark.parametrize(("images", "count", "kinds"), [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_empty_batches_give_no_boxes(images: int, count: int, kinds: int) -> None:
    found = decode_detections(*answers(images, count, kinds, 0))
    assert [own.boxes.shape for own in found] == [(0, 4)] * images
    assert [own.classes.shape for own in found] == [(0,)] * images


def test_predictions_that_require_gradients() -> None:
    offsets, logits, priors = answers(2, 10, 2, 0)
    plain = decode_detections(offsets, logits, priors)
    for own, alike in zip(plain, decode_detections(offsets.requires_grad_(), logits, priors), strict=True):
        assert own.boxes.tolist() == alike.boxes.tolist()


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


def check_near(found: list[Detections], expected: list[Detections]) -> None:
    for own, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(own.scores, right.scores, atol=1e-5)
        np.testing.assert_allclose(own.boxes, right.boxes, atol=1e-5)
        assert own.classes.tolist() == right.classes.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("most_priors", [nms_kernels.MAX_PRIORS, 100])  # by kernels, and without
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_gives_the_same_boxes(
    apart: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, most_priors: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    setting = {"score": 0.4, "overlap": 0.45, "max_detections": 100}
    offsets, logits, priors = apart
    expected = decode_detections(offsets, logits, priors, **setting)
    given = views(offsets.to("cuda", dtype), logits.to("cuda", dtype))
    with mock.patch.object(nms_kernels, "MAX_PRIORS", most_priors):
        check_near(decode_detections(*given, priors.to("cuda"), **setting), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("images", "count", "kinds"), [(1, 1, 1), (2, 33, 2), (3, 1000, 3), (2, 9602, 3), (1, 24564, 20)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_on_handmade_predictions(images: int, count: int, kinds: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    offsets, logits, priors = exact_answers(images, count, kinds, 1)
    expected = by_hand((offsets, logits, priors), 0.01, 0.45, 200)
    given = views(offsets.to("cuda", dtype), logits.to("cuda", dtype))
    check(decode_detections(*given, priors.to("cuda")), expected)


@pytest.mark.gpu
def test_a_gpu_does_not_synchronise(apart: tuple[Tensor, Tensor, Tensor]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    given = [part.to("cuda") for part in apart]
    best_boxes(*given, score=0.4, overlap=0.45, max_detections=100)  # kernels are compiled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not know of every wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            best_boxes(*given, score=0.4, overlap=0.45, max_detections=100)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_threads_get_their_own_boxes(apart: tuple[Tensor, Tensor, Tensor]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    offsets, logits, priors = (part.to("cuda") for part in apart)
    inputs = [offsets + 0.5 * number for number in range(4)]
    expected = [decode_detections(given, logits, priors, score=0.4) for given in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def call(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for own, right in zip(
                    decode_detections(inputs[number], logits, priors, score=0.4),
                    expected[number],
                    strict=True,
                ):
                    if not np.array_equal(own.boxes, right.boxes):
                        wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
