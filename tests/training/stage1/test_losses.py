"""Losses against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsnet.training.stage1._losses import ensemble, hard_labels, hierarchical, label_loss, soft_loss


def t(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def softmax(row: tuple[float, ...]) -> list[float]:
    total = sum(math.exp(v) for v in row)
    return [math.exp(v) / total for v in row]


def test_label_loss_by_hand() -> None:
    logits = t((1.0, 2.0, 0.5), (0.0, -1.0, 3.0))
    p, q = softmax((1.0, 2.0, 0.5)), softmax((0.0, -1.0, 3.0))
    expected = -(math.log(p[1]) + math.log(q[0])) / 2
    assert label_loss(logits, torch.tensor([1, 0])).item() == pytest.approx(expected)
    mixed = t((0.3, 0.7, 0.0), (0.0, 0.5, 0.5))
    by_hand = -(0.3 * math.log(p[0]) + 0.7 * math.log(p[1]) + 0.5 * math.log(q[1]) + 0.5 * math.log(q[2])) / 2
    assert label_loss(logits, mixed).item() == pytest.approx(by_hand)
    smooth = -(0.9 * math.log(p[1]) + 0.1 / 3 * sum(map(math.log, p))) / 2
    smooth -= (0.9 * math.log(q[0]) + 0.1 / 3 * sum(map(math.log, q))) / 2
    assert label_loss(logits, torch.tensor([1, 0]), 0.1).item() == pytest.approx(smooth)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft_loss_by_hand(temperature: float) -> None:
    logits, target = (1.0, 2.0, 0.5), (0.5, 0.5, -1.0)
    p = softmax(tuple(v / temperature for v in logits))
    q = softmax(tuple(v / temperature for v in target))
    expected = -sum(a * math.log(b) for a, b in zip(q, p, strict=True)) * temperature**2
    assert soft_loss(t(logits), t(target), temperature).item() == pytest.approx(expected)


def test_soft_loss_survives_large_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = soft_loss(logits, torch.tensor([[-1e4, 1e4, 0.0]]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_an_ensemble_is_the_mean_of_probabilities() -> None:
    rows = [(1.0, 2.0, 0.5), (0.0, -1.0, 3.0), (2.0, 2.0, 2.0)]
    mean = [sum(softmax(row)[i] for row in rows) / 3 for i in range(3)]
    assert ensemble([t(row) for row in rows]).softmax(1)[0].tolist() == pytest.approx(mean)


def test_hierarchical_loss_by_hand() -> None:
    predicted = [t((1.0, 2.0), (0.0, 0.0)), t((1.0, 1.0, 1.0, 1.0), (2.0, 0.0, 0.0, 0.0))]
    targets = [t((0.0, 2.0), (3.0, 0.0)), t((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))]
    first = (1 / 2 + 9 / 2) / 2  # ‖·‖² / C of either image, mean over images
    second = (4 / 4 + 4 / 4) / 2
    assert hierarchical(predicted, targets).item() == pytest.approx((first + second) / 2)


def test_targets_get_no_gradient() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    target = torch.randn(4, 3, requires_grad=True)
    losses = (
        soft_loss(logits, target),
        soft_loss(logits, ensemble([target, target])),
        label_loss(logits, hard_labels(target)),
        hierarchical([logits], [target]),
    )
    for loss in losses:
        logits.grad = target.grad = None
        loss.backward()
        assert logits.grad.abs().sum() > 0
        assert target.grad is None


def test_half_precision_is_computed_in_float32() -> None:
    logits = torch.randn(4, 3).bfloat16()
    for loss in (
        label_loss(logits, torch.tensor([0, 1, 2, 0])),
        soft_loss(logits, logits),
        hierarchical([logits], [logits]),
    ):
        assert loss.dtype is torch.float32
