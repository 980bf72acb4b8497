"""Precision, devices, options and seeds of models; nested depth."""

from __future__ import annotations

import pytest
import torch

import dsnet
from dsnet.slicing import SplitBatchNorm2d
from tests.support import FAMILIES, SUPERNETS, TINY, assert_close, error_of, images, randomise


@pytest.mark.parametrize("name", ["ds_resnet_plus_tiny", "ds_vit_plus_tiny"])
def test_a_further_block_with_zero_weights_changes_nothing(name: str) -> None:
    model = randomise(dsnet.create_model(name, dtype=torch.float64))
    x = images(model, 2)
    steps = model.chain(model.space.largest.choices)
    last = steps[-1].block
    with torch.no_grad():
        for parameter in (
            (last.expand.norm.weight, last.expand.norm.bias)
            if "resnet" in name
            else (
                last.attention.proj.weight,
                last.attention.proj.bias,
                last.mlp.fc2.weight,
                last.mlp.fc2.bias,
            )
        ):
            parameter.zero_()
        y = model.run_prefix(x).x
        for block, size, key in steps[:-1]:
            y = block(y, size, key)
        assert y.std() > 0
        assert torch.equal(last(y, steps[-1].size, steps[-1].key), y)


@pytest.mark.parametrize("name", TINY)
def test_bfloat16_runs_at_a_route_and_gated_and_stays_near_float32(name: str) -> None:
    model = randomise(dsnet.create_model(name))
    x = images(model, 8)
    low = randomise(dsnet.create_model(name, dtype=torch.bfloat16))
    with torch.no_grad():
        for route in (model.space.smallest, model.space.largest):
            expected, actual = model(x, route), low(x.bfloat16(), route)
            assert actual.dtype is torch.bfloat16
            assert ((actual.float() - expected).norm() / expected.norm()) < 0.05
        assert low(x.bfloat16()).dtype is torch.bfloat16
        assert low.gate_scores(low.run_prefix(x.bfloat16())).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model.gate_scores(model.run_prefix(x)).dtype is torch.float32
            logits = model(x, model.space.largest)
            assert ((logits.float() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("name", SUPERNETS)
def test_on_the_meta_device_networks_are_built_and_run_without_memory(name: str) -> None:
    model = dsnet.create_model(name, device="meta", num_classes=7)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    size = model.input_spec.image_size
    x = torch.empty(2, 3, size, size, device="meta")
    for route in (model.space.smallest, model.space.largest):
        assert model(x, route).shape == (2, 7)


@pytest.mark.parametrize("name", [n for n in SUPERNETS if "vit" not in n and not n.endswith("_cifar")])
def test_group_norm_and_activations_are_options(name: str) -> None:
    for activation in ("silu", "relu", "hard_swish"):
        model = dsnet.create_model(name, norm="group", activation=activation, dtype=torch.float64)
        randomise(model)
        assert not any(isinstance(m, SplitBatchNorm2d) for m in model.modules())
        x = images(model, 2)
        with torch.no_grad():
            for route in (model.space.smallest, model.space.largest):
                logits = model(x, route)
                assert_close(dsnet.extract(model, route, image_size=x.shape[-1])(x), logits, 1e-10)


def test_the_same_generator_gives_the_same_network() -> None:
    for name in dsnet.list_models():
        if name in FAMILIES or name.endswith("_cifar"):
            continue
        states = []
        for seed in (3, 3, 4):
            generator = torch.Generator().manual_seed(seed)
            states.append(dsnet.create_model(name, generator=generator).state_dict())
        first, again, other = states
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_a_bound_route_can_be_traced_and_a_gated_pass_cannot(name: str) -> None:
    model = randomise(dsnet.create_model(name)).requires_grad_(False)
    side = model.input_spec.image_size
    bound = model.bind(model.space.smallest)
    traced = torch.jit.trace(bound, torch.randn(2, 3, side, side))
    x = torch.randn(3, 3, side, side)
    assert_close(traced(x), bound(x), 1e-5)
    assert "cannot be traced" in error_of(lambda: torch.jit.trace(model, x))
