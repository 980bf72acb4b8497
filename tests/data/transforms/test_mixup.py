"""Mixup and CutMix: mixed pixels and labels agree, and ratios follow their distribution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsnet.data.transforms.mixup import Mixing, draw_mixing
from tests.support import error_of


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.sampled_from([(0.2, 0.0), (0.0, 1.0), (0.8, 1.0)]))
def test_mixed_labels_match_the_share_of_pixels(seed: int, alphas: tuple[float, float]) -> None:
    mixup, cutmix = alphas
    count, size = 6, 8
    mixing = draw_mixing(
        (count, 3, size, size), mixup=mixup, cutmix=cutmix, generator=torch.Generator().manual_seed(seed)
    )
    # Image i has the value i everywhere, so pixels tell where they come from.
    images = torch.arange(count).float()[:, None, None, None].expand(count, 3, size, size).contiguous()
    mixed = mixing.images(images)
    labels = mixing.labels(torch.arange(count), count)
    for i in range(count):
        partner = int(mixing.partners[i])
        expected = torch.zeros(count)
        if mixing.box is None:
            assert mixed[i].flatten() == pytest.approx(
                mixing.ratio * i + (1 - mixing.ratio) * partner, abs=1e-5
            )
            expected[i] += mixing.ratio
            expected[partner] += 1 - mixing.ratio
        else:
            for value in mixed[i, 0].flatten().long().tolist():
                expected[value] += 1 / size**2
        assert labels[i].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert labels.sum(1).tolist() == pytest.approx([1.0] * count)


def test_ratios_follow_the_beta_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    ratios = [
        draw_mixing((2, 3, 4, 4), mixup=0.8, cutmix=0.0, generator=generator).ratio for _ in range(2000)
    ]
    drawn = torch.tensor(ratios)
    assert abs(drawn.mean() - 0.5) < 0.03
    assert abs(drawn.var() - 1 / (4 * (2 * 0.8 + 1))) < 0.01  # of Beta(α, α)


def test_mixing_can_be_off() -> None:
    assert draw_mixing((2, 3, 4, 4), mixup=0.0, cutmix=0.0) is None
    assert isinstance(draw_mixing((2, 3, 4, 4), mixup=0.0, cutmix=1.0), Mixing)
    assert "at least 0" in error_of(lambda: draw_mixing((2, 3, 4, 4), mixup=-1.0, cutmix=0.0))
