"""Networks of timm with random weights: largest route, extracted routes, mixed batches, channel groups."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dsnet
from dsnet.models.convert import ConvertedNetwork, convert
from dsnet.models.convert.sources import timm_network
from tests.support import assert_close, need_timm, spread_gates
from tests.support.small_networks import DepthwiseNet, random_images, randomise_module

need_timm()

SIZE = 64
QUICK = [
    "resnet18",
    "mobilenetv3_large_100",
    "tf_efficientnet_lite0",
    "convnext_atto",
    "vit_tiny_patch16_224",
]
SLOW = [
    "efficientnet_b0",
    "regnety_004",
    "ghostnet_100",
    "resnet50",
    "resnext50_32x4d",
    "mobilenetv2_100",
    "densenet121",
    "vgg11_bn",
    "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "mixer_s32_224",
]
SIZES = {"swin_tiny_patch4_window7_224": 224, "mixer_s32_224": 224}  # they run at this size only
NETWORKS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@functools.cache
def plain(name: str) -> nn.Module:
    """A network of timm with random weights and statistics."""
    network = timm_network(name, num_classes=10, image_size=SIZES.get(name, SIZE))
    return randomise_module(network.double()).eval().requires_grad_(False)


@functools.cache
def converted(name: str) -> ConvertedNetwork:
    """The converted network, with the weights of the original."""
    x = random_images(1, SIZES.get(name, SIZE))
    return convert(plain(name), x, widths=(0.25, 0.5, 1.0))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_largest_route_equals_the_original(name: str) -> None:
    model, x = converted(name), random_images(2, SIZES.get(name, SIZE), seed=3)
    assert len(model.space) == 3
    assert_close(model(x, model.space.largest), plain(name)(x), 1e-10)
    costs = [dsnet.madds(model, route) for route in model.space]
    assert costs == sorted(costs)
    assert costs[0] < 0.8 * costs[-1]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_extracted_route_equals_the_supernet(name: str) -> None:
    model = randomise_module(copy.deepcopy(converted(name)), seed=5)
    x = random_images(2, SIZES.get(name, SIZE), seed=3)
    for route in model.space:
        network = dsnet.extract(model, route)
        assert_close(network(x), model(x, route), 1e-10)
    unfolded = dsnet.extract(model, 0, fold_bn=False)
    assert dsnet.params(model, 0) == sum(p.numel() for p in unfolded.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_mixed_batch_equals_single_images(name: str) -> None:
    x = random_images(4, SIZES.get(name, SIZE), seed=3)
    model = spread_gates(randomise_module(copy.deepcopy(converted(name)), seed=5), x)
    routes, logits = model.route(x), model(x)
    assert len(set(routes.flatten().tolist())) > 1
    for i in range(len(x)):
        assert_close(model(x[i : i + 1]), logits[i : i + 1], 1e-10)
        assert_close(model(x[i : i + 1], int(routes[i])), logits[i : i + 1], 1e-10)


FEW = ["resnet18", "convnext_atto", "vit_tiny_patch16_224"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in (*QUICK, *SLOW)]
)
def test_narrow_streams_and_shallow_routes(name: str) -> None:
    size = SIZES.get(name, SIZE)
    x = random_images(2, size, seed=3)
    model = convert(
        plain(name), x[:1], widths=(0.5, 1.0, 1.0), residual=(0.5, 1.0, 1.0), depths=(1.0, 0.5, 1.0)
    )
    assert_close(model(x, model.space.largest), plain(name)(x), 1e-10)
    for route in model.space:
        assert_close(dsnet.extract(model, route)(x), model(x, route), 1e-10)


# --- channel groups ---------------------------------------------------------------------------------------
def _layers_by_torch_pruning(network: nn.Module, name: str, size: int) -> set[str]:
    """Return the layers that torch-pruning would prune together with the output of a convolution."""
    pruning: Any = pytest.importorskip("torch_pruning")
    network = copy.deepcopy(network).float().requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = pruning.DependencyGraph().build_dependency(
            network, random_images(1, size, dtype=torch.float32)
        )
    layer = network.get_submodule(name)
    group = graph.get_pruning_group(layer, pruning.prune_conv_out_channels, idxs=[0])
    names = {module: key for key, module in network.named_modules()}
    layers = {dependency.target.module for dependency, _ in group}
    return {names[module] for module in layers if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d)}


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100", "depthwise"])
def test_groups_hold_the_layers_that_torch_pruning_finds(name: str) -> None:
    network = randomise_module(DepthwiseNet().double()).eval() if name == "depthwise" else plain(name)
    size = 16 if name == "depthwise" else SIZE
    model = convert(network, random_images(1, size), widths=(0.5, 1.0), sort=False)
    owners = {key for key, module in network.named_modules() if isinstance(module, nn.Conv2d)}
    compared = 0
    for group in model.conversion.groups:
        if group.name in owners and group.reason != "classes":
            assert set(group.layers) == _layers_by_torch_pruning(network, group.name, size), group.name
            compared += 1
    assert compared == {"resnet18": 12, "mobilenetv2_100": 25, "depthwise": 9}[name]
