"""Masking and indexing compute the logits of the routes and leave the network unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from benchmarks import slicing

from dsnet.benchmark._baselines import IndexedConv2d, IndexedLinear, indexing, masking
from dsnet.models.group_by_route import run_assigned
from dsnet.slicing import SlicedConv2d, SlicedLinear
from tests.support import assert_close, random_model
from tests.support.networks import network, pictures

SEVERAL = [("ds_mbnet_tiny", None), ("ds_resnet_tiny", None), ("ds_resnet_tiny", "stage")]


@pytest.mark.parametrize(("name", "bn_key"), [*SEVERAL, ("ds_resnet_plus_tiny", None)])
def test_masking_computes_the_logits_of_each_images_route(name: str, bn_key: str | None) -> None:
    model = network(name, torch.float64, bn_key)
    routes = list(model.space)
    x, index = pictures(model, 2 * len(routes)), torch.arange(2 * len(routes)) % len(routes)
    logits = masking(model, routes)(x, index)
    for position, route in enumerate(routes):
        assert_close(logits[index == position], model(x[index == position], route), 1e-9)
    widest = model(x[index == 0], model.space.largest)
    assert not torch.allclose(logits[index == 0], widest, rtol=1e-3), "the routes have different logits"


def test_masking_of_group_norms() -> None:
    model = random_model("ds_mbnet_tiny", norm="group")
    x = pictures(model, 4)
    logits = masking(model, list(model.space))(x, torch.arange(4))
    for route in range(4):
        assert_close(logits[route : route + 1], model(x[route : route + 1], route), 1e-9)


@pytest.mark.parametrize(
    ("name", "bn_key"), [*SEVERAL, ("ds_mbnet_plus_tiny", None), ("ds_vit_plus_tiny", None)]
)
def test_indexing_computes_the_logits_of_the_network(name: str, bn_key: str | None) -> None:
    model = network(name, torch.float64, bn_key)
    indexed = indexing(model)
    x = pictures(model, 6)
    for route in (model.space.smallest, model.space.largest, model.space[1]):
        assert_close(indexed(x, route), model(x, route), 1e-12)
    mixed = [model.space[i] for i in (1, 0, -1, 1, 0, 2)]
    logits = run_assigned(indexed, x, torch.tensor([route.choices for route in mixed])).logits
    for image, route in enumerate(mixed):
        assert_close(logits[image : image + 1], model(x[image : image + 1], route), 1e-9)


def test_indexing_replaces_all_layers_and_shares_the_weights() -> None:
    model = copy.deepcopy(network("ds_mbnet_tiny"))
    indexed = indexing(model)
    layers = [m for m in indexed.modules() if isinstance(m, SlicedConv2d | SlicedLinear)]
    assert layers
    assert all(isinstance(layer, IndexedConv2d | IndexedLinear) for layer in layers)
    assert not any(isinstance(layer, IndexedConv2d | IndexedLinear) for layer in model.modules())
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is parameter for name, parameter in indexed.named_parameters())
    x = pictures(model, 2)
    before = indexed(x, 0)
    with torch.no_grad():
        model.head.classifier.weight.mul_(2)
    assert not torch.allclose(indexed(x, 0), before)


@pytest.mark.parametrize("per_group", [False, True])
def test_indexing_gathers_the_filters_of_groups(per_group: bool) -> None:
    layer = SlicedConv2d(8, 12, kernel=3, groups=4, per_group=per_group, bias=True, dtype=torch.float64)
    torch.nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(1))
    gathering = copy.deepcopy(layer)
    gathering.__class__ = IndexedConv2d
    gathering.indices = torch.arange(12)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = 8 if per_group else None
    assert_close(gathering(x, out), layer(x, out), 1e-12)


def test_masking_leaves_no_hooks_on_the_network() -> None:
    model = network("ds_mbnet_tiny")
    masking(model, list(model.space))(pictures(model, 4), torch.arange(4))
    assert not any(module._forward_hooks for module in model.modules())


def test_the_slicing_benchmark_compares_equal_methods() -> None:
    model = random_model("ds_mbnet_tiny", torch.float32)
    x = pictures(model, 3)
    methods = slicing.methods(model, x)
    assert set(methods) == set(slicing.METHODS)
    for name in ("masking", "indexing", "packed"):
        assert_close(methods[name](x), methods["slicing"](x), 1e-4)
