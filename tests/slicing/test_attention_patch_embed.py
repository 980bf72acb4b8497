"""Sliced attention and patch embedding against torch's own modules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsnet.counts import Shape
from dsnet.slicing import SlicedAttention, SlicedPatchEmbed
from tests.support import assert_close, error_of, randomise


def plain_attention(layer: SlicedAttention, width: int, heads: int, head_dim: int) -> nn.MultiheadAttention:
    """Build torch's own attention, which needs an embedding of heads × features."""
    assert width == heads * head_dim
    plain = nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
    rows = [h * layer.head_dim + d for h in range(heads) for d in range(head_dim)]
    with torch.no_grad():
        for i, part in enumerate((layer.q, layer.k, layer.v)):
            plain.in_proj_weight[i * width : (i + 1) * width] = part.weight[rows][:, :width]
            plain.in_proj_bias[i * width : (i + 1) * width] = part.bias[rows]
        plain.out_proj.weight.copy_(layer.proj.weight[:width][:, rows])
        plain.out_proj.bias.copy_(layer.proj.bias[:width])
    return plain.eval()


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 4), (2, 4), (3, 4), (2, 3), (4, 2), (3, 1)])
def test_heads_and_their_features_are_sliced_from_the_front(heads: int, head_dim: int) -> None:
    layer = randomise(SlicedAttention(12, 4, 4, dtype=torch.float64))
    width = heads * head_dim
    x = torch.randn(2, 5, width, dtype=torch.float64)
    with torch.no_grad():
        expected, _ = plain_attention(layer, width, heads, head_dim)(x, x, x, need_weights=False)
        assert_close(layer(x, heads, head_dim), expected, 1e-12)
        assert_close(layer.extract(width, heads, head_dim)(x), expected, 1e-12)


@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 12), heads=st.integers(1, 4), head_dim=st.integers(1, 4))
def test_any_sizes_run_and_equal_the_extracted_layer(width: int, heads: int, head_dim: int) -> None:
    layer = randomise(SlicedAttention(12, 4, 4, dtype=torch.float64))
    x = torch.randn(2, 5, width, dtype=torch.float64)
    with torch.no_grad():
        plain = layer.extract(width, heads, head_dim)
        assert_close(layer(x, heads, head_dim), plain(x), 1e-12)
    assert layer.cost(width, heads, head_dim, 5).params == sum(p.numel() for p in plain.parameters())


def test_growing_attention_by_zero_weights_changes_nothing() -> None:
    layer = randomise(SlicedAttention(12, 4, 4, dtype=torch.float64))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    with torch.no_grad():
        small = layer(x, 2)
        layer.proj.weight[:, 8:] = 0
        assert_close(layer(x, 4), small, 1e-12)  # more heads, none of which is read
        narrow = layer(x[..., :7], 2)
        for part in (layer.q, layer.k, layer.v):
            part.weight[:, 7:] = 0
        assert_close(layer(x, 2)[..., :7], narrow, 1e-12)  # a wider embedding of zero weight


@pytest.mark.parametrize(("heads", "head_dim"), [(5, 4), (0, 4), (2, 5)])
def test_too_many_heads_are_an_error(heads: int, head_dim: int) -> None:
    assert "1 to " in error_of(lambda: SlicedAttention(12, 4, 4)(torch.zeros(1, 2, 12), heads, head_dim))


@pytest.mark.parametrize("width", [3, 8])
def test_tokens_are_patches_with_positions_and_the_class_token_first(width: int) -> None:
    layer = randomise(SlicedPatchEmbed(3, 8, patch=2, grid=4, dtype=torch.float64))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        tokens = layer(x, width)
        assert tokens.shape == (2, 17, width)
        first = (layer.class_token + layer.positions[0])[:width]
        assert_close(tokens[:, 0], first.expand(2, width), 1e-12)
        weight = layer.proj.weight[:width].flatten(1)
        for row in range(4):
            for column in range(4):
                patch = x[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
                index = 1 + 4 * row + column
                expected = patch @ weight.T + layer.proj.bias[:width] + layer.positions[index, :width]
                assert_close(tokens[:, index], expected, 1e-12)
        assert_close(layer.extract(Shape(3, 8, 8), width)(x), tokens, 1e-12)


def test_growing_the_embedding_leaves_the_first_features_as_they_are() -> None:
    layer = randomise(SlicedPatchEmbed(3, 8, patch=2, grid=4, dtype=torch.float64))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert_close(layer(x, 8)[..., :5], layer(x, 5), 1e-12)


def test_positions_are_resized_for_another_grid() -> None:
    layer = randomise(SlicedPatchEmbed(3, 8, patch=2, grid=4, dtype=torch.float64))
    with torch.no_grad():
        layer.proj.weight.zero_()
        layer.positions[1:] = layer.positions[1]  # constant, and stays so
        x = torch.randn(1, 3, 12, 20, dtype=torch.float64)
        tokens = layer(x, 8)
        assert tokens.shape == (1, 1 + 6 * 10, 8)
        expected = layer.positions[1] + layer.proj.bias
        assert_close(tokens[0, 1:], expected.expand(60, 8), 1e-12)
        assert_close(layer.extract(Shape(3, 12, 20), 8)(x), tokens, 1e-12)


def test_unavailable_sizes_are_errors_in_every_method() -> None:
    layer = SlicedAttention(12, 4, 4)
    for call in (
        lambda: layer.extract(13, 4, 4),
        lambda: layer.cost(12, 5, 4, 2),
        lambda: layer.extract(12, 4, 5),
    ):
        assert "possible: 1 to" in error_of(call)
    assert "embedding 13" in error_of(lambda: layer(torch.zeros(1, 2, 13), 2, 2))
    embed = SlicedPatchEmbed(3, 8, patch=4, grid=2)
    assert "9 × 9" in error_of(lambda: embed(torch.zeros(1, 3, 9, 9), 8))


def test_an_embedding_starts_from_a_truncated_normal_distribution() -> None:
    layer = SlicedPatchEmbed(32, 256, patch=4, grid=16)
    for weight in (layer.proj.weight, layer.class_token, layer.positions):
        assert float(weight.detach().std()) == pytest.approx(0.8796 * 0.02, rel=0.2)
        assert float(weight.detach().abs().max()) <= 0.04
