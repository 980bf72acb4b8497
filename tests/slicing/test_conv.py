"""Sliced convolutions against ``nn.Conv2d`` with weights copied by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dsnet.counts import Shape
from dsnet.slicing import SlicedConv2d
from dsnet.slicing import functional as SF
from tests.support import assert_close, error_of, randomise


def images(channels: int, size: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(channels)
    return torch.randn(2, channels, size, size, generator=generator, dtype=torch.float64)


def check(layer: SlicedConv2d, plain: nn.Conv2d, x: Tensor, out: int | None, **sizes: int) -> None:
    """The sliced call, the extracted layer, the count and the plain layer agree."""
    with torch.no_grad():
        expected = plain(x)
        assert_close(layer(x, out, **sizes), expected, 1e-12)
        assert_close(layer.extract(x.shape[1], out, **sizes)(x), expected, 1e-12)
    cost, shape = layer.cost(Shape(*x.shape[1:]), out, **sizes)
    assert tuple(shape) == tuple(expected.shape[1:])
    assert cost.params == sum(p.numel() for p in plain.parameters())
    assert cost.layers == plain.weight.numel() * expected.shape[2] * expected.shape[3]


@settings(max_examples=40, deadline=None)
@given(
    full=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    kernels=st.sampled_from([(1, 1), (3, 1), (3, 3), (5, 3), (7, 3), (7, 5), (7, 7), (4, 2)]),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    bias=st.booleans(),
    data=st.data(),
)
def test_a_convolution_equals_a_plain_one_of_the_sliced_weights(
    full: tuple[int, int],
    kernels: tuple[int, int],
    stride: int,
    padding: int,
    bias: bool,
    data: st.DataObject,
) -> None:
    channels, out = data.draw(st.integers(1, full[0])), data.draw(st.integers(1, full[1]))
    full_kernel, kernel = kernels
    layer = SlicedConv2d(*full, kernel=full_kernel, stride=stride, bias=bias, dtype=torch.float64)
    randomise(layer)
    plain = nn.Conv2d(channels, out, kernel, stride, padding, bias=bias, dtype=torch.float64)
    offset = (full_kernel - kernel) // 2
    with torch.no_grad():
        for o in range(out):
            for i in range(channels):
                for row in range(kernel):
                    for column in range(kernel):
                        plain.weight[o, i, row, column] = layer.weight[o, i, offset + row, offset + column]
            if bias:
                plain.bias[o] = layer.bias[o]
    check(layer, plain, images(channels), out, kernel=kernel, padding=padding)


@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 0, 1), (2, 0, 1), (1, 1, 1), (1, 0, 2)])
def test_a_kernel_of_one_on_a_single_image(stride: int, padding: int, groups: int) -> None:
    """A CPU computes some of these by a matrix product."""
    layer = SlicedConv2d(6, 8, kernel=1, stride=stride, groups=groups, bias=True, dtype=torch.float64)
    randomise(layer)
    plain = nn.Conv2d(6, 8, 1, stride, padding, groups=groups, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
        plain.bias.copy_(layer.bias)
    check(layer, plain, images(6)[:1], 8, padding=padding)


def test_the_function_has_the_defaults_of_torchs_convolution() -> None:
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(SF.conv2d(images(3), weight), F.conv2d(images(3), weight), 1e-12)


@settings(max_examples=20, deadline=None)
@given(groups=st.integers(2, 5), g_in=st.integers(1, 3), g_out=st.integers(1, 3), data=st.data())
def test_groups_are_sliced_by_number(groups: int, g_in: int, g_out: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(2, groups))
    layer = SlicedConv2d(
        groups * g_in, groups * g_out, kernel=3, groups=groups, bias=True, dtype=torch.float64
    )
    randomise(layer)
    plain = nn.Conv2d(used * g_in, used * g_out, 3, padding=1, groups=used, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(layer.weight[: used * g_out])
        plain.bias.copy_(layer.bias[: used * g_out])
    check(layer, plain, images(used * g_in), None)


@settings(max_examples=20, deadline=None)
@given(groups=st.integers(2, 4), g_in=st.integers(1, 4), g_out=st.integers(1, 4), data=st.data())
def test_groups_are_sliced_by_filters(groups: int, g_in: int, g_out: int, data: st.DataObject) -> None:
    used_in, used_out = data.draw(st.integers(1, g_in)), data.draw(st.integers(1, g_out))
    layer = SlicedConv2d(
        groups * g_in, groups * g_out, kernel=3, groups=groups, per_group=True, bias=True, dtype=torch.float64
    )
    randomise(layer)
    plain = nn.Conv2d(groups * used_in, groups * used_out, 3, padding=1, groups=groups, dtype=torch.float64)
    with torch.no_grad():
        for group in range(groups):
            for f in range(used_out):
                plain.weight[group * used_out + f] = layer.weight[group * g_out + f, :used_in]
                plain.bias[group * used_out + f] = layer.bias[group * g_out + f]
    check(layer, plain, images(groups * used_in), groups * used_out)


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_a_depthwise_convolution_follows_its_input(channels: int) -> None:
    layer = randomise(SlicedConv2d(6, 6, kernel=5, groups=6, dtype=torch.float64))
    plain = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(layer.weight[:channels, :, 1:4, 1:4])
    check(layer, plain, images(channels), None, kernel=3)


@pytest.mark.parametrize(
    ("full", "kernel", "dilation"), [(5, 5, 2), (7, 7, 2), (7, 7, 3), (7, 5, 2), (3, 3, 2)]
)
def test_dilation_keeps_the_positions_of_taps(full: int, kernel: int, dilation: int) -> None:
    layer = randomise(SlicedConv2d(4, 4, kernel=full, dtype=torch.float64))
    x = images(3)
    # The same as the full window with the other taps set to zero.
    holes = torch.zeros(4, 3, kernel, kernel, dtype=torch.float64)
    start = (full - kernel) // 2
    window = layer.weight.detach()[:4, :3, start : start + kernel, start : start + kernel]
    holes[..., ::dilation, ::dilation] = window[..., ::dilation, ::dilation]
    with torch.no_grad():
        expected = F.conv2d(x, holes, padding=kernel // 2)
        assert_close(layer(x, kernel=kernel, dilation=dilation), expected, 1e-12)
        assert_close(layer.extract(3, kernel=kernel, dilation=dilation)(x), expected, 1e-12)
    cost, shape = layer.cost(Shape(3, 11, 11), kernel=kernel, dilation=dilation)
    assert tuple(shape) == (4, 11, 11)
    assert cost.params == 4 * 3 * len(range(0, kernel, dilation)) ** 2


@pytest.mark.parametrize(("padding", "largest"), [(0, 3), (1, 3), (3, 3)])
def test_padding_equals_the_papers_form(padding: int, largest: int) -> None:
    """Eq. 13: pad by the largest, then slice the padded input by the difference on every side."""
    layer = randomise(SlicedConv2d(4, 4, kernel=3, stride=2, dtype=torch.float64))
    x, cut = images(4), largest - padding
    padded = F.pad(x, (largest,) * 4)
    sliced = padded[:, :, cut : padded.shape[2] - cut, cut : padded.shape[3] - cut]
    with torch.no_grad():
        assert_close(layer(x, padding=padding), F.conv2d(sliced, layer.weight, stride=2), 1e-12)


def test_growing_a_convolution_by_zero_weights_changes_nothing() -> None:
    layer = randomise(SlicedConv2d(8, 8, kernel=5, dtype=torch.float64))
    x = images(8)
    with torch.no_grad():
        small = layer(x[:, :5], 3, kernel=3)
        assert_close(layer(x[:, :5], 8, kernel=3)[:, :3], small, 1e-12)  # more filters: the first stay
        layer.weight[:, 5:] = 0
        assert_close(layer(x, 3, kernel=3), small, 1e-12)  # more input channels of zero weight
        ring = torch.ones(5, 5, dtype=torch.bool)
        ring[1:4, 1:4] = False
        layer.weight[..., ring] = 0
        assert_close(layer(x, 3, kernel=5), small, 1e-12)  # a larger kernel with a ring of zeros


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_weights_start_by_the_fan_out_of_a_group(groups: int) -> None:
    layer = SlicedConv2d(64, 64, kernel=5, groups=groups, bias=True)
    expected = (2 / (25 * 64 / groups)) ** 0.5
    assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.1)
    assert layer.bias is not None
    assert not layer.bias.any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SlicedConv2d(8, 8, kernel=3)(images(9).float()), ["input channels 9", "1 to 8"]),
        (lambda: SlicedConv2d(8, 8, kernel=3)(images(8).float(), 9), ["filters 9", "1 to 8"]),
        (lambda: SlicedConv2d(8, 8, kernel=5)(images(8).float(), kernel=4), ["kernel 4", "odd"]),
        (lambda: SlicedConv2d(8, 8, kernel=5)(images(8).float(), kernel=7), ["kernel 7", "1 to 5"]),
        (lambda: SlicedConv2d(8, 8, kernel=5)(images(8).float(), dilation=3), ["dilation 3", "1, 2, 4"]),
        (lambda: SlicedConv2d(8, 8, kernel=3, groups=4)(images(3).float()), ["3 input channels", "2"]),
        (lambda: SlicedConv2d(8, 8, kernel=3, groups=8)(images(4).float(), 3), ["not 3", "4 channels"]),
        (
            lambda: SlicedConv2d(8, 8, kernel=3, groups=4, per_group=True)(images(8).float(), 6),
            ["6 filters", "4 groups"],
        ),
        (lambda: SlicedConv2d(8, 9, kernel=3, groups=4), ["8 → 9", "4 groups"]),
        (lambda: SlicedConv2d(8, 8, kernel=7).cost(Shape(8, 3, 3), padding=0), ["kernel of 7", "3 × 3"]),
    ],
)
def test_unavailable_sizes_of_a_convolution_are_errors(call: object, words: list[str]) -> None:
    message = error_of(call)
    for word in words:
        assert word in message
