"""The double-headed gate against plain layers and closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dsnet
from dsnet.counts import Shape
from dsnet.gate import (
    Gate,
    GateEncoding,
    HeadForm,
    RoutingGate,
    RoutingHead,
    SingleRouteGate,
    attention_width,
    scalar_scores,
)
from tests.support import assert_close, error_of, images, randomise


def plain(layer: nn.Module, used_in: int, out: int) -> nn.Linear:
    linear = nn.Linear(used_in, out, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(layer.weight[:out, :used_in])
        linear.bias.copy_(layer.bias[:out])
    return linear


@pytest.mark.parametrize("channels", [3, 24])
def test_attention_and_scores_share_the_first_layer(channels: int) -> None:
    gate = randomise(Gate(24, choices=(0, 1, 2), dtype=torch.float64))
    x = torch.randn(4, channels, 5, 7, dtype=torch.float64)
    with torch.no_grad():
        hidden = plain(gate.first, channels, 16)(x.flatten(2).mean(2)).relu()
        scale = 1 + plain(gate.attention, 16, channels)(hidden).tanh()
        scaled, encoding = gate(x)
        assert_close(scaled, x * scale[:, :, None, None], 1e-12)
        assert_close(encoding.hidden, hidden, 1e-12)
        assert_close(gate.score(encoding), plain(gate.routing.last, 16, 3)(hidden), 1e-12)
        assert_close(gate.extract(channels)(x), scaled, 1e-12)


def test_attention_starts_at_one() -> None:
    x = torch.randn(2, 24, 5, 5)
    scaled, _ = Gate(24)(x)
    assert torch.equal(scaled, x)


def test_layers_start_with_the_documented_spread() -> None:
    gate = Gate(1024, choices=tuple(range(64)))
    truncated = 0.8796  # standard deviation of a normal distribution cut off at ± 2
    assert gate.routing is not None
    for layer, std in ((gate.first, (2 / 256) ** 0.5), (gate.routing.last, 0.01)):
        assert float(layer.weight.detach().std()) == pytest.approx(truncated * std, rel=0.03)
        assert not layer.bias.any()
    gate.replace_routing((0, 1, 2), torch.Generator().manual_seed(0))
    assert float(gate.routing.last.weight.detach().std()) == pytest.approx(truncated * 0.01, rel=0.1)


def test_a_separate_first_layer_reads_the_pooled_features() -> None:
    gate = randomise(Gate(24, choices=(0, 1, 2), form=HeadForm(separate=True), dtype=torch.float64))
    x = torch.randn(4, 20, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        hidden = plain(gate.routing.first, 20, 16)(x.mean((2, 3))).relu()
        _, encoding = gate(x)
        assert_close(gate.score(encoding), plain(gate.routing.last, 16, 3)(hidden), 1e-12)
    shared = Gate(24, choices=(0, 1, 2)).cost(Shape(20, 5, 5))
    assert gate.cost(Shape(20, 5, 5)).madds("paper") == shared.madds("paper") + 20 * 16
    assert gate.cost(Shape(20, 5, 5)).routing == shared.routing == 16 * 3


@pytest.mark.parametrize("channels", [20, 24])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", ["onehot", "scalar"])
@pytest.mark.parametrize("gate_type", [Gate, RoutingGate])
def test_a_stand_alone_gate_scales_and_scores_like_its_gate(
    gate_type: type[Gate], kind: str, separate: bool, channels: int
) -> None:
    form = HeadForm(kind=kind, separate=separate)
    gate = randomise(gate_type(24, choices=(0, 1, 2), form=form, dtype=torch.float64))
    x = torch.randn(4, channels, 5, 7, dtype=torch.float64)
    with torch.no_grad():
        scaled, encoding = gate(x)
        alone, scores = gate.extract_with_routing(channels)(x)
        assert_close(alone, scaled, 1e-12)
        assert_close(scores, gate.score(encoding), 1e-12)


def test_the_gate_of_one_route_scores_it_zero_and_passes_features() -> None:
    gate, x = SingleRouteGate(), torch.randn(4, 8, 5, 7)
    scaled, encoding = gate(x)
    for features, scores in ((scaled, gate.score(encoding)), gate.extract_with_routing(8)(x)):
        assert features is x
        assert scores.tolist() == [[0.0]] * 4


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 20))
def test_the_scalar_head_divides_its_range_evenly_among_routes(s: float, routes: int) -> None:
    scores = scalar_scores(torch.tensor([[s]], dtype=torch.float64), routes)
    assert scores.shape == (1, routes)
    cut = s * routes
    if abs(cut - round(cut)) > 1e-9:  # on a border two routes are equally good
        assert scores.argmax(1).item() == int(cut)


def test_the_scalar_head_has_one_output() -> None:
    head = randomise(RoutingHead(8, 16, (0, 1, 2, 3), HeadForm(kind="scalar"), dtype=torch.float64))
    hidden = torch.rand(5, 16, dtype=torch.float64)
    scores = head(GateEncoding(hidden[:, :8], hidden))
    s = plain(head.last, 16, 1)(hidden).sigmoid()
    expected = torch.stack([-((s[:, 0] * 4 - t - 0.5) ** 2) for t in range(4)], 1)
    assert_close(scores, expected, 1e-12)


@pytest.mark.parametrize(
    ("channels", "routing", "hidden"), [(16, False, 4), (8, False, 4), (24, True, 16), (256, True, 64)]
)
def test_the_hidden_width_follows_the_widest_input(channels: int, routing: bool, hidden: int) -> None:
    assert attention_width(channels, routing=routing) == hidden


@pytest.mark.parametrize("options", [{"gate_head": "scalar"}, {"gate_first_layer": "separate"}])
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_networks_run_with_the_ablations_of_the_gate(name: str, options: dict[str, str]) -> None:
    model = randomise(dsnet.create_model(name, **options))
    x = images(model, 4)
    with torch.no_grad():
        decisions = model.route(x)
        assert decisions.shape == (4, model.space.gates)
        for i, choices in enumerate(decisions.tolist()):
            route = model.space.of_choices(choices)
            assert_close(model(x)[i : i + 1], model(x[i : i + 1], route), 1e-5)


def test_scoring_without_a_routing_head_is_an_error() -> None:
    gate = Gate(8)
    _, encoding = gate(torch.zeros(1, 8, 2, 2))
    assert "no routing head" in error_of(lambda: gate.score(encoding))
    assert "onehot, scalar" in error_of(lambda: HeadForm(kind="softmax"))


def test_a_gate_reports_the_choices_and_form_of_its_head() -> None:
    form = HeadForm(kind="scalar")
    gate = Gate(24, choices=(1, 3), form=form)
    assert (gate.choices, gate.form) == ((1, 3), form)
    gate.replace_routing((0, 2))
    assert (gate.choices, gate.form) == ((0, 2), form)
    attention = Gate(24)
    assert (attention.choices, attention.form) == ((), HeadForm())
