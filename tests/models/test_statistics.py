"""The source of norm statistics in a pass, and routes that lack them."""

from __future__ import annotations

import pytest
import torch

import dsnet
from dsnet.models.group_by_route import run_gated
from dsnet.slicing import KeyState, Mode, batch_statistics
from tests.support import error_of, images


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
    other = dsnet.create_model("ds_resnet_tiny", bn_key="stage")
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(model.state_dict())


def test_all_methods_that_run_a_route_need_its_statistics() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    x = images(model, 8)
    bound_before = model.bind(2)
    model.train()(x, 0)
    for call in (lambda: dsnet.extract(model, 2), lambda: model.bind(2)):
        assert "dsnet recalibrate" in error_of(call)  # in training mode too
    model.eval()
    state = model.run_prefix(x)
    model.run_last_segment(state, (0,))
    for call in (
        lambda: model.run_last_segment(state, (2,)),
        lambda: model.run_stages(x, 2),
        lambda: bound_before(x),
    ):
        assert "dsnet recalibrate" in error_of(call)


def test_a_pass_that_fails_or_is_empty_updates_no_key() -> None:
    model = dsnet.create_model("ds_mbnet_tiny").train()
    model(images(model, 1)[:0], 0)
    assert model.key_states(0) == {KeyState.FRESH}
    norm = model.blocks[4].depthwise.norm
    with pytest.raises(ValueError, match="more than 1 value"):
        model(torch.randn(1, 3, 8, 8), 0)
    assert norm.states[0] is KeyState.FRESH
    assert norm.count[0] == 0


def test_a_head_for_a_narrowed_space_carries_its_choices() -> None:
    model = dsnet.create_model("ds_mbnet_cifar")
    narrowed = model.space.narrow("L")
    model.reset_routing(narrowed, generator=torch.Generator().manual_seed(0))
    assert model.gate(0).choices == (10, 11, 12, 13)
    x = images(model, 4)
    assert set(model.route(x).flatten().tolist()) <= {10, 11, 12, 13}
    other = dsnet.create_model("ds_mbnet_cifar")
    other.reset_routing(model.space.narrow("S"))
    other.load_state_dict(model.state_dict())
    assert other.gate(0).choices == (10, 11, 12, 13)
    with pytest.raises(RuntimeError, match="size mismatch"):
        dsnet.create_model("ds_mbnet_cifar").load_state_dict(model.state_dict())
    model.reset_routing()
    assert model.gate(0).choices == tuple(range(14))
