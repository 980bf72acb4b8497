"""Where routing pays, as measured; and what runs where it does not."""

from __future__ import annotations

import pytest
import torch

from dsnet.routing import CascadePolicy, CostTable
from dsnet.routing.policies import OperatingPoint
from dsnet.routing.router import Router
from dsnet.runtime._break_even import BreakEven, Times, _thresholds, measure
from dsnet.runtime.plan import Plan
from tests.support import error_of
from tests.support.networks import network, pictures, plan_of

NAME = "ds_mbnet_tiny"


def router(kind: str = "gate") -> Router:
    costs = CostTable.of_model(network(NAME))
    numbers = (0.0,) if kind == "gate" else (0.5,)
    points = tuple(
        OperatingPoint(
            cost=1.001 * costs.of((c,)),
            accuracy=c / 4,
            parameters=numbers,
            routes=(0, 3),
            route_counts=((0, 3), (3, 1)),
        )
        for c in range(4)
    )
    return Router(kind=kind, costs=costs, curve=points)


def measured(*times: tuple[int, float, float]) -> BreakEven:
    single = network(NAME).space.resolve(2)
    rows = tuple(Times(batch, routed, 1.0, largest) for batch, routed, largest in times)
    return BreakEven(network=NAME, where="here", shares={0: 0.75, 3: 0.25}, single=single, times=rows)


@pytest.mark.parametrize(("name", "kind"), [(NAME, "gate"), (NAME, "cascade"), ("three_gates", None)])
def test_every_batch_size_is_timed(name: str, kind: str | None) -> None:
    compiled = plan_of(name, "eager").network
    plan = Plan(compiled) if kind is None else Plan(compiled, router(kind), "60%")
    result = plan.break_even((4, 1))
    assert [t.batch for t in result.times] == [1, 4]
    assert all(min(t[1:]) > 0 for t in result.times)
    assert abs(sum(result.shares.values()) - 1) < 1e-9
    if kind is not None:
        assert result.shares == {0: 0.75, 3: 0.25}
        costs = CostTable.of_model(network(NAME))
        choice = result.single.choices[0]
        assert costs.of((choice,)) <= 0.6 * costs.largest < costs.of((choice + 1,))
    else:
        assert result.single == network(name).space.largest
    assert "Routing pays" in str(result)
    assert str(result).count("\n") >= 5


def test_smallest_batch_from_which_routing_pays() -> None:
    result = measured((1, 3.0, 2.0), (4, 2.0, 3.0), (16, 2.0, 9.0))
    assert result.smallest_batch == 4
    assert "from batches of 4 on" in str(result)
    assert "75 % route 0, 25 % route 3" in str(result)
    never = measured((1, 3.0, 2.0), (4, 3.0, 3.0))
    assert never.smallest_batch is None
    assert "at none of these batch sizes" in str(never)


def test_thresholds_give_the_requested_shares() -> None:
    plan, model = plan_of(NAME, "eager"), network(NAME)
    x, costs = pictures(model, 40), CostTable.of_model(model)
    shares = {0: 0.5, 1: 0.3, 3: 0.2}
    thresholds = _thresholds(plan.network, x, (0, 1, 3), shares)
    first = CascadePolicy(costs=costs, routes=(0, 1), thresholds=thresholds[:1])(plan.network, x)
    assert int((first.routes == 0).sum()) == 20
    last = CascadePolicy(costs=costs, routes=(0, 1, 3), thresholds=thresholds)(plan.network, x)
    assert torch.bincount(last.routes).tolist() == [20, 12, 0, 8]
    everyone = CascadePolicy(
        costs=costs, routes=(0, 3), thresholds=_thresholds(plan.network, x, (0, 3), {3: 1.0})
    )
    assert everyone(plan.network, x).routes.tolist() == [3] * 40


def test_batches_are_checked() -> None:
    plan = plan_of(NAME, "eager")
    assert "positive integers" in error_of(lambda: plan.break_even([0]))
    assert "positive integers" in error_of(lambda: plan.break_even([]))
    assert "positive integers" in error_of(lambda: plan.break_even(0))
    assert [t.batch for t in plan.break_even(batch for batch in (2, 1)).times] == [1, 2]
    assert "positive integers" in error_of(
        lambda: measure(plan.network, {0: 1.0}, network(NAME).space.smallest, [True])
    )


def test_shares_are_checked_and_normalized() -> None:
    plan = plan_of(NAME, "eager")
    assert plan.break_even(1, {0: 70, 3: 30}).shares == {0: 0.7, 3: 0.3}
    assert plan.break_even(1, {0: 0.2}).shares == {0: 1.0}
    for shares, message in [
        ({}, "above 0"),
        ({0: float("nan")}, "at least 0"),
        ({0: -1, 1: 2}, "at least 0"),
        ([1], "shares by route"),
        ({99: 1.0}, "99"),
    ]:
        assert message in error_of(lambda shares=shares: plan.break_even(1, shares))  # type: ignore[misc]
