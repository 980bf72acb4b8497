"""Augmentation against brute force; it draws per image, and from its generator only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsnet.data.transforms.augment import Augment, normalise
from dsnet.data.transforms.auto_augment import (
    CIFAR10,
    IMAGENET,
    auto_augment,
    brightness,
    color,
    contrast,
    rand_augment,
)
from dsnet.recipes import get_recipe
from dsnet.training.config import MixConfig
from dsnet.training.stage1.views import Views
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


def test_erased_boxes_can_hold_noise_of_normalised_images() -> None:
    """What DeiT does: mean 0 and deviation 1 behind normalisation, a value for every pixel and channel."""
    images, channels = pictures(300, 32), ((0.3, 0.5, 0.6), (0.1, 0.2, 0.4))
    views = {
        fill: Views(
            Augment(erase=0.5, erase_fill=fill),
            MixConfig(),
            channels,
            seed=0,
            rank=0,
            device=torch.device("cpu"),
        )
        for fill in ("black", "noise")
    }
    labels = torch.zeros(300, dtype=torch.long)
    black, noise = (make(images[None], labels, count=1, step=0, classes=2)[0][0] for make in views.values())
    plain = normalise(images, *channels)
    inside = (black != plain).any(1)
    assert torch.equal((noise != plain).all(1), inside)  # the same boxes
    values = noise.movedim(1, 0)[:, inside]
    assert values.shape[1] > 20_000
    assert values.mean(1).tolist() == pytest.approx([0, 0, 0], abs=0.05)
    assert values.std(1).tolist() == pytest.approx([1, 1, 1], abs=0.05)
    assert "black or noise" in error_of(lambda: Augment(erase=0.5, erase_fill="white"))
    bytes_of = Augment(erase=0.5, erase_fill="noise")(images, seeded())
    assert torch.equal(bytes_of, images)
    recipe = get_recipe("imagenet_ds_vit_plus").config.augment
    assert (recipe.erase, recipe.erase_fill) == (0.25, "noise")


def ramps(count: int, height: int, width: int) -> Tensor:
    """Images whose first channel tells the column and whose second tells the row, 3 levels a pixel."""
    columns = torch.arange(width).expand(height, width)
    rows = torch.arange(height)[:, None].expand(height, width)
    image = torch.stack((columns, rows, torch.zeros_like(rows))) * 3
    return image.to(torch.uint8).repeat(count, 1, 1, 1)


@pytest.mark.parametrize(("height", "width", "size"), [(80, 80, None), (60, 80, None), (80, 80, 48)])
def test_resized_crops_are_boxes_of_the_stated_area_and_aspect(
    height: int, width: int, size: int | None
) -> None:
    count, least, most = 400, 0.25, 0.9
    augment = Augment(crop=(least, most), size=size)
    done = augment(ramps(count, height, width), seeded()).float() / 3
    assert done.shape == (count, 3, size or height, size or width)
    # Away from the border a resized ramp is a ramp, whose slope and middle give the box.
    edge, n = 8, done.shape[3]
    broad = (done[:, 0, :, -1 - edge] - done[:, 0, :, edge]).mean(1) / (n - 1 - 2 * edge) * n
    x = (done[:, 0, :, -1 - edge] + done[:, 0, :, edge]).mean(1) / 2 + 0.5
    n = done.shape[2]
    tall = (done[:, 1, -1 - edge] - done[:, 1, edge]).mean(1) / (n - 1 - 2 * edge) * n
    y = (done[:, 1, -1 - edge] + done[:, 1, edge]).mean(1) / 2 + 0.5
    area, aspect = broad * tall / (height * width), broad / tall
    assert least - 0.02 < area.min() < least + 0.05
    assert most - 0.05 < area.max() < most + 0.02
    assert abs(area.mean() - (least + most) / 2) < 0.04
    assert 0.72 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.37
    left, top = x - broad / 2, y - tall / 2
    assert min(left.min(), top.min(), (width - x - broad / 2).min(), (height - y - tall / 2).min()) > -0.5
    assert left.max() > 0.2 * width
    assert top.max() > 0.2 * height


def test_a_crop_of_everything_changes_nothing_and_resizes() -> None:
    images = pictures(16, 12)
    assert torch.equal(Augment(crop=(1.0, 1.0))(images, seeded()), images)
    halves = images.view(16, 3, 6, 2, 6, 2).float().mean((3, 5))
    done = Augment(crop=(1.0, 1.0), size=6)(images, seeded())
    assert (done.float() - halves).abs().max() <= 0.5 + 1e-4


def test_jitter_scales_brightness_contrast_and_saturation_per_image() -> None:
    images, strength = pictures(200), 0.4
    done = Augment(jitter=strength)(images, seeded())
    factors = 1 - strength + 2 * strength * torch.rand(3, 200, generator=seeded())
    expected = color(contrast(brightness(images, factors[0]), factors[1]), factors[2])
    assert (done.int() - expected.int()).abs().max() <= 1
    flat = torch.full((200, 3, 4, 4), 100, dtype=torch.uint8)  # has no contrast and no colour to change
    levels = Augment(jitter=strength)(flat, seeded())[:, 0, 0, 0].float()
    assert 60 - 1 <= levels.min() < 66
    assert 134 < levels.max() <= 140
    wild = Augment(jitter=2.0)(flat, seeded())[:, 0, 0, 0]  # factors from 0, not from -1
    assert 20 < int((wild < 50).sum()) < 50


@pytest.mark.parametrize("policy", ["autoaugment_cifar10", "autoaugment_imagenet", "randaugment"])
def test_policies_draw_from_the_host(policy: str) -> None:
    images = pictures(128, 16)
    augment = Augment(policy=policy, operations=3, magnitude=7.0, magnitude_std=0.5)
    expected = {
        "autoaugment_cifar10": lambda: auto_augment(images, CIFAR10, seeded(5)),
        "autoaugment_imagenet": lambda: auto_augment(images, IMAGENET, seeded(5)),
        "randaugment": lambda: rand_augment(images, 3, 7.0, 0.5, seeded(5)),
    }[policy]()
    assert torch.equal(augment(images, seeded(1), seeded(5)), expected)
    assert torch.equal(augment(images, host=seeded(5)), expected)
    assert torch.equal(augment(images, seeded(5)), expected)
    assert not torch.equal(augment(images, seeded(5), seeded(1)), expected)
    assert not torch.equal(expected, images)


def test_augmentations_run_in_the_documented_order() -> None:
    images = pictures(64, 16)
    parts = [{"crop": (0.3, 1.0)}, {"flip": True}, {"policy": "randaugment"}, {"jitter": 0.4}, {"erase": 0.5}]
    together = Augment(**{key: value for part in parts for key, value in part.items()})
    done = together(images, seeded(1), seeded(2))
    generator, host = seeded(1), seeded(2)
    for part in parts:
        images = Augment(**part)(images, generator, host)
    assert torch.equal(done, images)
    assert done.dtype is torch.uint8


def test_no_operation_synchronises_with_the_device() -> None:
    images = pictures().to("meta")  # has no values: whatever needs one fails
    rest = {"flip": True, "jitter": 0.4, "erase": 0.5}
    for augment in (
        Augment(padding=2, policy="autoaugment_cifar10", **rest),
        Augment(crop=(0.2, 1.0), **rest),
    ):
        assert augment(images).shape == images.shape
    assert normalise(images, (0.5,) * 3, (0.2,) * 3).dtype is torch.float32


def test_the_same_generator_gives_the_same_view_and_the_images_stay() -> None:
    images = pictures()
    before = images.clone()
    augment = Augment(padding=2, flip=True, erase=0.3)
    first, again, other = (augment(images, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, before)
    assert torch.equal(Augment()(images), images)


def test_bad_settings_are_errors() -> None:
    assert "padding" in error_of(lambda: Augment(padding=-1))
    assert "erase" in error_of(lambda: Augment(erase=2.0))
    for crop in ((0.0, 1.0), (0.5, 0.2), (0.5, 1.5)):
        assert "crop" in error_of(lambda crop=crop: Augment(crop=crop))
    assert "padding" in error_of(lambda: Augment(crop=(0.1, 1.0), padding=2))
    assert "size" in error_of(lambda: Augment(size=32))
    assert "size" in error_of(lambda: Augment(crop=(0.1, 1.0), size=0))
    assert "randaugment" in error_of(lambda: Augment(policy="augmix"))
    assert "operations" in error_of(lambda: Augment(operations=0))
    assert "magnitude" in error_of(lambda: Augment(magnitude=11.0))
    assert "magnitude_std" in error_of(lambda: Augment(magnitude_std=-1.0))
    assert "jitter" in error_of(lambda: Augment(jitter=float("nan")))


def test_normalise_takes_lists() -> None:
    images = torch.arange(24, dtype=torch.uint8).reshape(1, 3, 2, 4)
    mean, std = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
    assert torch.equal(normalise(images, list(mean), list(std)), normalise(images, mean, std))
