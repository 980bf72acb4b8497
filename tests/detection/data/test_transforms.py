"""Windows that are cut out of images: pixels and boxes move alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsnet.detection.data.dataset import Boxes
from dsnet.detection.data.transforms import augment, crop_windows, draw_augmentation, draw_windows, resize

MEAN = (0.5, 0.25, 0.75)


def painted(box: tuple[int, int, int, int], side: int = 64) -> tuple[torch.Tensor, Boxes]:
    """A black image with one white box, given in pixels."""
    left, top, right, bottom = box
    image = torch.zeros(1, 3, side, side, dtype=torch.uint8)
    image[:, :, top:bottom, left:right] = 255
    corners = torch.tensor([[[left, top, right, bottom], [0, 0, 0, 0]]]) / side
    return image, Boxes(corners, torch.tensor([[1, -1]]))


@given(
    window=st.tuples(*[st.sampled_from([-32, -16, 0, 16, 32])] * 2, *[st.sampled_from([32, 64, 128])] * 2),
    flip=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_boxes_follow_their_pixels(window: tuple[int, int, int, int], flip: bool) -> None:
    image, boxes = painted((20, 24, 44, 40))
    left, top, width, height = window
    corners = torch.tensor([[left, top, left + width, top + height]]) / 64
    found, kept = crop_windows(image, boxes, corners, torch.tensor([flip]), 64, MEAN)
    if int(kept.classes[0, 0]) < 0:
        assert not (left < 32 < left + width and top < 32 < top + height)
        return
    assert kept.classes.tolist() == [[1, -1]]
    white = found[0].min(0).values > 200
    x0, y0, x1, y1 = (64 * kept.corners[0, 0]).round().long().tolist()
    inside = torch.zeros(64, 64, dtype=torch.bool)
    inside[y0:y1, x0:x1] = True
    border = torch.zeros_like(inside)
    border[max(0, y0 - 2) : y1 + 2, max(0, x0 - 2) : x1 + 2] = True
    assert not bool((white & ~border).any())
    inner = inside[..., :].clone()
    inner[: y0 + 2], inner[max(0, y1 - 2) :] = False, False
    inner[:, : x0 + 2], inner[:, max(0, x1 - 2) :] = False, False
    assert bool(white[inner].all())


def test_the_area_around_an_image_has_the_mean() -> None:
    image, boxes = painted((20, 24, 44, 40))
    found, _ = crop_windows(image, boxes, torch.tensor([[-1.0, -1, 1, 1]]), torch.tensor([False]), 64, MEAN)
    assert found[0, :, 0, 0].tolist() == pytest.approx([255 * value for value in MEAN])
    assert found[0, :, 40, 40].tolist() == pytest.approx([0, 0, 0], abs=1e-3)  # black inside


def test_a_whole_window_changes_nothing() -> None:
    image = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    boxes = Boxes(torch.rand(2, 3, 4).sort(2).values, torch.tensor([[0, 1, -1], [2, -1, -1]]))
    boxes = Boxes(boxes.corners[..., [0, 1, 2, 3]], boxes.classes)
    found, kept = resize(image, boxes, 32, MEAN)
    torch.testing.assert_close(found, image.float(), atol=1e-2, rtol=0)
    assert torch.equal(kept.classes, boxes.classes)
    there = boxes.classes >= 0
    torch.testing.assert_close(kept.corners[there], boxes.corners[there])


@given(seed=st.integers(0, 10**6), count=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_windows_contain_a_box_or_the_whole_image(seed: int, count: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    low = torch.rand(count, 4, 2, generator=draws) * 0.7
    corners = torch.cat([low, low + 0.05 + 0.25 * torch.rand(count, 4, 2, generator=draws)], 2)
    classes = torch.randint(-1, 3, (count, 4), generator=draws)
    for window, own, kinds in zip(
        draw_windows(Boxes(corners, classes), draws).tolist(), corners, classes, strict=True
    ):
        left, top, right, bottom = window
        assert right > left
        assert bottom > top
        covers = left <= 1e-6 and top <= 1e-6 and right >= 1 - 1e-6 and bottom >= 1 - 1e-6
        centres = ((own[:, :2] + own[:, 2:]) / 2)[kinds >= 0].tolist()
        assert covers or any(left < x < right and top < y < bottom for x, y in centres)


def test_the_same_draws_give_the_same_images() -> None:
    images = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8)
    boxes = Boxes(torch.tensor([[[0.2, 0.2, 0.7, 0.8]]]).expand(4, 1, 4), torch.zeros(4, 1, dtype=torch.long))
    first, second, other = (
        augment(images, boxes, draw_augmentation(boxes, torch.Generator().manual_seed(seed)), 32, MEAN)
        for seed in (1, 1, 2)
    )
    assert first[0].shape == (4, 3, 32, 32)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1].corners, second[1].corners)
    assert not torch.equal(first[0], other[0])
    kept = first[1].corners[first[1].classes >= 0]
    assert bool((kept[:, 2:] > kept[:, :2]).all())
    assert 0 <= float(kept.min()) <= float(kept.max()) <= 1


def test_half_of_the_colour_factors_are_uniform() -> None:
    count = 4000
    boxes = Boxes(torch.tensor([[[0.2, 0.2, 0.7, 0.8]]]).expand(count, 1, 4), torch.zeros(count, 1).long())
    factors = draw_augmentation(boxes, torch.Generator().manual_seed(0)).factors
    assert factors.shape == (3, count)
    for kind in factors:  # brightness, contrast, saturation
        changed = kind[kind != 1].double()
        assert len(changed) / count == pytest.approx(0.5, abs=0.04)
        quartiles = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
        torch.testing.assert_close(changed.quantile(quartiles), 0.5 + quartiles, atol=0.05, rtol=0)
        assert 0.5 <= float(changed.min()) <= float(changed.max()) <= 1.5
