"""Cost tables of networks with several image sizes, and the costs of policies that use them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.calibration import collect, simulate
from dsnet.calibration.search import calibrate_gate
from dsnet.models.composite import CompositeNetwork, with_image_sizes
from dsnet.models.counting import prefix_cost
from dsnet.models.members import resize
from dsnet.routing import CascadePolicy, CostTable, GatePolicy, OperatingPoint, Routed, Router
from dsnet.routing.policies import margin
from dsnet.training import evaluate
from dsnet.training.evaluation import evaluate_gated
from tests.support import assert_close, error_of, images, randomise, spread_gates

SIZES = (8, 16)
NAMES = ["ds_mbnet_tiny", "ds_resnet_plus_tiny", "ds_vit_plus_tiny"]


def network(name: str, count: int = 24) -> tuple[CompositeNetwork, Tensor]:
    model = with_image_sizes(dsnet.create_model(name, dtype=torch.float64), SIZES)
    randomise(model, seed=3)
    x = images(model, count)
    if model.has_gate:
        spread_gates(model, x)
    return model.requires_grad_(False), x


def counts(name: str) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
    """The prefix of each size, and (madds, size, route) of all pairs of an ordinary network by cost."""
    plain = dsnet.create_model(name, device="meta")
    prefixes = {size: prefix_cost(plain, plain.input_spec.shape(size))[0].madds() for size in SIZES}
    pairs = [(dsnet.madds(plain, r, size), size, r.number) for size in SIZES for r in plain.space]
    return prefixes, sorted(pairs)


@pytest.mark.parametrize("name", NAMES)
def test_a_gates_route_costs_the_thumbnail_too(name: str) -> None:
    model, _ = network(name, 8)
    prefixes, pairs = counts(name)
    table = CostTable.of_model(model)
    assert table.fits(model)
    for number, (alone, size, _) in enumerate(pairs):
        assert table.of((number,)) == alone == dsnet.madds(model, number)
        looked = prefixes[SIZES[0]] if size != SIZES[0] else 0
        assert table.gated((number,)) == alone + looked
        assert table.prefix + table.segment(0, None, number) == alone + looked
        assert GatePolicy(costs=table).cost(model.space, number) == alone + looked
    assert table.largest == pairs[-1][0]
    assert GatePolicy(costs=table).min_cost(model) == pairs[0][0]


@pytest.mark.parametrize("name", [*NAMES, "ds_resnet_tiny"])
def test_a_cascade_counts_the_prefix_of_each_size_once(name: str) -> None:
    model, _ = network(name, 8)
    prefixes, pairs = counts(name)
    table = CostTable.of_model(model)
    last = len(pairs) - 1
    for routes in ((0, last), (0, 1), (0, 1, 2, last), tuple(range(len(pairs))), (last,)):
        sizes = {pairs[number][1] for number in routes}
        behind = sum(pairs[number][0] - prefixes[pairs[number][1]] for number in routes)
        expected = behind + sum(prefixes[size] for size in sizes)
        assert table.of_several((number,) for number in routes) == expected
        policy = CascadePolicy(costs=table, routes=routes, thresholds=(0.5,) * (len(routes) - 1))
        assert policy.cost(model.space, routes[-1]) == expected
        assert policy.cost(model.space, routes[0]) == pairs[routes[0]][0] == policy.min_cost(model)


@pytest.mark.parametrize("name", [*NAMES, "ds_resnet_tiny"])
def test_a_cascade_over_sizes_answers_and_costs_as_by_hand(name: str) -> None:
    model, x = network(name)
    prefixes, pairs = counts(name)
    sizes = [size for _, size, _ in pairs]
    large = sizes.index(16)
    routes = tuple(sorted({0, large, len(pairs) - 1}))
    sure = [margin(model(x, route)) for route in routes[:-1]]
    thresholds = tuple(float(m.sort()[0][10:12].mean()) for m in sure)
    policy = CascadePolicy(costs=CostTable.of_model(model), routes=routes, thresholds=thresholds)
    labels = torch.arange(len(x)) % 10
    outputs = collect(model, [(x[:9], labels[:9]), (x[9:], labels[9:])], routes)
    output, seen = policy(model, x), simulate(policy, outputs)
    assert len(set(output.routes.tolist())) > 1
    for i in range(len(x)):
        step = 0
        while step < len(routes) - 1 and sure[step][i] < thresholds[step]:
            step += 1
        assert output.routes[i] == routes[step]
        assert_close(output.logits[i], model(x[i : i + 1], routes[step])[0], 1e-9)
        ran = routes[: step + 1]
        cost = sum(pairs[n][0] - prefixes[sizes[n]] for n in ran) + sum(
            prefixes[size] for size in {sizes[n] for n in ran}
        )
        assert seen.costs[i] == cost
        assert outputs.routes[seen.columns[i]].number == routes[step]


@pytest.mark.parametrize("weight", [-2.0, 0.0, 2.0])
def test_a_gate_weighs_the_costs_of_all_sizes(weight: float) -> None:
    model, x = network("ds_mbnet_tiny")
    table = CostTable.of_model(model)
    policy = GatePolicy(costs=table, weight=weight)
    labels = torch.arange(len(x)) % 10
    output, outputs = policy(model, x), collect(model, [(x, labels)])
    scores = model.gate_scores(model.run_prefix(x))
    costs = torch.tensor([table.gated((n,)) for n in range(8)]).double() / table.largest
    assert output.routes.tolist() == (scores - weight * costs).argmax(1).tolist()
    seen = simulate(policy, outputs)
    assert seen.columns.tolist() == output.routes.tolist()
    assert seen.costs.tolist() == [table.gated((n,)) for n in output.routes.tolist()]
    router = calibrate_gate(outputs, table)
    for point in router.curve:
        found = simulate(router.policy_at(point), outputs)
        assert found.cost == pytest.approx(point.cost)
        assert found.accuracy == pytest.approx(point.accuracy)


def test_a_budget_for_all_images_is_kept() -> None:
    model, x = network("ds_mbnet_tiny")
    table = CostTable.of_model(model)
    for share in (0.15, 0.3, 0.6):
        allowance = share * table.largest * len(x)
        for policy in (
            GatePolicy(costs=table, weight=-3.0),
            CascadePolicy(costs=table, routes=(0, 3, 7), thresholds=(2.0, 2.0)),
        ):
            spent = sum(policy.cost(model.space, n) for n in policy(model, x, allowance).routes.tolist())
            assert spent <= allowance
            assert spent > 0.5 * allowance


def test_results_of_a_gate_count_the_thumbnail() -> None:
    model, x = network("ds_mbnet_tiny")
    table, labels = CostTable.of_model(model), torch.arange(len(x)) % 10
    taken = model.route(x)[:, 0].tolist()
    result = evaluate_gated(model, [(x[:7], labels[:7]), (x[7:], labels[7:])])
    assert result.madds == pytest.approx(sum(table.gated((n,)) for n in taken) / len(x))
    alone = sum(dsnet.madds(model, n) for n in taken) / len(x)
    assert result.madds > alone
    rows = evaluate(model, [(x, labels)])
    assert [row.madds for row in rows] == [dsnet.madds(model, n) for n in range(8)]
    for route, row in zip(model.space, rows, strict=True):
        assert row.correct == (model(x, route).argmax(1) == labels).sum()


def test_tables_survive_json_and_old_ones_have_no_members() -> None:
    model, x = network("ds_mbnet_tiny")
    table = CostTable.of_model(model)
    point = OperatingPoint(cost=table.largest, accuracy=0.5, parameters=(0.1,), routes=(0, 7))
    router = Router(kind="cascade", costs=table, curve=(point,))
    again = Router.from_dict(json.loads(json.dumps(router.to_dict())))
    assert again == router
    assert again.costs.members == table.members
    routed = Routed(model, again, table.largest)
    assert torch.equal(routed(x), router.policy_at(point)(model, x).logits)
    plain = CostTable.of_model(dsnet.create_model("ds_mbnet_tiny"))
    stored = Router(kind="gate", costs=plain).to_dict()
    assert set(stored["costs"]) == {"unit", "prefix", "segments", "network"}
    assert Router.from_dict(stored).costs == plain
    assert not table.fits(dsnet.create_model("ds_mbnet_tiny"))
    assert not plain.fits(model)


def test_members_that_do_not_fit_are_errors() -> None:
    row = ((1.0, 2.0),)
    for members, prefixes in (
        ((0,), (1.0,)),
        ((0, 1), (1.0,)),
        ((0, -1), (1.0,)),
        ((0, True), (1.0, 1.0)),
        ((0, 1), (1.0, float("inf"))),
        ((0, 1), (1.0, -1.0)),
    ):
        make = {"unit": "madds", "prefix": 1.0, "segments": (row,), "members": members, "prefixes": prefixes}
        assert "one for each route, and its prefix" in error_of(lambda kw=make: CostTable(**kw))


def test_a_network_of_several_gates_routes_by_cascade_alone() -> None:
    model, x = network("ds_resnet_tiny")
    assert "has no gate" in error_of(lambda: GatePolicy(costs=CostTable.of_model(model))(model, x))
    small = resize(x, 8)
    cheapest = next(r for r in model.space if r.image_size == 8)
    plain = model.at(cheapest)[0]
    assert_close(model(x, cheapest), plain(small, model.at(cheapest)[1]), 1e-12)
