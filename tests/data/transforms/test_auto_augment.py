"""Every operation against Pillow, policies against their operations; nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from dsnet.data.transforms import auto_augment as policies
from dsnet.data.transforms.auto_augment import (
    CIFAR10,
    IMAGENET,
    OPERATIONS,
    apply_operations,
    auto_augment,
    rand_augment,
)
from tests.support import error_of

COUNT, HEIGHT, WIDTH = 24, 37, 46
BLENDS = ("color", "contrast", "brightness", "sharpness")
MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
NEUTRAL = {"posterize": 8.0, "solarize": 256.0} | dict.fromkeys(BLENDS, 1.0)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(kind: str, count: int = COUNT, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Noise; smooth, each channel with a range of its own; or few levels, the first image with one."""
    generator = seeded(0)
    noise = torch.randint(0, 256, (count, 3, height, width), generator=generator, dtype=torch.uint8)
    if kind == "noise":
        return noise
    if kind == "flat":
        levels = torch.arange(count) // 2 + 1
        return (noise % levels[:, None, None, None] * 9 + 17).to(torch.uint8)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    low, high = torch.rand(2, count, 3, 1, 1, generator=generator).sort(0).values
    smooth = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=True)
    return ((low + (high - low) * smooth) * 255).round().to(torch.uint8)


def by_pillow(images: Tensor, call: Callable[..., Image.Image], *arguments: Tensor) -> Tensor:
    """Image by image through Pillow, with the image's own arguments."""
    done = []
    for i, image in enumerate(images):
        result = call(Image.fromarray(image.permute(1, 2, 0).numpy()), *(a[i].item() for a in arguments))
        done.append(torch.from_numpy(np.array(result)).permute(2, 0, 1))
    return torch.stack(done)


def number(name: str) -> int:
    return OPERATIONS.index(name)


def every(name: str, images: Tensor, arguments: Tensor, mode: policies.Interpolation = "nearest") -> Tensor:
    operations = torch.full((1, len(images)), number(name))
    return apply_operations(images, operations, arguments[None], mode)


def solarize_add(image: Image.Image, amount: int) -> Image.Image:
    return image.point([min(255, i + amount) if i < 128 else i for i in range(256)] * 3)


@pytest.mark.parametrize("kind", ["noise", "smooth", "flat"])
def test_operations_on_bytes_equal_pillow(kind: str) -> None:
    images = pictures(kind)
    bits = torch.arange(COUNT) % 8 + 1
    thresholds = torch.linspace(0, 256, COUNT).round().long()
    amounts = torch.linspace(0, 200, COUNT).round().long()
    expected = by_pillow(images, ImageOps.posterize, bits)
    assert torch.equal(policies.posterize(images, bits), expected)
    assert torch.equal(every("posterize", images, bits), expected)
    expected = by_pillow(images, ImageOps.solarize, thresholds)
    assert torch.equal(policies.solarize(images, thresholds), expected)
    assert torch.equal(every("solarize", images, thresholds), expected)
    expected = by_pillow(images, solarize_add, amounts)
    assert torch.equal(policies.solarize_add(images, amounts), expected)
    assert torch.equal(every("solarize_add", images, amounts), expected)
    for name in ("invert", "autocontrast", "equalize"):
        expected = by_pillow(images, getattr(ImageOps, name))
        assert torch.equal(getattr(policies, name)(images), expected), name
        assert torch.equal(every(name, images, torch.zeros(COUNT)), expected), name


def test_posterize_to_no_bits_is_black() -> None:
    assert not policies.posterize(pictures("noise"), torch.zeros(COUNT)).any()


def test_equalize_of_few_pixels_and_of_many_in_the_brightest_level() -> None:
    tiny = pictures("noise", height=15, width=17)  # 255 pixels: steps of 0, which change nothing
    assert torch.equal(policies.equalize(tiny), tiny)
    for height, dark in ((16, 256), (31, 509)):  # a step of 1 and a remainder: values beyond 255 are cut
        images = torch.full((1, 3, height, 40), 250, dtype=torch.uint8)
        images.view(3, -1)[:, :dark] = torch.arange(dark) % 200
        assert torch.equal(policies.equalize(images), by_pillow(images, ImageOps.equalize))


