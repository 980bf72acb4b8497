"""Operating points from known outputs, compared with plain enumeration."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsnet.calibration import RouteOutputs, calibrate_cascade, calibrate_gate, simulate
from dsnet.calibration.search import interpolate, oracle, random_router, static_points
from dsnet.routing import CostTable, OperatingPoint, Router
from dsnet.routing.router import parse_budget
from tests.support import error_of, random_model


def made_up(name: str, count: int, seed: int, *, tied: bool = False) -> tuple[RouteOutputs, CostTable]:
    """RouteOutputs drawn at random: larger routes are right and sure more often."""
    model = random_model(name)
    draw = torch.Generator().manual_seed(seed)
    routes = tuple(model.space)
    labels = torch.randint(10, (count,), generator=draw)
    strength = torch.linspace(0.5, 0.9, len(routes))
    hardness = torch.rand(count, 1, generator=draw)
    noise = torch.rand(count, len(routes), generator=draw)
    right = hardness * 0.7 + noise * 0.3 < strength
    margins = (1 - hardness + 0.3 * torch.rand(count, len(routes), generator=draw)).clamp(0, 1)
    options = model.space.choices
    scores = []
    for gate, own in enumerate(options):
        histories = len(list(itertools.product(*options[:gate])))
        drawn = torch.randn(histories, count, len(own), generator=draw)
        scores.append(drawn.round() if tied else drawn)
    if tied:
        margins = (10 * margins).round() / 10
    outputs = RouteOutputs(
        space=model.space,
        routes=routes,
        labels=labels,
        predicted=torch.where(right, labels[:, None], (labels[:, None] + 1) % 10),
        margins=margins,
        options=options,
        scores=tuple(scores),
        image_size=(16, 16),
        digest="",
    )
    return outputs, CostTable.of_model(model)


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_mbnet_cifar", "ds_resnet_tiny"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_every_operating_point_reaches_its_cost_and_accuracy(name: str, tied: bool, count: int) -> None:
    outputs, costs = made_up(name, count, seed=count, tied=tied)
    for router in (calibrate_gate(outputs, costs), calibrate_cascade(outputs, costs)):
        assert [p.cost for p in router.curve] == sorted({p.cost for p in router.curve})
        for point in router.curve:
            seen = simulate(router.policy_at(point), outputs)
            assert seen.cost == pytest.approx(point.cost, rel=1e-9)
            assert seen.accuracy == pytest.approx(point.accuracy, abs=1e-9)


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny"])
def test_operating_points_span_the_whole_range_of_costs(name: str) -> None:
    outputs, costs = made_up(name, 200, seed=3)
    every = [costs.of(route.choices) for route in outputs.routes]
    for router in (calibrate_gate(outputs, costs), calibrate_cascade(outputs, costs)):
        assert router.curve[0].cost == pytest.approx(min(every))
        assert router.curve[-1].cost == pytest.approx(max(every), rel=0.01)


def test_any_budget_is_kept_within_two_percent_and_never_exceeded() -> None:
    outputs, costs = made_up("ds_mbnet_cifar", 5000, seed=1)
    for router in (calibrate_gate(outputs, costs), calibrate_cascade(outputs, costs)):
        low, high = router.curve[0].cost, router.curve[-1].cost
        for share in torch.linspace(0, 1, 40).tolist():
            target = low + share * (high - low)
            reached = simulate(router.policy(target), outputs)
            assert 0.98 * target <= reached.cost <= target * (1 + 1e-9)
            near = [p.accuracy for p in router.curve if 0.98 * target <= p.cost <= target]
            assert reached.accuracy == pytest.approx(max(near, default=reached.accuracy))


@pytest.mark.parametrize("costs", ["equal", "one choice"])
def test_a_gate_without_a_choice_has_one_operating_point(costs: str) -> None:
    outputs, table = made_up("ds_mbnet_tiny", 30, seed=1)
    if costs == "equal":
        table = CostTable(unit="ms", prefix=1.0, segments=(((2.0,) * 4,),))
    else:
        outputs = RouteOutputs(
            **{f: getattr(outputs, f) for f in outputs.__slots__ if f not in ("scores", "options")},
            scores=(torch.zeros(1, 30, 1),),
            options=((2,),),
        )
    (point,) = calibrate_gate(outputs, table).curve
    assert simulate(calibrate_gate(outputs, table).policy_at(point), outputs).cost == pytest.approx(
        point.cost
    )


def test_a_gate_with_equal_scores_switches_all_images_at_once() -> None:
    outputs, costs = made_up("ds_mbnet_tiny", 50, seed=1)
    static = RouteOutputs(
        **{f: getattr(outputs, f) for f in outputs.__slots__ if f != "scores"},
        scores=(torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(1, 50, 4),),
    )
    curve = calibrate_gate(static, costs).curve
    alone = {costs.of(route.choices) for route in outputs.routes}
    assert {point.cost for point in curve} <= alone
    assert len(curve) >= 2


def test_cascades_are_the_best_that_enumeration_finds() -> None:
    """All cascades of two routes by trying every threshold, image by image."""
    outputs, costs = made_up("ds_mbnet_tiny", 40, seed=9)
    found = calibrate_cascade(outputs, costs).curve
    level = (found[-1].cost - found[0].cost) / 512
    for i, j in itertools.combinations(range(len(outputs.routes)), 2):
        first, second = outputs.routes[i].choices, outputs.routes[j].choices
        for threshold in [0.0, *(outputs.margins[:, i] + 1e-6).tolist()]:
            paid, right = 0.0, 0
            for n in range(len(outputs)):
                on = outputs.margins[n, i].item() < threshold
                paid += costs.of_several([first, second]) if on else costs.of(first)
                right += bool(outputs.correct[n, j if on else i])
            cost, accuracy = paid / len(outputs), right / len(outputs)
            near = [p.accuracy for p in found if abs(p.cost - cost) <= level + 1e-6]
            if cost <= found[-1].cost:
                assert near
                assert max(near) >= accuracy - 1e-9


@given(
    drawn=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=8),
    cost=st.floats(0.5, 60),
)
@settings(max_examples=300, deadline=None)
def test_the_static_curve_is_the_best_mix_of_two_routes(drawn: list[tuple[int, int]], cost: float) -> None:
    points = [OperatingPoint(cost=float(c), accuracy=a / 20) for c, a in drawn]
    affordable = [p.accuracy for p in points if p.cost <= cost]
    mixed = [
        p.accuracy + (cost - p.cost) / (q.cost - p.cost) * (q.accuracy - p.accuracy)
        for p, q in itertools.permutations(points, 2)
        if p.cost <= cost <= q.cost and p.cost < q.cost
    ]
    cheapest = min(p.cost for p in points)
    expected = (
        max(affordable + mixed) if affordable else max(p.accuracy for p in points if p.cost == cheapest)
    )
    assert interpolate(points, cost) == pytest.approx(expected)


def test_single_routes_are_chosen_on_other_images() -> None:
    points = [
        OperatingPoint(cost=1.0, accuracy=0.5, routes=(0,)),
        OperatingPoint(cost=2.0, accuracy=0.9, routes=(1,)),  # lucky here
        OperatingPoint(cost=3.0, accuracy=0.7, routes=(2,)),
        OperatingPoint(cost=4.0, accuracy=1.0, routes=(7,)),  # never judged
    ]
    judged = {0: 0.5, 1: 0.4, 2: 0.8}
    assert interpolate(points, 2.0, judged) == pytest.approx(0.6)  # half of 0, half of 2
    assert interpolate(points, 9.0, judged) == pytest.approx(0.7)
    assert interpolate(points, 2.0) == pytest.approx(0.9)


def test_oracle_and_random_router_by_hand() -> None:
    outputs, costs = made_up("ds_mbnet_tiny", 60, seed=5)
    best = oracle(outputs, costs)
    for n in range(len(outputs)):
        right = [c for c in range(4) if outputs.correct[n, c]]
        assert best.columns[n].item() == (right[0] if right else 0)
    assert best.accuracy == pytest.approx(outputs.correct.any(1).double().mean().item())
    shares = [best.columns.tolist().count(c) / 60 for c in range(4)]
    expected = sum(s * outputs.correct[:, c].double().mean().item() for c, s in enumerate(shares))
    assert random_router(outputs, best) == pytest.approx(expected)
    alone = static_points(outputs, costs)
    assert [p.routes for p in alone] == [(0,), (1,), (2,), (3,)]


def test_routers_as_plain_data() -> None:
    outputs, costs = made_up("ds_resnet_tiny", 80, seed=2)
    for router in (calibrate_gate(outputs, costs), calibrate_cascade(outputs, costs)):
        assert Router.from_dict(json.loads(json.dumps(router.to_dict()))) == router
    assert "damaged" in error_of(lambda: Router.from_dict({"kind": "gate"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"unit": "bananas"}, "unknown unit"),
        ({"prefix": math.nan}, "finite"),
        ({"segments": (((1.0, math.nan, 3.0),),)}, "finite"),
        ({"segments": (((1.0, -1.0),),)}, "at least 0"),
        ({"segments": ()}, "finite"),
        ({"segments": ((),)}, "a row of costs"),
        ({"segments": (((),),)}, "a row of costs"),
        ({"segments": (((1.0, 2.0),), ((1.0, 2.0),))}, "each of 2 choices before gate 1"),
        ({"segments": (((1.0, 2.0), (1.0,)),)}, "a row of costs"),
        ({"prefix": 0.0, "segments": (((0.0, 0.0),),)}, "costs something"),
    ],
)
def test_invalid_cost_tables_are_refused(change: dict[str, object], said: str) -> None:
    given = {"unit": "madds", "prefix": 1.0, "segments": (((1.0, 2.0),),), **change}
    assert said in error_of(lambda: CostTable(**given))  # type: ignore[arg-type]


def test_invalid_operating_points_are_refused() -> None:
    costs = CostTable(unit="madds", prefix=1.0, segments=(((1.0, 2.0),),))
    for point in (
        OperatingPoint(cost=math.nan, accuracy=0.5, parameters=(0.1,)),
        OperatingPoint(cost=1.0, accuracy=0.5, parameters=(math.nan,)),
        OperatingPoint(cost=1.0, accuracy=0.5, parameters=("a",)),  # type: ignore[arg-type]
    ):
        assert "router" in error_of(lambda point=point: Router(kind="gate", costs=costs, curve=(point,)))


def test_impossible_budgets_are_refused_with_the_range() -> None:
    outputs, costs = made_up("ds_mbnet_tiny", 80, seed=2)
    router = calibrate_gate(outputs, costs)
    low, high = costs.of((0,)), costs.largest
    message = error_of(lambda: router.policy(2 * high))
    assert "out of reach" in message
    assert "MAdds" in message
    points = tuple(OperatingPoint(cost=cost, accuracy=0.5) for cost in (1e6, 2e6, 3e6))
    known = Router(kind="gate", costs=costs, curve=points)
    for budget in (1e5, 1e7):
        assert "from 1.00M MAdds to 3.00M MAdds" in error_of(lambda budget=budget: known.policy(budget))
    assert "dsnet calibrate" in error_of(lambda: Router(kind="gate", costs=costs).policy(low))
    assert "give it a budget" in error_of(lambda: Router(kind="cascade", costs=costs).policy())
    assert "unknown router" in error_of(lambda: Router(kind="best", costs=costs))  # type: ignore[arg-type]


def test_budgets_are_parsed_with_their_units() -> None:
    costs = CostTable(unit="madds", prefix=0.0, segments=(((1e8, 4e8),),))
    assert parse_budget("300M", costs) == 3e8
    assert parse_budget(" 0.3B ", costs) == pytest.approx(3e8)
    assert parse_budget("250000k", costs) == 2.5e8
    assert parse_budget("50%", costs) == 2e8
    assert parse_budget("3e8", costs) == 3e8
    for wrong in ("", "M", "-3M", "0", "3 apples", "nan", "1e999", 0, -1.0, math.inf, math.nan, b"3M", None):
        assert "budget" in error_of(lambda wrong=wrong: parse_budget(wrong, costs))
    assert "another unit" in error_of(lambda: parse_budget("5ms", costs))
    timed = CostTable(unit="ms", prefix=0.0, segments=(((1.0, 4.0),),))
    assert parse_budget("2.5ms", timed) == parse_budget("2.5", timed) == 2.5
    assert "another unit" in error_of(lambda: parse_budget("5M", timed))


@pytest.mark.parametrize(("given", "meant"), [("45", "45%"), (45, "45%"), ("0.45", "45%"), (0.45, "45%")])
def test_a_percentage_without_its_sign_is_refused(given: str | float, meant: str) -> None:
    costs = CostTable(unit="madds", prefix=1e6, segments=(((1e8, 4e8),),))
    assert f"write {meant}" in error_of(lambda: parse_budget(given, costs))
    assert parse_budget("101", costs) == 101
    timed = CostTable(unit="ms", prefix=50.0, segments=(((1.0, 4.0),),))
    assert parse_budget(given, timed) == float(given)
