"""Programs at fixed places, as a GPU replays them, against the network: without a GPU they run one by one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsnet
from dsnet import runtime
from dsnet.models.gated import run_gated
from dsnet.routing import CascadeRule, CostTable, GateRule
from dsnet.routing.router import Point, Router
from dsnet.routing.rules import margin, run_numbered
from dsnet.runtime.backends import get_backend
from dsnet.runtime.batches import Division
from dsnet.runtime.graphed import Graphed, prices_of
from dsnet.runtime.lanes import Immediate
from dsnet.runtime.parts import pack
from dsnet.runtime.plan import Plan
from dsnet.runtime.promotion import promoting
from tests.runtime.conftest import network, pictures
from tests.support import assert_close, error_of

KINDS = [
    ("ds_mbnet_tiny", None),
    ("ds_vit_plus_tiny", None),
    ("ds_resnet_tiny", "stage"),
    ("ds_resnet_tiny", "prefix"),
    ("three_gates", "prefix"),
]
SIZES = (1, 3, 8)


class Counting(Immediate):
    """Notes how often the host waited."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


@functools.cache
def made(name: str, bn_key: str | None, only: tuple[int, ...] | None = None) -> tuple[Any, Graphed]:
    model = network(name, torch.float64, bn_key)
    options = [gate.choices if only is None else only for gate in map(model.gate, range(len(model.gates)))]
    image = pictures(model, 1)
    parts = pack(model, options)
    calls = {h: get_backend("eager").convert(p.module)() for h, p in parts.items()}
    choices = [model.gate(g).choices for g in range(len(model.gates))]
    graphed = Graphed(
        calls,
        image=image,
        space=model.space,
        choices=choices,
        keyed={h for h, p in parts.items() if p.histories > 1},
        sizes=SIZES,
        lanes=Counting(),
    )
    return model, graphed


def numbers(model: dsnet.Supernet, choices: torch.Tensor) -> torch.Tensor:
    return torch.tensor([model.space.of_choices(way).number for way in choices.tolist()])


@pytest.mark.parametrize(("name", "bn_key"), KINDS)
def test_gates_decide_and_images_come_back_in_their_order(name: str, bn_key: str | None) -> None:
    model, graphed = made(name, bn_key)
    for count in (8, 1, 2, 7, 20):  # smaller ones find what larger ones left behind
        x = pictures(model, count, seed=count)
        expected, found = run_gated(model, x), graphed.run(x)
        assert torch.equal(found.routes, numbers(model, expected.choices))
        assert_close(found.logits, expected.logits, 1e-10)
    assert len(set(found.routes.tolist())) > 1


@pytest.mark.parametrize(("name", "bn_key"), KINDS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_mix(name: str, bn_key: str | None, data: st.DataObject) -> None:
    model, graphed = made(name, bn_key)
    rows = st.tuples(*(st.sampled_from(model.gate(g).choices) for g in range(len(model.gates))))
    taken = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=19)))
    x = pictures(model, len(taken))
    found = graphed.run(x, given=taken)
    assert torch.equal(found.routes, numbers(model, taken))
    for i, way in enumerate(taken.tolist()):
        alone = model(x[i : i + 1], model.space.of_choices(tuple(way)))
        assert_close(found.logits[i : i + 1], alone, 1e-10)


@pytest.mark.parametrize(("name", "bn_key"), KINDS)
def test_prices_move_decisions_as_the_rule_does(name: str, bn_key: str | None) -> None:
    model, graphed = made(name, bn_key)
    x, costs = pictures(model, 16), CostTable.of_model(model)
    choices = [model.gate(g).choices for g in range(len(model.gates))]
    seen = set()
    for weight in (-5.0, -0.5, 0.0, 0.3, 2.0, 0.0):
        expected = GateRule(costs=costs, weight=weight)(model, x)
        found = graphed.run(x, prices_of(costs, weight, choices, graphed.held))
        assert torch.equal(found.routes, expected.routes)
        assert_close(found.logits, expected.logits, 1e-10)
        seen.add(tuple(found.routes.tolist()))
    assert len(seen) > 2