@pytest.mark.parametrize("kind", ["noise", "smooth", "flat"])
@pytest.mark.parametrize("name", BLENDS)
def test_enhancements_equal_pillow(name: str, kind: str) -> None:
    images = pictures(kind)
    factors = torch.linspace(0, 2.5, COUNT, dtype=torch.float64)
    enhancer = getattr(ImageEnhance, name.capitalize())
    expected = by_pillow(images, lambda image, factor: enhancer(image).enhance(factor), factors)
    for done in (getattr(policies, name)(images, factors), every(name, images, factors)):
        away = (done.int() - expected.int()).abs()
        # Equal where Pillow rounds products before it adds; a build that fuses both may cut off elsewhere.
        assert away.max() <= 1
        assert (away > 0).double().mean() < 1e-3


def matrix(name: str, value: float) -> tuple[float, ...]:
    """Pillow's (a, b, c, d, e, f) from pixels of the result to pixels of the image."""
    cos, sin = math.cos(math.radians(value)), -math.sin(math.radians(value))
    x, y = WIDTH / 2, HEIGHT / 2
    return {
        "shear_x": (1, value, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, value, 1, 0),
        "translate_x": (1, 0, value * WIDTH, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, value * HEIGHT),
        "rotate": (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y),
    }[name]


def clear_of_ties(name: str, values: Tensor) -> Tensor:
    """[B, 1, H, W]: whether both places to sample are clearly in one pixel."""
    x, y = torch.arange(WIDTH).double() + 0.5, torch.arange(HEIGHT).double()[:, None] + 0.5
    clear = []
    for a, b, c, d, e, f in (matrix(name, value) for value in values.tolist()):
        places = torch.stack((a * x + b * y + c, d * x + e * y + f))
        clear.append(((places - places.round()).abs() > 1e-3).all(0))
    return torch.stack(clear)[:, None]


@pytest.mark.parametrize("kind", ["noise", "smooth"])
@pytest.mark.parametrize("name", MOVES)
def test_affine_operations_equal_pillow(name: str, kind: str) -> None:
    images = pictures(kind)
    most = 40.0 if name == "rotate" else 0.47
    values = (2 * torch.rand(COUNT, generator=seeded(), dtype=torch.float64) - 1) * most
    if name == "translate_x":
        values[:5] = torch.tensor([-7, -1, 0, 1, 30]) / WIDTH
    clear = clear_of_ties(name, values)
    assert clear.double().mean() > 0.95

    def move(image: Image.Image, value: float, method: Image.Resampling) -> Image.Image:
        if name == "rotate":
            return image.rotate(value, method, fillcolor=(128,) * 3)
        return image.transform(
            image.size, Image.Transform.AFFINE, matrix(name, value), method, fillcolor=(128,) * 3
        )

    expected = by_pillow(images, lambda image, value: move(image, value, Image.Resampling.NEAREST), values)
    assert (expected != images).any()
    assert torch.equal(every(name, images, values) * clear, expected * clear)
    # Pillow cuts off the fraction that is rounded here.
    expected = by_pillow(images, lambda image, value: move(image, value, Image.Resampling.BILINEAR), values)
    above = (every(name, images, values, "bilinear").int() - expected.int()) * clear
    assert above.min() == 0
    assert above.max() == 1


def test_neutral_arguments_change_nothing() -> None:
    images = pictures("noise")
    for name in OPERATIONS:
        if name in ("autocontrast", "equalize", "invert"):
            continue
        for mode in ("nearest", "bilinear"):
            done = every(name, images, torch.full((COUNT,), NEUTRAL.get(name, 0.0)), mode)
            assert torch.equal(done, images), name


ARGUMENTS = {
    "posterize": st.integers(0, 8),
    "solarize": st.integers(0, 256),
    "solarize_add": st.integers(0, 110),
    "rotate": st.floats(-30, 30),
} | dict.fromkeys(BLENDS, st.floats(0, 2))


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    rounds, count = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    names = draw(st.lists(st.sampled_from(OPERATIONS), min_size=rounds * count, max_size=rounds * count))
    values = [float(draw(ARGUMENTS.get(name, st.floats(-0.4, 0.4)))) for name in names]
    operations = torch.tensor([number(name) for name in names]).view(rounds, count)
    return operations, torch.tensor(values, dtype=torch.float64).view(rounds, count)


