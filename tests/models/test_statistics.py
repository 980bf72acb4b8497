"""Which norm statistics a pass may use."""

from __future__ import annotations

import pytest
import torch

import dsnet
from dsnet.models.gated import run_gated
from dsnet.slicing import KeyState, Mode, batch_statistics
from tests.support import images


def test_a_fresh_network_runs_and_training_makes_keys_running() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    x = images(model, 8)
    model(x, 1)
    assert model.key_states(1) == {KeyState.FRESH}
    model.train()
    model(x, 1)
    model.eval()
    assert model.key_states(1) == {KeyState.RUNNING}
    assert model.key_states(2) == {KeyState.FRESH, KeyState.RUNNING}
    model(x, 1)


@pytest.mark.parametrize(
    ("name", "trained", "missing"), [("ds_mbnet_tiny", 1, 2), ("ds_resnet_plus_tiny", 0, 3)]
)
def test_a_fresh_key_among_updated_ones_is_an_error_that_names_the_remedy(
    name: str, trained: int, missing: int
) -> None:
    model = dsnet.create_model(name)
    x = images(model, 8)
    model.train()(x, trained)
    model.eval()
    with pytest.raises(dsnet.DsnetError, match="dsnet recalibrate"):
        model(x, missing)
    with pytest.raises(dsnet.DsnetError, match="dsnet recalibrate"):
        dsnet.extract(model, missing)
    with pytest.raises(dsnet.DsnetError, match="dsnet recalibrate"):
        run_gated(model, x, lambda scores, stage, previous: torch.full((8,), missing))
    model(x, missing, mode=Mode(statistics=batch_statistics))


def test_a_fresh_suffix_behind_an_updated_prefix_is_an_error() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    model.stem.norm.set_statistics(0, torch.zeros(4), torch.ones(4), 1)
    with pytest.raises(dsnet.DsnetError, match="dsnet recalibrate"):
        model(images(model, 2), 0)


def test_key_states_travel_in_the_state_dict() -> None:
    model = dsnet.create_model("ds_resnet_tiny")
    x = images(model, 8)
    model.train()
    for route in model.space:
        model(x, route)
    copy = dsnet.create_model("ds_resnet_tiny")
    copy.load_state_dict(model.state_dict())
    assert copy.key_states(3) == {KeyState.RUNNING}
    assert torch.equal(copy(x, 3), model.eval()(x, 3))
    other = dsnet.create_model("ds_resnet_tiny", bn_key="prefix")
    with pytest.raises((RuntimeError, dsnet.DsnetError)):
        other.load_state_dict(model.state_dict())
