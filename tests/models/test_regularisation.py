"""Stochastic depth and dropout: what is dropped, how often, and the scale of the rest."""

from __future__ import annotations

import pytest
import torch

import dsnet
from dsnet.models.blocks import drop_branch, drop_features
from dsnet.models.resnet import Bottleneck
from dsnet.models.vit import TransformerBlock
from dsnet.slicing import Mode
from tests.support import error_of, images, random_model


def mode(**rates: float) -> Mode:
    return Mode(generator=torch.Generator().manual_seed(0), **rates)


def test_stochastic_depth_drops_whole_branches_of_images_and_scales_the_others() -> None:
    branch = torch.rand(4000, 3, 2, 2, dtype=torch.float64) + 0.5
    dropped = drop_branch(branch, mode(drop_path=0.4), 0.5)
    gone = (dropped == 0).flatten(1).all(1)
    assert torch.equal((dropped == 0).flatten(1).any(1), gone)
    assert gone.double().mean().item() == pytest.approx(0.2, abs=0.02)
    assert torch.allclose(dropped[~gone], branch[~gone] / 0.8)
    assert drop_branch(branch, mode(drop_path=0.4), 0.0) is branch
    assert drop_branch(branch, None, 1.0) is branch


def test_dropout_drops_single_features() -> None:
    x = torch.rand(200, 50) + 0.5
    dropped = drop_features(x, mode(dropout=0.3))
    assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    kept = dropped != 0
    assert torch.allclose(dropped[kept], x[kept] / 0.7)
    assert drop_features(x, Mode()) is x


@pytest.mark.parametrize("name", ["ds_resnet_tiny", "ds_resnet_plus_tiny", "ds_vit_plus_tiny"])
def test_the_stochastic_depth_rate_grows_from_the_first_to_the_last_block(name: str) -> None:
    model = dsnet.create_model(name)
    blocks = [m for m in model.modules() if isinstance(m, Bottleneck | TransformerBlock)]
    shares = [block.share for block in blocks]
    assert shares[0] == 0
    assert shares[-1] == 1
    assert shares == sorted(shares)
    assert len(set(shares)) == len(shares)


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_the_mode_reaches_every_branch_and_the_classifier(name: str) -> None:
    model = random_model(name)
    x, route = images(model, 8), model.space.largest
    plain = model(x, route)
    assert not torch.equal(model(x, route, mode=mode(dropout=0.5)), plain)
    deep = model(x, route, mode=mode(drop_path=0.9))
    assert torch.equal(deep, plain) == (name == "ds_mbnet_tiny")  # it has no residual branches
    assert torch.equal(model(x, route, mode=mode(drop_path=0.9)), deep)  # the same draws


def test_rates_are_checked() -> None:
    assert "drop_path must be at least 0 and below 1, not 1" in error_of(lambda: Mode(drop_path=1.0))
    assert "dropout" in error_of(lambda: Mode(dropout=-0.1))
