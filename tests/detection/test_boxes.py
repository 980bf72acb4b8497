"""Box geometry against references in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsnet.detection import area, decode, encode, iou, match, nms
from dsnet.detection.boxes import match_batch, nms_mask, to_centres, to_corners
from tests.support import error_of


def some_boxes(count: int, seed: int, *, grid: int | None = None) -> Tensor:
    """Random boxes; on a grid many of them are alike and share whole parts of each other."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.rand(count, 2, generator=draw, dtype=torch.float64)
    size = torch.rand(count, 2, generator=draw, dtype=torch.float64) * 0.5 + 0.01
    boxes = torch.cat([start, start + size], 1)
    return boxes if grid is None else (boxes * grid).round() / grid


def iou_by_hand(a: list[float], b: list[float]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union > 0 else 0.0


def test_handmade_boxes() -> None:
    a, b = torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 1.0, 3.0, 2.0], [5.0, 5.0, 6.0, 6.0]])
    assert iou(a, b).tolist() == [[pytest.approx(1 / 5), 0.0]]
    assert area(torch.tensor([[0.0, 0.0, 2.0, 3.0], [2.0, 0.0, 1.0, 1.0]])).tolist() == [6.0, 0.0]
    assert iou(a[:0], b).shape == (0, 2)
    point = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    assert iou(point, point).item() == 0
    prior = torch.tensor([[0.5, 0.5, 0.2, 0.4]])
    box = torch.tensor([[0.45, 0.4, 0.65, 0.8]])  # centre 0.55, 0.6; size 0.2, 0.4
    assert encode(box, prior)[0].tolist() == pytest.approx([2.5, 2.5, 0.0, 0.0], abs=1e-5)
    wide = torch.tensor([[0.3, 0.3, 0.7, 0.7]])
    assert encode(wide, prior)[0].tolist() == pytest.approx([0, 0, math.log(2) / 0.2, 0], abs=1e-5)


@given(st.integers(1, 30), st.integers(0, 10_000))
def test_encoding_and_decoding_are_inverse(count: int, seed: int) -> None:
    boxes, priors = some_boxes(count, seed), to_centres(some_boxes(count, seed + 1))
    assert torch.allclose(decode(encode(boxes, priors), priors), boxes, atol=1e-9)
    offsets = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert torch.allclose(encode(decode(offsets, priors), priors), offsets, atol=1e-7)
    assert torch.allclose(to_corners(to_centres(boxes)), boxes)


@given(st.integers(0, 12), st.integers(1, 9), st.integers(0, 10_000))
def test_iou_equals_a_loop(n: int, m: int, seed: int) -> None:
    a, b = some_boxes(n, seed, grid=8), some_boxes(m, seed + 1, grid=8)
    found = iou(a, b)
    for i in range(n):
        for j in range(m):
            assert found[i, j].item() == pytest.approx(iou_by_hand(a[i].tolist(), b[j].tolist()))


@given(st.integers(0, 6), st.integers(6, 40), st.integers(0, 10_000))
@settings(deadline=None)
def test_matching_equals_the_reference(count: int, priors: int, seed: int) -> None:
    boxes, own = some_boxes(count, seed), to_centres(some_boxes(priors, seed + 1))
    found = match(own, boxes).tolist()
    shared = [[iou_by_hand(p, b) for b in boxes.tolist()] for p in to_corners(own).tolist()]
    forced: dict[int, int] = {}
    while True:  # the best pair of those that are left and share something
        pairs = [
            (-shared[p][b], p * count + b, p, b)
            for p in range(priors)
            for b in range(count)
            if p not in forced and b not in forced.values() and shared[p][b] > 0
        ]
        if not pairs:
            break
        *_, p, b = min(pairs)
        forced[p] = b
    for p in range(priors):
        best = max(range(count), key=lambda b: shared[p][b], default=-1)
        expected = best if best >= 0 and shared[p][best] >= 0.5 else -1
        assert found[p] == forced.get(p, expected)
    assert set(forced.values()) <= set(found)


def test_more_boxes_than_priors() -> None:
    assert "5 boxes cannot have a prior each of 3" in error_of(
        lambda: match(to_centres(some_boxes(3, 0)), some_boxes(5, 0))
    )


@given(
    st.integers(0, 40), st.integers(1, 3), st.integers(0, 10_000), st.sampled_from([None, 6]), st.booleans()
)
@settings(deadline=None)
def test_suppression_equals_the_reference(
    count: int, kinds: int, seed: int, grid: int | None, one: bool
) -> None:
    boxes = some_boxes(count, seed, grid=grid)
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 10, (count,), generator=draw) / 10  # many are equal
    classes = torch.randint(0, kinds, (count,), generator=draw)
    left = sorted(range(count), key=lambda i: -scores[i].item())
    expected: list[int] = []
    for i in left:
        rivals = [j for j in expected if one or classes[j] == classes[i]]
        if all(iou_by_hand(boxes[i].tolist(), boxes[j].tolist()) <= 0.45 for j in rivals):
            expected.append(i)
    assert nms(boxes, scores, None if one else classes).tolist() == expected


@given(seed=st.integers(0, 10**6), most=st.integers(0, 5), count=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_many_images_are_matched_as_each_alone(seed: int, most: int, count: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    priors = torch.rand(12, 4, generator=draw) * 0.5 + 0.2
    low = torch.rand(count, most, 2, generator=draw) * 0.6
    boxes = torch.cat([low, low + 0.05 + 0.35 * torch.rand(count, most, 2, generator=draw)], 2)
    there = torch.rand(count, most, generator=draw) < 0.7
    found = match_batch(priors, boxes, there, 0.4)
    for image in range(count):
        own = there[image].nonzero()[:, 0]
        alone = match(priors, boxes[image][own], 0.4)
        expected = [int(own[box]) if box >= 0 else -1 for box in alone.tolist()]
        assert found[image].tolist() == expected


@given(seed=st.integers(0, 10**6), count=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_many_images_keep_the_boxes_that_each_keeps_alone(seed: int, count: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    low = torch.rand(count, 15, 2, generator=draw) * 0.4
    boxes = torch.cat([low, low + 0.2 + 0.3 * torch.rand(count, 15, 2, generator=draw)], 2)
    classes = torch.randint(0, 2, (count, 15), generator=draw)
    there = torch.rand(count, 15, generator=draw) < 0.8
    found = nms_mask(boxes, classes, there, threshold=0.3)
    for image in range(count):
        keep: list[int] = []
        for i in there[image].nonzero()[:, 0].tolist():  # best first
            over = [
                j
                for j in keep
                if classes[image, j] == classes[image, i]
                and float(iou(boxes[image, j : j + 1], boxes[image, i : i + 1])) > 0.3
            ]
            if not over:
                keep.append(i)
        assert found[image].nonzero()[:, 0].tolist() == keep


def test_a_box_without_overlap_has_no_prior() -> None:
    priors = torch.tensor([[0.1, 0.1, 0.1, 0.1], [0.5, 0.5, 0.1, 0.1]])
    far = torch.tensor([[0.9, 0.9, 0.91, 0.91]])
    assert match(priors, far).tolist() == [-1, -1]
    assert match_batch(priors, far[None], torch.tensor([[True]])).tolist() == [[-1, -1]]