@settings(deadline=None, max_examples=60)
@given(choices(), st.integers(1, 20), st.integers(1, 20), st.sampled_from(["nearest", "bilinear"]))
def test_an_image_is_the_same_alone_and_in_a_batch(
    drawn: tuple[Tensor, Tensor], height: int, width: int, mode: policies.Interpolation
) -> None:
    operations, arguments = drawn
    images = pictures("noise", operations.shape[1], height, width)
    done = apply_operations(images, operations, arguments, mode)
    assert done.dtype is torch.uint8
    assert done.shape == images.shape
    for i in range(len(images)):
        image = images[i : i + 1]
        for operation, argument in zip(operations[:, i], arguments[:, i], strict=True):
            image = every(OPERATIONS[operation], image, argument[None], mode)
        assert torch.equal(done[i], image[0])


def test_policy_tables_have_the_form_of_the_paper() -> None:
    for table in (CIFAR10, IMAGENET):
        assert len(table) == 25
        for line in table:
            assert len(line) == 2
            for name, probability, level in line:
                assert name in OPERATIONS
                assert round(10 * probability) == pytest.approx(10 * probability)
                assert 0 <= probability <= 1
                assert level in range(10)


@pytest.mark.parametrize(
    ("table", "kinds", "chances", "levels"), [(CIFAR10, 13, 26.5, 267), (IMAGENET, 10, 31, 287)]
)
def test_policy_tables_have_the_checksums_of_the_paper(
    table: policies.PolicyTable, kinds: int, chances: float, levels: int
) -> None:
    steps = [step for line in table for step in line]
    assert len({name for name, _, _ in steps}) == kinds
    assert sum(chance for _, chance, _ in steps) == pytest.approx(chances)
    assert sum(level for _, _, level in steps) == levels


def outcomes(images: Tensor, name: str, arguments: list[float]) -> list[Tensor]:
    return [every(name, images, torch.full((len(images),), value)) for value in arguments]


def matches(done: Tensor, candidates: list[Tensor]) -> list[int]:
    """How many images equal each candidate; every image must equal one of them."""
    equal = torch.stack([(done == candidate).flatten(1).all(1) for candidate in candidates])
    assert bool(equal.any(0).all())
    return equal.sum(1).tolist()


@pytest.mark.parametrize(
    ("name", "level", "arguments"),
    [
        ("posterize", 8, [1.0]),
        ("posterize", 5, [2.0]),
        ("solarize", 3, [180.0]),
        ("solarize", 8, [52.0]),
        ("color", 0, [0.1]),
        ("brightness", 9, [1.72]),
        ("contrast", 5, [1.0]),
        ("shear_x", 5, [-0.15, 0.15]),
        ("translate_y", 9, [-9 / 32, 9 / 32]),
        ("rotate", 8, [-24.0, 24.0]),
    ],
)
def test_levels_of_autoaugment(name: str, level: int, arguments: list[float]) -> None:
    images = pictures("noise", 100)
    done = auto_augment(images, (((name, 1.0, level), ("identity", 1.0, 0)),), seeded())
    counts = matches(done, outcomes(images, name, arguments))
    assert min(counts) >= 35 * 2 // len(arguments)


def test_both_steps_of_a_line_happen_in_order_and_with_their_probability() -> None:
    images = pictures("noise", 1000, 6, 6)
    table = ((("posterize", 0.3, 9), ("invert", 0.6, 0)), (("solarize", 1.0, 5), ("posterize", 1.0, 9)))
    done = auto_augment(images, table, seeded())
    one = torch.ones(1000)
    posterized = policies.posterize(images, one)
    candidates = [
        images,
        posterized,
        policies.invert(images),
        policies.invert(posterized),
        policies.posterize(policies.solarize(images, 128 * one), one),
    ]
    expected = [0.5 * 0.7 * 0.4, 0.5 * 0.3 * 0.4, 0.5 * 0.7 * 0.6, 0.5 * 0.3 * 0.6, 0.5]
    assert [count / 1000 for count in matches(done, candidates)] == pytest.approx(expected, abs=0.05)


def timm_arguments(name: str, level: float) -> list[float]:
    """What timm gives an operation of "rand-m{level}-inc1", with both signs where one is drawn."""
    share = level / 10
    if name in BLENDS:
        return [1 - share * 0.9, 1 + share * 0.9]
    if name in MOVES:
        most = {"shear_x": 0.3, "shear_y": 0.3, "translate_x": 0.45, "translate_y": 0.45, "rotate": 30}[name]
        return [-share * most, share * most]
    whole = {"posterize": 4 - int(share * 4), "solarize": 256 - int(share * 256)}
    return [float(whole.get(name, int(share * 110)))]


