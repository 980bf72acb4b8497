"""Feature maps by stride against the stand-alone network, layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsnet
from dsnet.models.group_by_route import run_gated
from tests.support import TINY, assert_close, error_of, images, random_model
from tests.support.networks import network

SIZES = (16, 32)


def links(module: nn.Module) -> list[nn.Module]:
    """The blocks of a stand-alone network in order, without its head."""
    *parts, _ = module.children()
    return [block for part in parts for block in (part if isinstance(part, nn.Sequential) else [part])]


def maps_of(extracted: nn.Module, x: Tensor) -> list[Tensor]:
    """The last output of every resolution, and the tokens of a transformer as a map."""
    found: list[Tensor] = []
    side, y = x.shape[-1], x
    for link in links(extracted):
        before, y = y, link(y)
        if y.ndim == 4 and y.shape[-1] < before.shape[-1] and before is not x:
            found.append(before)
        if y.ndim == 3 and before.ndim == 4:
            found.append(before)
    if y.ndim == 3:
        grid = int((y.shape[1] - 1) ** 0.5)
        assert side % grid == 0
        y = torch.stack([token.T.unflatten(1, (grid, grid)) for token in y[:, 1:]])
    return [*found, y]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TINY)
def test_maps_equal_those_of_the_extracted_network(name: str, size: int) -> None:
    model = random_model(name)
    x = images(model, 2, size=size)
    for route in (model.space.smallest, model.space[len(model.space) // 2], model.space.largest):
        found = model.features(x, route)
        expected = maps_of(dsnet.extract(model, route, fold_bn=False, image_size=size), x)
        shapes = model.feature_shapes(route, size)
        assert list(found.maps) == list(shapes)
        assert list(found.maps) == sorted(found.maps)
        for (stride, y), wanted in zip(found.maps.items(), expected, strict=True):
            assert tuple(y.shape[1:]) == tuple(shapes[stride])
            assert_close(y, wanted, 1e-9)
        assert max(found.maps) == model.input_spec.stride
        assert found.indices.tolist() == [0, 1]
        assert found.route == route


@pytest.mark.parametrize("name", TINY)
def test_feature_shapes_match_the_maps_of_all_routes(name: str) -> None:
    model = random_model(name)
    for size in SIZES:
        x = torch.zeros(1, 3, size, size, dtype=torch.float64)
        for route in model.space:
            maps = model.features(x, route).maps
            shapes = model.feature_shapes(route, (size, size))
            assert {stride: tuple(y.shape[1:]) for stride, y in maps.items()} == {
                stride: tuple(shape) for stride, shape in shapes.items()
            }


def test_routes_without_padding_have_smaller_maps_at_the_same_strides() -> None:
    model = dsnet.create_model("ds_mbnet_plus")
    small, large = (model.feature_shapes(r) for r in (model.space.smallest, model.space.largest))
    assert list(small) == list(large) == [2, 4, 8, 16, 32]
    assert [shape.height for shape in large.values()] == [112, 56, 28, 14, 7]
    assert [shape.height for shape in small.values()] == [112, 56, 28, 13, 6]
    assert [shape.channels for shape in large.values()] == [32, 48, 96, 640, 1152]


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_vit_plus_tiny", "ds_resnet_tiny"])
def test_routed_images_have_the_maps_of_their_route(name: str) -> None:
    model = network(name, torch.float64)
    x = images(model, 12, size=model.input_spec.image_size)
    groups = model.features(x)
    choices = run_gated(model, x).choices.tolist()
    assert len(groups) > 1
    assert sorted(torch.cat([group.indices for group in groups]).tolist()) == list(range(12))
    for group in groups:
        for index in group.indices.tolist():
            assert tuple(choices[index]) == group.route.choices
        alone = model.features(x[group.indices], group.route).maps
        for stride, y in group.maps.items():
            assert_close(y, alone[stride], 1e-9)
    assert model.features(x[:0]) == []


def test_maps_take_gradients_and_gates_need_eval_mode() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    x = torch.randn(2, 3, 16, 16)
    model.train()
    sum(y.square().mean() for y in model.features(x, 1).maps.values()).backward()
    stem = model.get_parameter("stem.conv.weight").grad
    assert stem is not None
    assert float(stem.abs().sum()) > 0
    assert "eval mode" in error_of(lambda: model.features(x))
    assert "takes images" in error_of(lambda: model.features(torch.randn(2, 1, 16, 16), 0))
    assert "99" in error_of(lambda: model.features(x, 99))
