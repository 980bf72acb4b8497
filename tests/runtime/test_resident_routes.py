"""Which routes a plan holds for a budget, and how it gets those of another one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch

import dsnet
from dsnet import runtime
from dsnet.routing import CostTable, Routed
from dsnet.routing.policies import OperatingPoint, margin
from dsnet.routing.router import Router
from dsnet.runtime.backends.base import get_backend
from tests.support import assert_close, error_of
from tests.support.networks import network, pictures, sure_rows

NAME = "ds_mbnet_tiny"


def cascade(model: dsnet.Supernet, last: int = 3) -> Router:
    """Return a cascade with two operating points: the smallest route alone, and followed by a larger one."""
    costs = CostTable.of_model(model)
    margins = margin(model(pictures(model, 30), 0)).sort().values[10:20]
    widest = int(margins.diff().argmax())  # between two images, so that no image is on the boundary
    threshold = float(margins[widest : widest + 2].mean())
    return Router(
        kind="cascade",
        costs=costs,
        curve=(
            OperatingPoint(cost=costs.of(model.space[0].choices), accuracy=0.5, routes=(0,)),
            OperatingPoint(cost=costs.largest, accuracy=0.9, parameters=(threshold,), routes=(0, last)),
        ),
    )


def gate(model: dsnet.Supernet) -> Router:
    """Return a gate with two operating points, at which calibration images took few routes."""
    costs = CostTable.of_model(model)
    taken = (((0, 30), (1, 10)), ((0, 10), (3, 30)))
    return Router(
        kind="gate",
        costs=costs,
        curve=tuple(
            OperatingPoint(cost=cost, accuracy=0.5, parameters=(0.0,), route_counts=own)
            for cost, own in zip((costs.of((0,)), costs.largest), taken, strict=True)
        ),
    )


class Shown:
    """A progress callback that records labels."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def __call__(self, items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
        self.labels.append(label)
        return items


def numbers(plan: runtime.Plan) -> list[int]:
    return [route.number for route in plan.routes()]


def test_a_cascade_compiles_the_routes_of_its_budget_and_adds_others() -> None:
    model = network(NAME)
    x, router = pictures(model, 30), cascade(model)
    shown, later = Shown(), Shown()
    routed = Routed(model, router, router.curve[0].cost)
    plan = runtime.compile(routed, backend="eager", batch_buckets=(1,), progress=shown)
    assert numbers(plan) == [0]
    assert "program" in shown.labels
    assert "budgets='all'" in error_of(lambda: plan(x, 3))
    dear = plan.at(router.curve[1].cost, progress=later)
    assert numbers(dear) == [0, 3]
    assert numbers(plan) == [0]
    assert "program" in later.labels
    assert dear.network.resident > plan.network.resident
    assert dear.network.segments[()] is plan.network.segments[()]
    expected = routed.at(router.curve[1].cost).run(x)
    actual = dear.run(x)
    assert torch.equal(actual.routes, expected.routes)
    assert len(set(actual.routes.tolist())) == 2
    assert_close(actual.logits, expected.logits, 1e-4)
    later.labels.clear()
    for again in (plan, dear):
        assert again.at(router.curve[1].cost, progress=later).network.segments == dear.network.segments
    assert not later.labels, "they are made once"
    every = runtime.compile(routed, backend="eager", batch_buckets=(1,), budgets="all")
    assert numbers(every) == [0, 3]


