"""Extracted routes compute the same, have only layers of torch, and can be compiled."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import dsnet
from tests.support import FAMILIES, SUPERNETS, TINY, assert_close, error_of, images, random_model, randomise


@pytest.mark.parametrize("fold_bn", [True, False])
@pytest.mark.parametrize("name", SUPERNETS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_extracted_equals_sliced(name: str, fold_bn: bool, data: st.DataObject) -> None:
    model = random_model(name)
    route = model.space[data.draw(st.integers(0, len(model.space) - 1))]
    x = images(model, 2, seed=route.number)
    net = dsnet.extract(model, route, fold_bn=fold_bn, image_size=x.shape[-1])
    assert_close(net(x), model(x, route), 1e-10)


@pytest.mark.parametrize("fold_bn", [True, False])
@pytest.mark.parametrize("activation", ["silu", "relu", "hard_swish"])
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_mbnet_plus_tiny"])
def test_extracted_equals_sliced_with_every_activation(name: str, activation: str, fold_bn: bool) -> None:
    model = random_model(name, activation=activation)
    x = images(model, 2)
    for route in model.space:
        assert_close(dsnet.extract(model, route, fold_bn=fold_bn)(x), model(x, route), 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_extracted_equals_sliced_in_float32(name: str) -> None:
    model = random_model(name, torch.float32)
    x = images(model, 2)
    for route in (model.space.smallest, model.space.largest):
        net = dsnet.extract(model, route, image_size=x.shape[-1])
        assert_close(net(x), model(x, route), 1e-5)


@pytest.mark.parametrize("name", TINY)
def test_an_extracted_network_has_no_modules_of_this_package(name: str) -> None:
    model = random_model(name)
    for fold_bn in (True, False):
        net = dsnet.extract(model, model.space.largest, fold_bn=fold_bn)
        for module in net.modules():
            torch_made = type(module).__module__.startswith("torch") or isinstance(module, fx.GraphModule)
            assert torch_made, type(module)
        assert not net.training
        assert all(p.is_contiguous() for p in net.parameters())
        shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in net.parameters()}
        assert not shared
        x = images(model, 2)
        for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.equal(again(x), net(x))
    assert not any(isinstance(m, nn.BatchNorm2d) for m in dsnet.extract(model, 0).modules())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ds_mbnet_tiny", {}),
        ("ds_mbnet_tiny", {"activation": "relu"}),
        ("ds_mbnet_tiny", {"activation": "hard_swish"}),
        ("ds_resnet_plus_tiny", {}),
        ("ds_vit_plus_tiny", {}),
    ],
)
def test_an_unfolded_network_trains_like_the_supernet_at_its_route(
    name: str, options: dict[str, str]
) -> None:
    model = randomise(dsnet.create_model(name, dtype=torch.float64, **options))
    route = model.space[1]
    net = dsnet.extract(model, route, fold_bn=False)
    x = images(model, 4)
    model.train()(x, route).square().sum().backward()
    net.train()(x).square().sum().backward()
    classifier = net.head.classifier if "vit" in name else net.head[-1]
    used = model.head.classifier.weight.grad[:, : classifier.in_features]
    assert_close(classifier.weight.grad, used, 1e-10)
    first = next(p for n, p in net.named_parameters() if n.startswith("prefix"))
    assert_close(first.grad, model.stem.conv.weight.grad, 1e-10)


@pytest.mark.parametrize("name", TINY)
def test_torch_export_of_an_extracted_route(name: str) -> None:
    model = random_model(name)
    net = dsnet.extract(model, model.space[1])
    x = images(model, 3)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(net, (x,), dynamic_shapes=(batch,))
    for count in (1, 3, 7):
        x = images(model, count)
        assert_close(program.module()(x), net(x), 1e-10)


@pytest.mark.parametrize("name", TINY)
def test_torch_compile_of_a_bound_route(name: str) -> None:
    model = random_model(name, torch.float32)
    x = images(model, 2)
    bound = model.bind(model.space[1])
    assert_close(torch.compile(bound, fullgraph=True)(x), model(x, 1), 1e-5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("ds_resnet")) for name in FAMILIES],
)
def test_a_bound_route_of_every_family_is_one_graph(name: str) -> None:
    """Only traces; the slow test below also generates code."""
    model = random_model(name, torch.float32)
    x = images(model, 2)
    for route in (model.space.smallest, model.space.largest):
        compiled = torch.compile(model.bind(route), fullgraph=True, backend="eager")
        assert_close(compiled(x), model(x, route), 1e-5)
        torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_torch_compile_of_a_bound_route_of_every_family(name: str) -> None:
    """Generates code, half a minute for each family."""
    model = random_model(name, torch.float32)
    x = images(model, 2)
    compiled = torch.compile(model.bind(model.space.smallest), fullgraph=True)
    assert_close(compiled(x), model(x, model.space.smallest), 1e-4)


def test_a_bound_route_shares_the_weights() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    bound = model.bind(2)
    assert {p.data_ptr() for p in bound.parameters()} == {p.data_ptr() for p in model.parameters()}
    x = images(model, 2)
    assert torch.equal(bound(x), model(x, 2))
    assert "route 2 of ds_mbnet_tiny" in repr(bound)


def test_extracting_bad_input() -> None:
    assert "supernet" in error_of(lambda: dsnet.extract(nn.Linear(1, 1), 0))
    model = random_model("ds_vit_plus_tiny")
    assert "nearest" in error_of(lambda: dsnet.extract(model, 0, image_size=18))
