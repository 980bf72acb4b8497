"""Gated passes: each image of a mixed batch gets the result that it gets alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.gate import Gate
from dsnet.models.group_by_route import run_gated
from tests.support import FAMILIES, TINY, assert_close, images, random_model, randomise, spread_gates
from tests.support.networks import three_gates


def scattered(scores: Tensor, stage: int, previous: int | None) -> Tensor:
    """Decide almost at random, by the scores of the image only."""
    return (scores.sum(1).abs() * 1e5).long() % scores.shape[1]


MIXED = [
    *((name, {}) for name in FAMILIES + TINY),
    *((name, {"bn_key": "stage"}) for name in TINY if "resnet" in name),
]


@pytest.mark.parametrize(("name", "options"), MIXED)
def test_a_mixed_batch_equals_its_images_one_by_one(name: str, options: dict[str, str]) -> None:
    _check_mixed_batch(random_model(name, **options), 24 if name.endswith("_tiny") else 8)


@pytest.mark.parametrize("bn_key", ["prefix", "stage"])
def test_a_mixed_batch_behind_three_gates_equals_its_images_one_by_one(bn_key: str) -> None:
    _check_mixed_batch(three_gates(torch.float64, bn_key), 24)


def test_histories_that_end_alike_run_together() -> None:
    """Statistics by stage: what follows a gate depends on its choice alone."""
    model = three_gates(torch.float64, "stage")
    ran: list[tuple[int, ...]] = []
    last_segment = model.run_last_segment
    model.run_last_segment = lambda state, choices, mode: (  # type: ignore[method-assign]
        ran.append(choices),
        last_segment(state, choices, mode),
    )[1]
    taken = run_gated(model, images(model, 200), scattered).choices
    assert len(taken.unique(dim=0)) > 40, "the batch is not mixed"
    assert len(ran) == len({choices[-2:] for choices in ran}) == 16


def _check_mixed_batch(model: dsnet.Supernet, batch: int) -> None:
    x = images(model, batch)
    output = run_gated(model, x, scattered)
    routes = [model.space.of_choices(choices) for choices in output.choices.tolist()]
    assert len({route.number for route in routes}) >= 3, "the batch is not mixed"
    for i, route in enumerate(routes):
        alone = run_gated(model, x[i : i + 1], scattered)
        assert alone.choices[0].tolist() == list(route.choices)
        assert_close(output.logits[i : i + 1], model(x[i : i + 1], route), 1e-10)
        assert_close(alone.logits, output.logits[i : i + 1], 1e-10)


@pytest.mark.parametrize("name", TINY)
def test_the_gates_own_decisions_are_the_same_alone_and_in_any_batch(name: str) -> None:
    model = randomise(dsnet.create_model(name, dtype=torch.float64), seed=5)
    x = images(model, 32)
    spread_gates(model, x)
    with torch.no_grad():
        decisions, logits = model.route(x), model(x)
        assert decisions.shape == (32, model.space.gates)
        assert len(decisions.unique(dim=0)) >= 2, "all images take one route"
        assert torch.equal(decisions, model.route(x))
        order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
        assert torch.equal(model.route(x[order]), decisions[order])
        assert_close(model(x[order]), logits[order], 1e-10)
        for i in range(32):
            assert torch.equal(model.route(x[i : i + 1])[0], decisions[i])
            route = model.space.of_choices(decisions[i].tolist())
            assert_close(logits[i : i + 1], model(x[i : i + 1], route), 1e-10)


@pytest.mark.parametrize("name", ["ds_mbnet_cifar", "ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_in_float32_decisions_agree_outside_a_margin(name: str) -> None:
    model = randomise(dsnet.create_model(name), seed=5)
    x = images(model, 64)
    spread_gates(model, x)
    margins = torch.full((64,), torch.inf)

    def watch(scores: Tensor, stage: int, previous: int | None) -> Tensor:
        best = scores.topk(2, 1).values
        if len(scores) == 1:
            margins[current] = torch.minimum(margins[current], (best[:, 0] - best[:, 1])[0])
        return scores.argmax(1)

    with torch.no_grad():
        together = run_gated(model, x)
        for current in range(64):
            alone = run_gated(model, x[current : current + 1], watch)
            if margins[current] > 1e-4:
                assert torch.equal(alone.choices[0], together.choices[current])
                assert_close(alone.logits[0], together.logits[current], 1e-5)
    assert (margins <= 1e-4).float().mean() < 0.01


def test_an_empty_batch_gives_empty_logits_and_decisions() -> None:
    for name in TINY:
        model = random_model(name)
        x = images(model, 1)[:0]
        assert model(x).shape == (0, 10)
        assert model(x, model.space.largest).shape == (0, 10)
        assert model.route(x).shape == (0, model.space.gates)


def test_a_narrowed_head_refers_to_routes_of_the_full_space() -> None:
    model = dsnet.create_model("ds_mbnet_cifar", dtype=torch.float64)
    randomise(model)
    narrowed = model.space.narrow("L")
    model.gates[0] = Gate(96, choices=narrowed.choices[0], dtype=torch.float64)
    randomise(model)
    x = images(model, 8)
    decisions = run_gated(model, x, scattered).choices
    assert set(decisions.flatten().tolist()) <= {10, 11, 12, 13}
    assert len(decisions.unique()) > 1
