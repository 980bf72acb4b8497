"""Sliced linear layers and MLPs against ``nn.Linear`` with weights copied by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsnet.slicing import SlicedLinear, SlicedMLP
from tests.support import assert_close, error_of, randomise

sizes = st.integers(1, 12)


@settings(max_examples=40, deadline=None)
@given(full_in=sizes, full_out=sizes, data=st.data())
def test_a_slice_is_the_leading_block_of_the_matrix(full_in: int, full_out: int, data: st.DataObject) -> None:
    used_in, out = data.draw(st.integers(1, full_in)), data.draw(st.integers(1, full_out))
    layer = randomise(SlicedLinear(full_in, full_out, dtype=torch.float64))
    plain = nn.Linear(used_in, out, dtype=torch.float64)
    with torch.no_grad():
        for o in range(out):
            for i in range(used_in):
                plain.weight[o, i] = layer.weight[o, i]
            plain.bias[o] = layer.bias[o]
        x = torch.randn(3, used_in, dtype=torch.float64)
        assert_close(layer(x, out), plain(x), 1e-12)
        assert_close(layer.extract(used_in, out)(x), plain(x), 1e-12)


def test_growing_a_linear_layer_by_zero_weights_changes_nothing() -> None:
    layer = randomise(SlicedLinear(8, 8, dtype=torch.float64))
    x = torch.randn(2, 8, dtype=torch.float64)
    with torch.no_grad():
        small = layer(x[:, :5], 3)
        assert_close(layer(x[:, :5], 8)[:, :3], small, 1e-12)  # more outputs: the first stay
        layer.weight[:, 5:] = 0
        assert_close(layer(x, 3), small, 1e-12)  # more inputs of zero weight


def test_growing_an_mlp_by_zero_weights_changes_nothing() -> None:
    mlp = randomise(SlicedMLP(8, 16, dtype=torch.float64))
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        small = mlp(x, 10)
        mlp.fc2.weight[:, 10:] = 0
        assert_close(mlp(x, 16), small, 1e-12)


def test_an_mlp_is_its_two_layers_around_gelu() -> None:
    mlp = randomise(SlicedMLP(8, 16, dtype=torch.float64))
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        inner = nn.functional.gelu(x @ mlp.fc1.weight[:10, :6].T + mlp.fc1.bias[:10])
        expected = inner @ mlp.fc2.weight[:6, :10].T + mlp.fc2.bias[:6]
        assert_close(mlp(x, 10), expected, 1e-12)
        assert_close(mlp.extract(6, 10)(x), expected, 1e-12)


@pytest.mark.parametrize(("width", "out"), [(9, 4), (4, 9), (4, 0)])
def test_unavailable_sizes_of_a_linear_layer_are_errors(width: int, out: int) -> None:
    message = error_of(lambda: SlicedLinear(8, 8)(torch.zeros(1, width), out))
    assert "1 to 8" in message
    assert str(9 if 9 in (width, out) else 0) in message


def test_extraction_and_counting_do_not_clip_sizes() -> None:
    layer, mlp = SlicedLinear(8, 16), SlicedMLP(8, 16)
    for call in (
        lambda: layer.extract(9, 4),
        lambda: layer.extract(4, -1),
        lambda: layer.cost(9, 4),
        lambda: mlp.extract(8, 17),
        lambda: mlp.cost(9, 16, 1),
    ):
        assert "possible: 1 to" in error_of(call)


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_weights_start_from_a_truncated_normal_distribution(std: float) -> None:
    weight = SlicedLinear(256, 256, init_std=std).weight.detach()
    assert float(weight.std()) == pytest.approx(0.8796 * std, rel=0.03)  # a normal cut off at ± 2
    assert float(weight.abs().max()) <= 2 * std
    zeros = SlicedLinear(4, 4, init_std=0)
    assert not zeros.weight.any()
    assert zeros.bias is not None
    assert not zeros.bias.any()