@pytest.mark.parametrize("quantiles", [(0.5,), (0.5, 0.9), (0.9, 0.5), (0.0, 1.0), (1.0, 1.0)])
def test_cascades(quantiles: tuple[float, ...]) -> None:
    model, graphed = made("ds_mbnet_tiny", None)
    x = pictures(model, 20)
    routes = (0, 1, 3)[: len(quantiles) + 1]
    thresholds = tuple(
        float(margin(model(x, route)).quantile(q)) + (1e-9 if q == 1 else -1e-9)
        for route, q in zip(routes, quantiles, strict=False)
    )
    expected = CascadeRule(costs=CostTable.of_model(model), routes=routes, thresholds=thresholds)(model, x)
    found = graphed.cascade(x, routes, thresholds)
    assert torch.equal(found.routes, expected.routes)
    assert_close(found.logits, expected.logits, 1e-10)


@pytest.mark.parametrize(("name", "bn_key"), KINDS)
def test_every_route_by_itself(name: str, bn_key: str | None) -> None:
    model, graphed = made(name, bn_key)
    x = pictures(model, 11)
    for route in list(model.space)[:: max(1, len(model.space) // 16)]:
        assert_close(graphed.run_route(x, route), model(x, route), 1e-10)


def test_the_host_waits_once_a_gate_and_for_no_single_route() -> None:
    for name, bn_key in KINDS:
        model, graphed = made(name, bn_key)
        lanes = graphed.lanes
        assert isinstance(lanes, Counting)
        before = lanes.waited
        graphed.run(pictures(model, 8))
        assert lanes.waited - before == len(model.gates)
        graphed.run_route(pictures(model, 8), model.space.largest)
        assert lanes.waited - before == len(model.gates)


def test_programs_are_counted_and_none_is_added_later() -> None:
    model, graphed = made("ds_mbnet_tiny", None)
    parts, steps = 1 + len(model.space), 5  # begin, decide, arrange, everyone, unsure
    assert len(graphed.programs) == len(SIZES) * (parts + steps)
    for count in (1, 5, 8, 9):
        graphed.run(pictures(model, count))
        graphed.cascade(pictures(model, count), (0, 3), (0.5,))
    assert len(graphed.programs) == len(SIZES) * (parts + steps)


@pytest.mark.parametrize(("name", "bn_key"), KINDS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_promoted_images_run_at_a_larger_route_and_say_so(
    name: str, bn_key: str | None, data: st.DataObject
) -> None:
    model, graphed = made(name, bn_key)
    times = st.fixed_dictionaries(dict.fromkeys(SIZES, st.floats(1, 10)))
    divisions = {history: Division(data.draw(times)) for history in graphed.divisions}
    rows = st.tuples(*(st.sampled_from(model.gate(g).choices) for g in range(len(model.gates))))
    taken = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=8)))
    x = pictures(model, len(taken))
    with mock.patch.object(graphed, "divisions", divisions):
        found = graphed.run(x, given=taken, promote=True)
    ran = torch.tensor([model.space.resolve(number).choices for number in found.routes.tolist()])
    assert bool((ran >= taken).all())
    for i, number in enumerate(found.routes.tolist()):
        assert_close(found.logits[i : i + 1], model(x[i : i + 1], number), 1e-10)
    # The same by a plan without graphs, whose gates say what was given here.
    if len(model.gates) == 1:
        engine = mock.Mock(gates=[model.gate(0)], milliseconds=lambda h, n: divisions[h].time(n))
        places = torch.tensor([model.gate(0).choices.index(int(choice)) for choice in taken[:, 0]])
        positions = promoting(lambda *_: places, engine)(torch.empty(0), 0, None)
        assert [model.gate(0).choices[p] for p in positions.tolist()] == ran[:, 0].tolist()


