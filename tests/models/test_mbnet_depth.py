"""The case study of dynamic depth: its routes against plain layers, its cost against MobileNetV1."""

from __future__ import annotations

import pytest
import torch

import dsnet
from tests.support import assert_close, error_of, images, randomise


@pytest.mark.parametrize("join", ["residual", "naive"])
def test_the_deep_route_follows_or_adds_to_the_shallow_one(join: str) -> None:
    model = randomise(dsnet.create_model("mbnet_depth_cifar", join=join, dtype=torch.float64))
    model.requires_grad_(False)
    x = images(model, 4)
    first, others = [], []
    for route, seen in ((0, first), (1, others)):
        net = dsnet.extract(model, route, fold_bn=False)
        assert_close(net(x), model(x, route), 1e-10)
        seen.append(net)
    # One stage more than the other: the same blocks before it, and what they give is added or handed on.
    state = model.run_prefix(x)
    size = model.slices((1,))[0]
    y = state.x
    for step in model.first.steps(size, 1):
        y = step.block(y, step.size, step.key)
    z = y
    blocks = model.others.blocks if join == "residual" else model.others
    assert len(blocks) == 5
    for block in blocks:
        for step in block.steps(size, 1):
            z = step.block(z, step.size, step.key)
    z = y + z if join == "residual" else z
    for block in model.late:
        for step in block.steps(model.slices((1,))[1], 1):
            z = step.block(z, step.size, step.key)
    assert_close(model.head(z, size), model(x, 1), 1e-10)


def test_the_deep_route_costs_as_much_as_mobilenet_v1_and_a_gate() -> None:
    model = dsnet.create_model("mbnet_depth", device="meta")
    twin = dsnet.create_model("mobilenet_v1", device="meta")
    hidden = 256 // 4
    gate = 2 * 256 * hidden + 256 * 28 * 28  # two layers, and the pool's reads
    assert dsnet.madds(model, 1) == dsnet.madds(twin) + gate
    layers = [dsnet.madds(model, 1) - dsnet.madds(model, 0)]
    assert layers == [5 * 14 * 14 * (512 * 9 + 512 * 512)]


def test_an_unknown_join_is_named() -> None:
    assert "choose from residual, naive" in error_of(
        lambda: dsnet.create_model("mbnet_depth_cifar", join="sum")
    )
