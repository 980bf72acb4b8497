"""Sliced norms against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dsnet.slicing import (
    ImageStatistics,
    KeyState,
    Mode,
    SlicedGroupNorm,
    SlicedLayerNorm,
    SplitBatchNorm2d,
    batch_statistics,
)
from tests.support import assert_close, error_of, randomise


def features(channels: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 + 3 * torch.randn(4, channels, 5, 5, generator=generator, dtype=torch.float64)


def plain_norm(norm: SplitBatchNorm2d, channels: int, key: int) -> nn.BatchNorm2d:
    plain = nn.BatchNorm2d(channels, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(norm.weight[:channels])
        plain.bias.copy_(norm.bias[:channels])
        plain.running_mean.copy_(norm.mean[key, :channels])
        plain.running_var.copy_(norm.var[key, :channels])
    return plain


@pytest.mark.parametrize("channels", [1, 5, 8])
@pytest.mark.parametrize("key", [0, 2])
def test_each_key_has_its_own_statistics(channels: int, key: int) -> None:
    norm = randomise(SplitBatchNorm2d(8, keys=3, dtype=torch.float64)).eval()
    x = features(channels)
    expected = plain_norm(norm, channels, key).eval()(x)
    assert_close(norm(x, key), expected, 1e-12)
    assert_close(norm.extract(channels, key)(x), expected, 1e-12)


def test_images_with_different_keys_are_normalised_by_their_own_statistics() -> None:
    norm = randomise(SplitBatchNorm2d(8, keys=3, dtype=torch.float64)).eval()
    statistics = ImageStatistics(torch.tensor([2, 0, 2, 1]))
    for channels in (8, 5):
        x = features(channels)
        with torch.no_grad():
            mixed = norm(x, mode=Mode(images=statistics))
            for image, key in zip(range(4), (2, 0, 2, 1), strict=True):
                assert_close(mixed[image], norm(x, key)[image], 1e-12)
            others = statistics.of(torch.tensor([1, 0]))
            assert_close(norm(x[:2], mode=Mode(images=others))[0], norm(x, 1)[0], 1e-12)
        assert list(others.tables) == [norm]
        assert others.tables is statistics.tables


def test_training_updates_one_key_as_an_ordinary_batch_norm_would() -> None:
    norm = randomise(SplitBatchNorm2d(8, keys=3, dtype=torch.float64))
    norm.reset_parameters()
    plain = plain_norm(norm, 6, 1)
    before = norm.mean.clone()
    for seed in range(3):
        x = features(6, seed)
        assert_close(norm.train()(x, 1), plain.train()(x), 1e-12)
    assert_close(norm.mean[1, :6], plain.running_mean, 1e-12)
    assert_close(norm.var[1, :6], plain.running_var, 1e-12)
    assert norm.count.tolist() == [0, 3 * 4 * 25, 0]
    assert torch.equal(norm.mean[[0, 2]], before[[0, 2]])
    assert torch.equal(norm.mean[1, 6:], before[1, 6:])
    assert norm.states == [KeyState.FRESH, KeyState.RUNNING, KeyState.FRESH]


def test_statistics_can_come_from_the_pass_itself() -> None:
    norm = randomise(SplitBatchNorm2d(8, keys=2, dtype=torch.float64))
    x = features(5).requires_grad_()
    expected = plain_norm(norm, 5, 0).train()(x)
    for training in (False, True):
        before = {k: v.clone() for k, v in norm.state_dict().items()}
        actual = norm.train(training)(x, 0, Mode(statistics=batch_statistics))
        assert_close(actual, expected, 1e-12)
        assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())
    weights = torch.randn(actual.shape, dtype=torch.float64)
    (grad,) = torch.autograd.grad((actual * weights).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), x)
    assert_close(grad, wanted, 1e-10)


def test_batch_statistics_are_those_of_each_channel() -> None:
    x = features(5)
    mean, var = batch_statistics(SplitBatchNorm2d(8), x, 0)
    values = x.transpose(0, 1).flatten(1).numpy()
    assert_close(mean, torch.from_numpy(values.mean(1)), 1e-12)
    assert_close(var, torch.from_numpy(values.var(1)), 1e-12)


def test_a_single_value_of_a_channel_is_its_own_mean() -> None:
    norm = randomise(SplitBatchNorm2d(8, dtype=torch.float64))
    y = norm(features(5)[:1, :, :1, :1], mode=Mode(statistics=batch_statistics))
    assert_close(y.flatten(), norm.bias[:5], 1e-12)


def test_running_statistics_follow_those_of_torch() -> None:
    ours = SplitBatchNorm2d(4, keys=2, dtype=torch.float64)
    theirs = nn.BatchNorm2d(4, dtype=torch.float64).train()
    for seed in range(3):
        x = features(4, seed)
        theirs(x)
        ours.update_running(1, x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), 100)
    assert_close(ours.mean[1], theirs.running_mean, 1e-12)
    assert_close(ours.var[1], theirs.running_var, 1e-12)
    assert ours.count.tolist() == [0, 300]
    assert ours.states == [KeyState.FRESH, KeyState.RUNNING]


def test_exact_statistics_make_a_key_calibrated() -> None:
    norm = SplitBatchNorm2d(8, keys=2, dtype=torch.float64).eval()
    x = features(6)
    norm.set_statistics(1, x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), 100)
    assert norm.states == [KeyState.FRESH, KeyState.CALIBRATED]
    y = norm(x, 1)
    assert y.mean((0, 2, 3)).abs().max() < 1e-10
    assert (y.var((0, 2, 3), correction=0) - 1).abs().max() < 1e-4
    copy = SplitBatchNorm2d(8, keys=2, dtype=torch.float64).eval()
    copy.load_state_dict(norm.state_dict())
    assert copy.states == norm.states
    assert torch.equal(copy(x, 1), y)


def test_repeated_keys_start_alike_and_are_independent() -> None:
    norm = randomise(SplitBatchNorm2d(8, keys=3, dtype=torch.float64)).eval()
    norm.states[0], norm.states[1] = KeyState.FRESH, KeyState.RUNNING
    before, x = copy.deepcopy(norm), features(5)
    norm.repeat_keys(2)
    assert norm.keys == 6
    assert [norm.mean.shape, norm.var.shape, norm.count.shape] == [(6, 8), (6, 8), (6,)]
    fresh, running, calibrated = KeyState
    assert norm.states == [fresh, running, running, fresh, running, calibrated]
    for key in range(6):
        assert torch.equal(norm(x, key), before(x, key % 3))
        assert norm.count[key] == before.count[key % 3]
    assert torch.equal(norm.weight, before.weight)
    norm.train()(x, 4)
    norm.eval()
    for key in (0, 1, 2, 3, 5):
        assert torch.equal(norm(x, key), before(x, key % 3))
    assert "0 to 5" in error_of(lambda: norm(x, 6))
    again = SplitBatchNorm2d(8, keys=6, dtype=torch.float64).eval()
    again.load_state_dict(norm.state_dict())
    assert again.states == norm.states
    norm.reset_parameters()
    assert norm.states == [fresh] * 6


def test_a_channel_may_be_constant() -> None:
    norm = randomise(SplitBatchNorm2d(2, dtype=torch.float64)).eval()
    norm.set_statistics(0, torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0]), 100)
    assert norm.states == [KeyState.CALIBRATED]
    assert_close(norm(torch.full((1, 1, 2, 2), 3.0).double()).flatten(), norm.bias[:1].expand(4), 1e-12)


@pytest.mark.parametrize("width", [1, 5, 8])
def test_layer_norm_normalises_the_sliced_features(width: int) -> None:
    norm = randomise(SlicedLayerNorm(8, dtype=torch.float64))
    plain = nn.LayerNorm(width, eps=1e-6, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(norm.weight[:width])
        plain.bias.copy_(norm.bias[:width])
        x = torch.randn(2, 3, width, dtype=torch.float64)
        assert_close(norm(x), plain(x), 1e-12)
        assert_close(norm.extract(width)(x), plain(x), 1e-12)
    assert norm.cost(width).params == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("channels", [2, 6, 8])
def test_group_norm_keeps_the_width_of_its_groups(channels: int) -> None:
    norm = randomise(SlicedGroupNorm(8, channels_per_group=2, dtype=torch.float64))
    plain = nn.GroupNorm(channels // 2, channels, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(norm.weight[:channels])
        plain.bias.copy_(norm.bias[:channels])
        x = features(channels)
        assert_close(norm(x), plain(x), 1e-12)
        assert_close(norm.extract(channels, 0)(x), plain(x), 1e-12)
    assert norm.cost(channels).params == sum(p.numel() for p in plain.parameters())


def test_unavailable_widths_and_keys_are_errors() -> None:
    norm = SplitBatchNorm2d(8, keys=3)
    assert "key 3" in error_of(lambda: norm(torch.zeros(1, 8, 2, 2), 3))
    assert "0 to 2" in error_of(lambda: norm(torch.zeros(1, 8, 2, 2), -1))
    assert "width 9" in error_of(lambda: norm(torch.zeros(1, 9, 2, 2), 0))
    assert "0, 1, 2" in error_of(lambda: norm.set_extra_state(torch.tensor([0, 1, 9])))
    assert "0, 1, 2" in error_of(lambda: norm.set_extra_state(None))
    good = torch.ones(8)
    for mean, var in ((good * torch.nan, good), (good, -good), (good, good[:4]), (good, good[0])):
        assert "finite means" in error_of(lambda m=mean, v=var: norm.set_statistics(0, m, v, 1))
    assert norm.states[0] is KeyState.FRESH
    for layer in (SlicedLayerNorm(8), SlicedGroupNorm(8, channels_per_group=4)):
        assert "1 to 8" in error_of(lambda n=layer: n.cost(12))
    assert "1 to 8" in error_of(lambda: SlicedLayerNorm(8).extract(12))
    assert "off the grid" in error_of(lambda: SlicedGroupNorm(8, channels_per_group=4).extract(6, 0))
    group = SlicedGroupNorm(8, channels_per_group=4)
    assert "off the grid" in error_of(lambda: group(torch.zeros(1, 6, 2, 2)))
    assert "width 12" in error_of(lambda: group(torch.zeros(1, 12, 2, 2)))
    assert "multiple of 3" in error_of(lambda: SlicedGroupNorm(8, channels_per_group=3))
    assert "width 9" in error_of(lambda: SlicedLayerNorm(8)(torch.zeros(1, 9)))