@pytest.mark.parametrize("level", [0.0, 3.5, 9.0, 10.0])
def test_levels_of_randaugment(level: float) -> None:
    images = pictures("smooth", 450, 16, 18)
    done = rand_augment(images, 1, level, 0.0, seeded(), probability=1.0, mode="nearest")
    if level >= 9:  # all of them change all but a few of these images
        assert (done == images).flatten(1).all(1).double().mean() < 0.01
    names = OPERATIONS[1:]
    candidates = [outcomes(images, name, timm_arguments(name, level)) for name in names]
    counts = matches(done, [candidate for group in candidates for candidate in group])
    least = [min(counts.pop(0) for _ in group) / len(group) for group in candidates]
    assert len(least) == 15
    assert min(least) > 3  # 450 draws from 15 operations, some of two signs: 15 or 30 each


def test_randaugment_does_an_operation_half_of_the_time_and_several_in_turn() -> None:
    images = pictures("noise", 1000, 12, 12)
    for operations, share in ((1, 0.5), (2, 0.25), (3, 0.125)):
        done = rand_augment(images, operations, 9.0, 0.0, seeded())
        same = (done == images).flatten(1).all(1).double().mean()
        # On noise with 0 and 255 in all channels autocontrast may change nothing either.
        assert share - 0.04 < same < share + 0.08


def test_magnitudes_deviate_and_stay_within_zero_and_ten() -> None:
    images = pictures("smooth", 1, 16, 18).expand(800, -1, -1, -1)
    exact, spread = (rand_augment(images, 1, 9.0, std, seeded()).flatten(1) for std in (0.0, 0.5))
    assert 20 < len(exact.unique(dim=0)) <= 25  # 15 operations, 9 of them with two signs, and none
    assert len(spread.unique(dim=0)) > 100
    images = pictures("smooth", 200, 12, 14)
    done = rand_augment(images, 1, 5.0, 1e9, seeded(), probability=1.0, mode="nearest")
    ends = [outcomes(images, name, timm_arguments(name, end)) for name in OPERATIONS[1:] for end in (0, 10)]
    matches(done, [candidate for group in ends for candidate in group])


@pytest.mark.parametrize(
    "policy",
    [
        lambda images, host: auto_augment(images, CIFAR10, host),
        lambda images, host: auto_augment(images, IMAGENET, host),
        lambda images, host: rand_augment(images, 2, 9.0, 0.5, host),
    ],
)
def test_draws_follow_the_generator_and_differ_by_image(
    policy: Callable[[Tensor, torch.Generator | None], Tensor],
) -> None:
    images = pictures("smooth", 1, 16, 16).repeat(200, 1, 1, 1)
    before, state = images.clone(), torch.get_rng_state()
    first, again, other = (policy(images, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, before)
    assert len(first.flatten(1).unique(dim=0)) > 15


def test_no_operation_synchronises_with_the_device() -> None:
    images = pictures("noise").to("meta")  # has no values: whatever needs one fails
    for done in (auto_augment(images, CIFAR10), auto_augment(images, IMAGENET), rand_augment(images)):
        assert done.device.type == "meta"
        assert done.shape == images.shape
        assert done.dtype is torch.uint8


def test_bad_input_is_refused() -> None:
    grey = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    assert "[B, 3, H, W]" in error_of(lambda: auto_augment(grey, CIFAR10))
    assert "float32" in error_of(lambda: rand_augment(torch.zeros(2, 3, 4, 4)))
    assert "solarize_add" in error_of(lambda: auto_augment(grey, ((("blur", 1.0, 1), ("invert", 1.0, 1)),)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_gpu_gives_the_same_result_without_synchronisation() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    images = pictures("smooth", 512, 32, 32)
    there = images.to("cuda")
    for table in (CIFAR10, IMAGENET):
        expected = auto_augment(images, table, seeded())
        torch.cuda.set_sync_debug_mode("error")
        try:
            done = auto_augment(there, table, seeded())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (done.cpu() != expected).double().mean() < 1e-3
