"""Priors and the multibox loss on handmade values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsnet.detection.boxes import encode, prior_boxes, priors_per_position, to_corners
from dsnet.detection.train._loss import multibox_loss
from tests.support import error_of
from tests.support.boxes import reference_targets


def test_handmade_priors() -> None:
    found = prior_boxes([(2, 1), (1, 1), (1, 1)], [(2.0,), (), ()], (0.2, 0.8))
    assert len(found) == 2 * priors_per_position((2.0,)) + 2 * priors_per_position(())
    between, root = math.sqrt(0.1 * 0.2), math.sqrt(2)
    expected = [
        [0.5, 0.25, 0.1, 0.1],
        [0.5, 0.25, between, between],
        [0.5, 0.25, 0.1 * root, 0.1 / root],
        [0.5, 0.25, 0.1 / root, 0.1 * root],
    ]
    assert found[:4].tolist() == [pytest.approx(row) for row in expected]
    assert found[4:8, 1].tolist() == [0.75] * 4
    second, last = math.sqrt(0.2 * 0.8), math.sqrt(0.8 * 1.4)
    sides = [0.2, second, 0.8, last]
    assert found[8:].tolist() == [pytest.approx([0.5, 0.5, side, side]) for side in sides]
    one = prior_boxes([(3, 2)], [(2.0, 3.0)])
    assert one.shape == (3 * 2 * 6, 4)
    assert one[:, 2:].prod(1)[2:6].tolist() == pytest.approx([0.01] * 4)
    assert one[6, :2].tolist() == pytest.approx([0.75, 1 / 6])  # the next column comes first
    assert "expected ratios for each of 2 maps (at least 1), got 1" in error_of(
        lambda: prior_boxes([(1, 1), (1, 1)], [()])
    )
    assert "above 0" in error_of(lambda: prior_boxes([(1, 1)], [(0.0,)]))


def test_handmade_targets() -> None:
    priors = torch.tensor([[0.25, 0.5, 0.5, 1.0], [0.75, 0.5, 0.5, 1.0], [0.5, 0.5, 0.1, 0.1]])
    box = torch.tensor([[0.0, 0.0, 0.4, 1.0]])
    found = reference_targets(priors, [box, box[:0]], [torch.tensor([4]), torch.tensor([], dtype=torch.long)])
    assert found.classes.tolist() == [[5, 0, 0], [0, 0, 0]]
    assert found.offsets[0, 0].tolist() == pytest.approx(encode(box, priors[:1])[0].tolist())
    assert found.offsets[0, 1:].abs().sum() == found.offsets[1].abs().sum() == 0


def test_targets_equal_the_reference() -> None:
    """Files give float64 and whatever integers; crops leave boxes without a side."""
    priors = torch.tensor([[0.25, 0.5, 0.5, 1.0], [0.3, 0.5, 0.5, 1.0], [0.5, 0.5, 0.1, 0.1]])
    boxes = torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.3, 0.3, 0.3, 0.5]], dtype=torch.float64)
    found = reference_targets(priors, [boxes], [torch.tensor([0, 1], dtype=torch.int32)])
    assert 2 not in found.classes[0].tolist()  # it shares nothing with any prior
    assert found.classes[0, 0] == 1
    assert bool(found.offsets.isfinite().all())
    assert reference_targets(priors, [], []).offsets.shape == (0, 3, 4)


def test_predictions_that_do_not_count_may_be_infinite() -> None:
    priors = torch.tensor([[0.5, 0.5, 1.0, 1.0], *[[0.1, 0.1, 0.05, 0.05]] * 9])
    targets = reference_targets(priors, [torch.tensor([[0.0, 0.0, 1.0, 1.0]])], [torch.tensor([0])])
    offsets, logits = torch.zeros(1, 10, 4), torch.zeros(1, 10, 2)
    offsets[0, 5] = torch.inf
    logits[0, 9, 0] = 1e30  # sure that there is nothing
    offsets.requires_grad_()
    logits.requires_grad_()
    loss = multibox_loss(offsets, logits, targets).mean()
    loss.backward()
    assert bool(loss.isfinite())
    assert offsets.grad is not None
    assert logits.grad is not None
    assert bool(offsets.grad.isfinite().all())
    assert bool(logits.grad.isfinite().all())


def test_a_handmade_loss() -> None:
    """One box, five priors: one stands for it; of the four others the three worst count."""
    targets = reference_targets(
        torch.tensor([[0.5, 0.5, 1.0, 1.0], *[[0.1 * i, 0.1, 0.05, 0.05] for i in range(4)]]),
        [torch.tensor([[0.0, 0.0, 1.0, 1.0]])],
        [torch.tensor([1])],
    )
    offsets = torch.zeros(1, 5, 4)
    offsets[0, 0] = torch.tensor([0.5, -2.0, 0.0, 0.0])  # 0.125 + 1.5
    offsets[0, 1] = 100.0  # where there is nothing
    logits = torch.zeros(1, 5, 3)
    logits[0, :, 0] = torch.tensor([0.0, 5.0, -1.0, -2.0, -3.0])
    found = multibox_loss(offsets, logits, targets)

    def nothing(score: float) -> float:
        return math.log(math.exp(score) + 2) - score

    assert found.offsets.item() == pytest.approx(1.625)
    assert found.classes.item() == pytest.approx(math.log(3) + sum(map(nothing, (-1.0, -2.0, -3.0))))
    assert found.matched.tolist() == [1]
    assert found.mean().item() == pytest.approx(found.by_image().item())


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 30))
@settings(deadline=None, max_examples=40)
def test_hard_negative_mining_equals_a_loop(seed: int, images: int, count: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    priors = torch.rand(count, 4, generator=draw) * 0.5 + 0.2
    boxes, classes = [], []
    for _ in range(images):
        own = int(torch.randint(0, min(4, count) + 1, (1,), generator=draw))
        boxes.append(to_corners(torch.rand(own, 4, generator=draw) * 0.5 + 0.2))
        classes.append(torch.randint(0, 3, (own,), generator=draw))
    targets = reference_targets(priors, boxes, classes)
    offsets = torch.randn(images, count, 4, generator=draw)
    logits = torch.randn(images, count, 4, generator=draw)
    found = multibox_loss(offsets, logits, targets)
    for i in range(images):
        paid = (-logits[i].log_softmax(1))[torch.arange(count), targets.classes[i]].tolist()
        there = [p for p in range(count) if targets.classes[i, p] > 0]
        others = sorted((paid[p] for p in range(count) if p not in there), reverse=True)
        expected = sum(paid[p] for p in there) + sum(others[: 3 * max(1, len(there))])
        assert found.classes[i].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert int(found.matched[i]) == len(there)
    total = (found.offsets + found.classes).sum() / max(1, int(found.matched.sum()))
    assert found.mean().item() == pytest.approx(total.item())
