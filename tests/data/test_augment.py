"""Augmentation against brute force, and that it draws per image and from its generator alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsnet.data.augment import Augment, Mixing, draw_mixing, normalise
from tests.support import error_of


def pictures(count: int = 64, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_normalising_gives_mean_zero_and_deviation_one() -> None:
    images = pictures(256)
    values = images.double() / 255
    mean, std = (tuple(f((0, 2, 3)).tolist()) for f in (values.mean, values.std))
    done = normalise(images, mean, std)
    assert done.dtype is torch.float32
    assert done.mean((0, 2, 3)).abs().max() < 1e-5
    assert (done.std((0, 2, 3)) - 1).abs().max() < 1e-4


def test_crops_are_windows_of_the_padded_image() -> None:
    images, padding = pictures(), 2
    done = Augment(padding=padding)(images, seeded())
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    offsets = set()
    for i, crop in enumerate(done):
        found = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(padded[i, :, top : top + 8, left : left + 8], crop)
        ]
        assert len(found) == 1
        offsets.add(found[0])
    assert len(offsets) > 15  # 64 draws from 25 windows


def test_flips_hit_about_half_of_the_images() -> None:
    images = pictures(400)
    done = Augment(flip=True)(images, seeded())
    flipped = torch.tensor([torch.equal(a, b.flip(2)) for a, b in zip(done, images, strict=True)])
    same = torch.tensor([torch.equal(a, b) for a, b in zip(done, images, strict=True)])
    assert bool((flipped ^ same).all())
    assert 150 < int(flipped.sum()) < 250


def test_erasing_blanks_one_box_of_the_stated_size() -> None:
    images = pictures(300, 32)
    done = Augment(erase=0.5)(images, seeded())
    blank = (done == 0).all(1)
    touched = blank.flatten(1).any(1)
    assert 110 < int(touched.sum()) < 190
    assert torch.equal(done[~touched], images[~touched])
    for mask in blank[touched]:
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        assert bool(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all())
        assert 0.01 < mask.float().mean() < 0.4


def test_the_same_generator_gives_the_same_view_and_the_images_stay() -> None:
    images = pictures()
    before = images.clone()
    augment = Augment(padding=2, flip=True, erase=0.3)
    first, again, other = (augment(images, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, before)
    assert torch.equal(Augment()(images), images)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.sampled_from([(0.2, 0.0), (0.0, 1.0), (0.8, 1.0)]))
def test_mixed_labels_are_the_shares_of_pixels(seed: int, alphas: tuple[float, float]) -> None:
    mixup, cutmix = alphas
    count, size = 6, 8
    mixing = draw_mixing((count, 3, size, size), mixup=mixup, cutmix=cutmix, generator=seeded(seed))
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
    generator = seeded()
    ratios = [
        draw_mixing((2, 3, 4, 4), mixup=0.8, cutmix=0.0, generator=generator).ratio for _ in range(2000)
    ]
    drawn = torch.tensor(ratios)
    assert abs(drawn.mean() - 0.5) < 0.03
    assert abs(drawn.var() - 1 / (4 * (2 * 0.8 + 1))) < 0.01  # of Beta(α, α)


def test_mixing_can_be_off_and_bad_input_is_refused() -> None:
    assert draw_mixing((2, 3, 4, 4), mixup=0.0, cutmix=0.0) is None
    assert "at least 0" in error_of(lambda: draw_mixing((2, 3, 4, 4), mixup=-1.0, cutmix=0.0))
    assert "padding" in error_of(lambda: Augment(padding=-1))
    assert "probability" in error_of(lambda: Augment(erase=2.0))
    assert isinstance(draw_mixing((2, 3, 4, 4), mixup=0.0, cutmix=1.0), Mixing)