def test_what_is_not_held_is_named() -> None:
    model, graphed = made("ds_mbnet_tiny", None, (0, 3))
    x = pictures(model, 4)
    assert_close(graphed.run_route(x, model.space.largest), model(x, 3), 1e-10)
    taken = torch.tensor([[1], [0], [3], [0]])
    assert "does not hold the choices [1]" in error_of(lambda: graphed.run(x, given=taken))
    assert_close(graphed.run_route(x, model.space.largest), model(x, 3), 1e-10)


def test_a_plan_runs_on_it() -> None:
    model, graphed = made("ds_mbnet_tiny", None)
    plan = runtime.compile(model, backend="eager")
    engine = dataclasses.replace(plan.engine, graphed=graphed)
    x, costs = pictures(model, 21), CostTable.of_model(model)
    own = Plan(engine)
    assert torch.equal(own.run(x).routes, run_numbered(model, x).routes)
    assert_close(own(x, 2), model(x, 2), 1e-10)
    assert own(x[:0]).shape == (0, 10)
    assert own.engine.programs == len(graphed.programs)
    ends = [costs.of((choice,)) for choice in (0, 3)]
    for kind, first, last in (("gate", (4.0,), (-4.0,)), ("cascade", (-1.0,), (2.0,))):
        curve = tuple(
            Point(cost=cost, accuracy=0.5, numbers=n, routes=(0, 3), taken=((0, 1), (3, 1)))
            for cost, n in zip(ends, (first, last), strict=True)
        )
        routed = Plan(engine, Router(kind=kind, costs=costs, curve=curve), ends[0])
        for budget in ends:
            expected = dsnet.Routed(model, routed.router, budget).run(x)
            found = routed.at(budget).run(x)
            assert torch.equal(found.routes, expected.routes)
            assert_close(found.logits, expected.logits, 1e-10)


@pytest.mark.parametrize(("name", "bn_key"), [("three_gates", "prefix"), ("ds_mbnet_tiny", None)])
def test_its_parts_can_be_asked_one_by_one(name: str, bn_key: str | None) -> None:
    """As a session with a cap does, and a cascade over several gates."""
    model = network(name, torch.float64, bn_key)
    backend = get_backend("cudagraphs")
    with mock.patch.object(type(backend), "missing", return_value=None):  # a GPU
        plan = runtime.compile(model, backend="cudagraphs", batch_buckets=(1, 4))
    x = pictures(model, 6)
    expected, found = run_numbered(model, x), run_numbered(plan.engine, x)
    assert torch.equal(found.routes, expected.routes)
    assert_close(found.logits, expected.logits, 1e-10)
    assert_close(plan.run(x).logits, expected.logits, 1e-10)


@pytest.mark.parametrize("apart", [True, False])
def test_parts_run_side_by_side_where_that_was_faster(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graphed = made("ds_mbnet_tiny", None)
    lanes: list[int] = []
    used = graphed.lanes.on
    monkeypatch.setattr(graphed.lanes, "on", lambda lane: lanes.append(lane) or used(lane))
    monkeypatch.setattr(graphed, "side_by_side", dict(graphed.side_by_side))
    times = iter(itertools.cycle((1.0, 2.0) if apart else (2.0, 1.0)))
    monkeypatch.setattr("dsnet.runtime.graphed.timed", lambda call, device: (call(), next(times))[1])
    graphed.side_by_side[8] = graphed._is_faster_side_by_side(8)
    assert graphed.side_by_side[8] is apart
    lanes.clear()
    found = graphed.run(pictures(model, 8), given=torch.tensor([[0], [1], [2], [3]] * 2))
    assert found.routes.tolist() == [0, 1, 2, 3] * 2
    assert sorted(lanes) == ([1, 2, 3, 4] if apart else [0] * 4)