def test_a_gate_compiles_likely_choices_and_runs_the_others_on_shared_weights() -> None:
    model = network(NAME)
    x, router = pictures(model, 60), gate(model)
    x = x[sure_rows(model, x)]
    routed = Routed(model, router, router.curve[0].cost)
    plan = runtime.compile(routed, backend="eager", batch_buckets=(1, 4))
    every = runtime.compile(routed, backend="eager", batch_buckets=(1, 4), budgets="all")
    assert numbers(plan) == [0, 1]
    assert numbers(every) == [0, 1, 2, 3]
    assert plan.network.resident < every.network.resident
    expected = routed.run(x)
    assert set(expected.routes.tolist()) == {0, 1, 2, 3}
    for own in (plan, every, plan.at(router.curve[1].cost), every.at(router.curve[1].cost)):
        actual = own.run(x)
        assert torch.equal(actual.routes, expected.routes)
        assert_close(actual.logits, expected.logits, 1e-4)
    assert numbers(plan.at(router.curve[1].cost)) == [0, 1, 3]
    assert numbers(plan.at(None)) == [0, 1, 2, 3]
    assert plan.at(None).network.fallback == {}
    assert numbers(every.at(router.curve[1].cost)) == [0, 1, 2, 3]
    other = runtime.compile(routed, backend="eager", precision="bfloat16", batch_buckets=(1,))
    assert numbers(other) == [0, 1, 2, 3], "its weights are not those of the network"


def test_a_changed_network_adds_no_routes() -> None:
    model = copy.deepcopy(network(NAME))
    router = cascade(model)
    cheap, dear = (point.cost for point in router.curve)
    plan = runtime.compile(Routed(model, router, cheap), backend="eager", batch_buckets=(1,))
    with torch.no_grad():
        model.head.classifier.weight.mul_(2)
    assert plan.at(cheap).run(pictures(model, 2)).routes.tolist() == [0, 0]
    assert "has changed since" in error_of(lambda: plan.at(dear))


def test_old_and_new_weights_are_not_mixed() -> None:
    """A gate's plan has copied weights of some routes and runs the network's weights for the others."""
    model = copy.deepcopy(network(NAME))
    x, router = pictures(model, 60), gate(model)
    x = x[sure_rows(model, x)]
    plan = runtime.compile(Routed(model, router, router.curve[0].cost), backend="eager", batch_buckets=(1,))
    before = plan.run(x)
    held = before.routes <= 1
    with torch.no_grad():
        model.head.classifier.weight.mul_(2)
    for own in (plan, plan.at(router.curve[0].cost)):
        assert torch.equal(own.run(x[held]).logits, before.logits[held])
        assert "has changed since" in error_of(lambda own=own: own.run(x[~held]))


@pytest.mark.parametrize("bn_key", ["prefix", "stage"])
def test_several_gates(bn_key: str) -> None:
    """Segments that depend on the compiled choices are all compiled again."""
    model = network("three_gates", bn_key=bn_key)
    x, router = pictures(model, 12), cascade(model, last=len(network("three_gates").space) - 1)
    routed = Routed(model, router, router.curve[0].cost)
    plan = runtime.compile(routed, backend="eager", batch_buckets=(1,))
    dear = plan.at(router.curve[1].cost)
    assert len(plan.routes()) == 1
    expected = routed.at(router.curve[1].cost).run(x)
    assert torch.equal(dear.run(x).routes, expected.routes)
    assert_close(dear.run(x).logits, expected.logits, 1e-4)


def test_graphs_are_captured_again_for_more_routes() -> None:
    model = network(NAME)
    x, router = pictures(model, 8), cascade(model)
    routed = Routed(model, router, router.curve[0].cost)
    with mock.patch.object(type(get_backend("cudagraphs")), "unavailable", return_value=None):
        plan = runtime.compile(routed, backend="cudagraphs", batch_buckets=(8,))
        dear = plan.at(router.curve[1].cost)
    assert dear.network.executor is not plan.network.executor
    expected = routed.at(router.curve[1].cost).run(x)
    assert torch.equal(dear.run(x).routes, expected.routes)
    assert_close(dear.run(x).logits, expected.logits, 1e-4)


def test_settings_that_exclude_each_other() -> None:
    model = network(NAME)
    for wrong in ({"budgets": "some"}, {"budgets": "all", "routes": [0]}):
        assert "'all' or None" in error_of(
            lambda wrong=wrong: runtime.compile(model, backend="eager", **wrong)
        )
