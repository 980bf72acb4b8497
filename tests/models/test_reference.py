"""Every route against the networks of `tests.support.reference`, and that the comparison can fail."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsnet.gate import Gate
from dsnet.routes import Route
from dsnet.slicing import SplitBatchNorm2d
from dsnet.slicing import functional as SF
from tests.support import (
    FAMILIES,
    IN_THE_PAPERS_TABLES,
    TINY,
    assert_close,
    images,
    random_model,
    reference,
    relative_error,
)


def check_against_reference(name: str, route: Route, *, batch: int = 2, **options: str) -> None:
    model = random_model(name, **options)
    x = images(model, batch, seed=route.number)
    expected = reference.run(name, model.state_dict(), x, route.number, route.choices, **options)
    assert_close(model(x, route), expected, 1e-10)


@pytest.mark.parametrize("name", IN_THE_PAPERS_TABLES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_random_routes_equal_the_reference(name: str, data: st.DataObject) -> None:
    space = random_model(name).space
    check_against_reference(name, space[data.draw(st.integers(0, len(space) - 1))])


@pytest.mark.parametrize("name", IN_THE_PAPERS_TABLES)
def test_smallest_and_largest_route_equal_the_reference(name: str) -> None:
    for route in (random_model(name).space.smallest, random_model(name).space.largest):
        check_against_reference(name, route)


@pytest.mark.parametrize("name", TINY)
def test_every_route_of_the_tiny_networks_equals_the_reference(name: str) -> None:
    for route in random_model(name).space:
        check_against_reference(name, route)


@pytest.mark.parametrize("choices", [(0, 0), (2, 1), (1, 3), (3, 3)])
def test_keys_by_stage_equal_the_reference(choices: tuple[int, ...]) -> None:
    model, default = random_model("ds_resnet_tiny", bn_key="stage"), random_model("ds_resnet_tiny")
    assert {m.keys for m in model.stages[1].modules() if isinstance(m, SplitBatchNorm2d)} == {4}
    assert {m.keys for m in default.stages[1].modules() if isinstance(m, SplitBatchNorm2d)} == {16}
    check_against_reference("ds_resnet_tiny", model.space.of_choices(choices), bn_key="stage")


@pytest.mark.parametrize("activation", ["silu", "relu", "hard_swish"])
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_mbnet_plus_tiny"])
def test_every_activation_equals_the_reference(name: str, activation: str) -> None:
    for route in random_model(name).space:
        check_against_reference(name, route, activation=activation)
    model = random_model(name, activation=activation)
    x = images(model, 2)
    others = [random_model(name, activation=a)(x, 0) for a in reference.ACTIVATIONS if a != activation]
    assert all(relative_error(model(x, 0), other) > 1e-3 for other in others)


# --- mutations: each must turn the comparison red ------------------------------------------------------
def _slice_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SF.slice_filters

    def mutated(
        weight: Tensor, bias: Tensor | None, channels: int, out: int | None, **kwargs: object
    ) -> object:
        sliced, sliced_bias, groups = original(weight, bias, channels, out, **kwargs)
        return weight[-sliced.shape[0] :, -sliced.shape[1] :], sliced_bias, groups

    monkeypatch.setattr(SF, "slice_filters", mutated)


def _linear_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SF, "linear", lambda x, weight, bias, out: F.linear(x, weight[-out:, -x.shape[-1] :], bias[-out:])
    )


def _window_from_the_corner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SF, "window_taps", lambda full, kernel=None, dilation=1: slice(0, kernel or full))


def _key_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SplitBatchNorm2d.forward
    monkeypatch.setattr(
        SplitBatchNorm2d,
        "forward",
        lambda self, x, key=0, mode=None: original(self, x, (key + 1) % self.keys, mode),
    )


def _gate_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Gate.forward

    def skipped(self: Gate, x: Tensor, **options: bool) -> tuple[Tensor, object]:
        return x, original(self, x, **options)[1]

    monkeypatch.setattr(Gate, "forward", skipped)


def _scale_of_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SF.attention
    monkeypatch.setattr(SF, "attention", lambda q, k, v, heads: original(q / 2, k, v, heads))


MUTATIONS = {
    "ds_mbnet_tiny": [_slice_from_the_end, _linear_from_the_end, _key_off_by_one, _gate_skipped],
    "ds_mbnet_plus_tiny": [_slice_from_the_end, _window_from_the_corner, _key_off_by_one, _gate_skipped],
    "ds_resnet_tiny": [_slice_from_the_end, _linear_from_the_end, _key_off_by_one, _gate_skipped],
    "ds_resnet_plus_tiny": [_slice_from_the_end, _key_off_by_one, _gate_skipped],
    "ds_vit_plus_tiny": [_slice_from_the_end, _linear_from_the_end, _gate_skipped, _scale_of_all_heads],
}


@pytest.mark.parametrize(("name", "mutate"), [(n, m) for n, ms in MUTATIONS.items() for m in ms])
def test_the_comparison_detects_mutations(name: str, mutate: object, monkeypatch: pytest.MonkeyPatch) -> None:
    route = random_model(name).space[0]
    check_against_reference(name, route)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="relative error"):
        check_against_reference(name, route)


def test_randomised_networks_have_no_initial_values() -> None:
    for name in FAMILIES:
        model = random_model(f"{name}_tiny")
        for key, value in model.state_dict().items():
            if value.is_floating_point():
                assert value.std() > 0, f"{name}: {key} is constant"
