"""Counts against golden values, and against counters that share no code with the package."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dsnet
from dsnet.counts import CONVENTIONS
from dsnet.models import Supernet
from tests.support import SUPERNETS, error_of
from tests.support.hook_counter import count_by_hooks

DS_MBNET = """132867296 152894336 175129120 199571648 226221920 255079936 286145696 319419200 354900448
392589440 432486176 474590656 518902880 565422848"""
DS_MBNET_PUBLISHED = (
    "133 153 175 200 226 255 286 319 355 393 433 475 519 565"  # millions, in the paper's release
)


def meta(name: str, **options: object) -> Supernet:
    return dsnet.create_model(name, device="meta", **options)


def test_ds_mbnet_has_the_golden_counts() -> None:
    model = meta("ds_mbnet")
    assert [dsnet.madds(model, route, image_size=224) for route in model.space] == list(
        map(int, DS_MBNET.split())
    )


@pytest.mark.parametrize("activation", ["relu", "hard_swish"])
def test_activations_are_free(activation: str) -> None:
    for name in ("ds_mbnet", "ds_mbnet_plus"):
        own, other = meta(name), meta(name, activation=activation)
        for convention in CONVENTIONS:
            counts = [[dsnet.madds(m, r, convention=convention) for r in m.space] for m in (own, other)]
            assert counts[0] == counts[1]


def test_ds_mbnet_agrees_with_the_published_counts() -> None:
    """Route 10 is 432.486M where 433M was published: that network had 22,848 more on every route."""
    model = meta("ds_mbnet")
    ours = [dsnet.madds(model, route) for route in model.space]
    published = list(map(int, DS_MBNET_PUBLISHED.split()))
    assert [round(n / 1e6) for i, n in enumerate(ours) if i != 10] == published[:10] + published[11:]
    assert round((ours[10] + 22_848) / 1e6) == published[10]


GOLDEN = [
    ("ds_mbnet_plus", (0,), 160414976, None),
    ("ds_mbnet_plus", (11,), 603887360, None),
    ("ds_resnet", (0, 0, 0, 0), 283553664, None),
    ("ds_resnet", (1, 1, 1, 1), 1033340672, None),
    ("ds_resnet", (2, 2, 2, 2), 2271239808, None),
    ("ds_resnet", (3, 3, 3, 3), 3997251072, None),
    ("ds_resnet_plus", (0,), 759007232, None),
    ("ds_resnet_plus", (8,), 4432055808, None),
    ("ds_vit_plus", (0,), 993886464, 1172718464),
    ("ds_vit_plus", (7,), 5770685440, 6187959936),
    ("ds_mbnet_cifar", (0,), 40344128, None),
    ("ds_mbnet_cifar", (13,), 182154368, None),
]


@pytest.mark.parametrize(("name", "choices", "paper", "everything"), GOLDEN)
def test_golden_counts(name: str, choices: tuple[int, ...], paper: int, everything: int | None) -> None:
    model = meta(name)
    route = model.space.of_choices(choices)
    assert dsnet.madds(model, route) == paper
    if everything is not None:
        assert dsnet.madds(model, route, convention="all") == everything


TWINS = [
    ("mobilenet_v1", 1.0, 568790528),
    ("mobilenet_v1", 0.5, 149522176),
    ("resnet50", 1.0, 4089284608),
    ("resnet50", 0.75, 2322753024),
    ("resnet50", 0.5, 1052361728),
    ("resnet50", 0.25, 278110720),
]


@pytest.mark.parametrize(("name", "width", "paper"), TWINS)
def test_golden_counts_of_the_reference_networks(name: str, width: float, paper: int) -> None:
    assert dsnet.madds(meta(name, width=width)) == paper


# --- independent counters ------------------------------------------------------------------------------
def count_by_flops(net: nn.Module, x: torch.Tensor) -> int:
    """Multiply-adds of all matrix products and convolutions, by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        net(x)
    return counter.get_total_flops() // (2 * len(x))


def routing_by_hand(name: str) -> int:
    """hidden × choices of every gate, from the widths at the gates."""
    hidden = {
        "ds_mbnet": [(24, 14)],
        "ds_mbnet_cifar": [(24, 14)],
        "ds_mbnet_small": [(16, 4)],
        "ds_mbnet_tiny": [(16, 4)],
        "ds_mbnet_plus": [(24, 12)],
        "ds_mbnet_plus_cifar": [(24, 12)],
        "ds_mbnet_plus_tiny": [(16, 4)],
        "ds_resnet": [(16, 4), (64, 4), (128, 4), (256, 4)],
        "ds_resnet_cifar": [(16, 4), (64, 4), (128, 4), (256, 4)],
        "ds_resnet_tiny": [(16, 4), (16, 4)],
        "ds_resnet_plus": [(16, 9)],
        "ds_resnet_plus_cifar": [(16, 9)],
        "ds_resnet_plus_tiny": [(16, 4)],
        "ds_vit_plus": [(16, 8)],
        "ds_vit_plus_cifar": [(16, 8)],
        "ds_vit_plus_tiny": [(16, 3)],
        "mbnet": [],  # nothing to decide
        "mbnet_depth": [(64, 2)],
        "mbnet_depth_cifar": [(64, 2)],
    }
    return sum(h * t for h, t in hidden[name])


@pytest.mark.parametrize("name", SUPERNETS)
def test_counts_equal_independent_counters(name: str) -> None:
    model = meta(name)
    routes = {0, len(model.space) // 3, len(model.space) // 2, len(model.space) - 1}
    sizes = {model.input_spec.image_size, 2 * max(model.input_spec.smallest, model.input_spec.stride)}
    for number in routes:
        for size in sizes:
            x = torch.empty(2, 3, size, size, device="meta")
            net = dsnet.extract(model, number, fold_bn=False, image_size=size)
            assert dsnet.madds(model, number, size) == count_by_hooks(net, x)
            everything = (
                count_by_flops(net, x) + count_by_hooks(net, x, pools_only=True) + routing_by_hand(name)
            )
            assert dsnet.madds(model, number, size, "all") == everything
            if size == model.input_spec.image_size:
                assert dsnet.params(model, number) == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("name", ["mobilenet_v1", "resnet50", "deit"])
def test_counts_of_the_reference_networks_equal_independent_counters(name: str) -> None:
    net = meta(name)
    x = torch.empty(2, 3, 224, 224, device="meta")
    assert dsnet.madds(net) == count_by_hooks(net, x)
    assert dsnet.madds(net, convention="all") == count_by_flops(net, x) + count_by_hooks(
        net, x, pools_only=True
    )
    assert dsnet.params(net) == sum(p.numel() for p in net.parameters())


def test_counting_bad_input() -> None:
    model = meta("ds_mbnet_tiny")
    assert "depends on the route" in error_of(lambda: dsnet.madds(model))
    assert "paper, all" in error_of(lambda: dsnet.madds(model, 0, convention="some"))
    assert "static" in error_of(lambda: dsnet.madds(meta("resnet50"), 0))
    assert "Linear" in error_of(lambda: dsnet.madds(nn.Linear(1, 1)))
