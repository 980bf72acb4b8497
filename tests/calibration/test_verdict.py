"""Whether routing pays: a router compared with the best single route, image by image."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import dsnet
from dsnet.calibration import RouteOutputs, calibrate
from dsnet.calibration._verdict import PairedTest, RouterComparison, verdict
from dsnet.calibration.calibration import Calibration
from dsnet.calibration.compare import compare
from dsnet.core.checkpoint import Checkpoint
from dsnet.routing import CostTable, OperatingPoint, Routed, Router
from dsnet.routing.policies import SingleRoutePolicy
from dsnet.routing.session import Session
from tests.support import error_of, images, random_model

NAME = "ds_mbnet_tiny"
COSTS = CostTable(unit="madds", prefix=1e6, segments=(((1e6, 2e6, 3e6, 4e6),),), network=NAME)


def outputs(right: list[list[int]], margins: list[list[float]]) -> RouteOutputs:
    """Images by whether each of the four routes is right, with its margins."""
    model = random_model(NAME)
    return RouteOutputs(
        space=model.space,
        routes=tuple(model.space),
        labels=torch.zeros(len(right), dtype=torch.long),
        predicted=1 - torch.tensor(right),
        margins=torch.tensor(margins),
        options=((0, 1, 2, 3),),
        scores=(torch.zeros(1, len(right), 4),),
        image_size=(16, 16),
        digest="x",
    )


def paying(count: int) -> RouteOutputs:
    """The smallest route knows which images it gets wrong, and only the largest gets those right."""
    hard = [i % 4 == 0 for i in range(count)]
    return outputs(
        [[0, 0, 0, 1] if h else [1, 1, 1, 1] for h in hard], [[0.1 if h else 0.9] + [0.5] * 3 for h in hard]
    )


def useless(count: int) -> RouteOutputs:
    """Route 1 is right wherever any is, and no margin says anything."""
    draw = torch.Generator().manual_seed(0)
    right = [[int(i % 3 > 0), int(i % 10 > 0), int(i % 9 > 1), int(i % 10 > 0)] for i in range(count)]
    return outputs(right, torch.rand(count, 4, generator=draw).tolist())


def test_paired_differences_and_their_errors() -> None:
    draw = torch.Generator().manual_seed(1)
    first, second = (torch.rand(200, generator=draw) < share for share in (0.8, 0.7))
    paired = PairedTest.of(first, second)
    each = first.double() - second.double()
    assert paired.difference == pytest.approx(each.mean().item())
    assert paired.standard_error == pytest.approx(each.std().item() / 200**0.5)
    stats = pytest.importorskip("scipy.stats")
    for wins, losses in ((5, 0), (6, 0), (60, 38), (700, 640), (0, 0), (3, 9)):
        paired = PairedTest(images=2000, wins=wins, losses=losses)
        count = wins + losses
        expected = stats.binomtest(wins, count, alternative="greater").pvalue if count else 1.0
        assert paired.p_value == pytest.approx(expected, abs=2e-3)
        assert paired.significant == (expected < 0.025)


def test_the_verdict_on_routing_that_pays() -> None:
    held_out, tested = paying(100), paying(400)
    calibration = calibrate(held_out, COSTS, gate=False)
    found = compare(tested, calibration, [3e6, 3.6e6])
    said = found.verdict
    assert said is not None
    assert said.pays
    row = next(row for row in found.rows if row.router == "cascade" and row.budget == said.deciding.budget)
    assert (row.route, row.route_accuracy) == (0, 0.75)
    assert row.paired.difference == pytest.approx(row.accuracy - 0.75)
    assert str(said).startswith("Routing pays here: within 3.00M MAdds the cascade gets ")
    assert "route 0 for all images (75.00 % at 2.00M MAdds)" in str(said)
    assert f"{row.paired} above" in str(said)
    assert str(said).count(". ") == 0  # one sentence
    assert json.loads(json.dumps(said.to_dict(), allow_nan=False))["pays"] is True
    assert calibration.pick(3e6).kind == "cascade"
    # One budget that a much better single route keeps: nothing to gain beside it.
    assert not compare(tested, calibration, [5e6]).verdict.pays  # type: ignore[union-attr]


def test_the_verdict_on_routing_that_does_not_pay_names_a_route() -> None:
    """Chosen on held-out images, whatever the test images say."""
    held_out, tested = useless(180), useless(360)
    tested.predicted[:, 2] = 0  # route 2 is the best here, by luck
    calibration = calibrate(held_out, COSTS, gate=False)
    found = compare(tested, calibration, [3e6, 4e6, 5e6])
    said = found.verdict
    assert said is not None
    assert not said.pays
    assert said.route == 1  # as good as route 3, at less
    assert str(said).startswith(
        "Routing does not pay here: use route 1 for all images (--route 1), 90.00 % of"
    )
    assert "± " in str(said)
    assert found.singles[2].accuracy == 1.0
    pick = calibration.pick(5e6)
    assert pick.kind == "single"
    assert calibration.router("auto", 5e6).policy(5e6) == SingleRoutePolicy(
        costs=COSTS, routes=(1,), thresholds=()
    )


def test_a_difference_within_chance_does_not_pay() -> None:
    contest = RouterComparison(
        router="gate",
        budget=3e6,
        cost=3e6,
        accuracy=0.91,
        expected_gain=0.02,
        route=1,
        route_cost=2.9e6,
        route_accuracy=0.9,
        paired=PairedTest(images=300, wins=10, losses=7),
    )
    said = verdict([contest], "madds", "test images")
    assert said is not None
    assert not said.pays
    assert "+1.00 ± 1.38 points" in str(said)
    better = replace(
        contest, budget=4e6, expected_gain=0.0, route=2, paired=PairedTest(images=300, wins=30, losses=7)
    )
    said = verdict([contest, better], "madds", "test images")
    assert said is not None
    assert said.pays
    assert said.deciding == better
    assert verdict([], "madds", "test images") is None


def test_a_single_route_is_a_router_and_wins_ties() -> None:
    costs = CostTable.of_model(random_model(NAME))
    points = tuple(
        OperatingPoint(cost=costs.of((n,)), accuracy=a, routes=(n,), route_counts=((n, 100),))
        for n, a in enumerate((0.5, 0.8, 0.7, 0.8))
    )
    single = Router(kind="single", costs=costs, curve=points)
    assert Router.from_dict(json.loads(json.dumps(single.to_dict()))) == single
    largest = costs.largest
    assert single.point(largest).routes == (1,)
    assert single.point(costs.of((0,))).routes == (0,)
    assert "give it a budget" in error_of(lambda: single.policy())
    tie = OperatingPoint(
        cost=largest, accuracy=0.8 + 1e-12, parameters=(0.5,), routes=(0, 3), route_counts=((0, 50), (3, 50))
    )
    cascade = Router(kind="cascade", costs=costs, curve=(tie,))
    singles = {point.routes[0]: point.accuracy for point in points}
    made = Calibration(
        images=100, digest="x", routers={"cascade": cascade, "single": single}, singles=singles
    )
    assert made.pick(largest).kind == "single"
    assert made.pick(largest, ("gate", "cascade")).kind == "cascade"
    better = replace(cascade, curve=(replace(tie, accuracy=0.81),))
    assert replace(made, routers={"cascade": better, "single": single}).pick(largest).kind == "cascade"
    assert Calibration.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_a_single_route_runs_in_networks_plans_and_sessions() -> None:
    model = dsnet.create_model(NAME)
    model.load_state_dict(random_model(NAME, torch.float32).state_dict())
    costs, x = CostTable.of_model(model), images(model, 5)
    points = tuple(
        OperatingPoint(cost=costs.of((n,)), accuracy=a, routes=(n,), route_counts=((n, 9),))
        for n, a in enumerate((0.5, 0.8, 0.7, 0.75))
    )
    routed = Routed(model.eval(), Router(kind="single", costs=costs, curve=points), "100%")
    expected = model(x, 1)
    assert torch.equal(routed(x), expected)
    assert (routed.path(1), routed.cost(1)) == ((1,), costs.of((1,)))
    session = Session(routed, cap="90%")
    assert session(x).routes.tolist() == [1] * 5
    assert Session(routed).drift() is not None
    plan = dsnet.runtime.compile(routed, backend="eager")
    output = plan.run(x)
    assert output.routes.tolist() == [1] * 5
    assert torch.allclose(output.logits, expected, atol=1e-5)
    assert plan.at(costs.of((0,))).run(x).routes.tolist() == [0] * 5
    assert str(plan.break_even(2))


def test_calibrations_of_earlier_versions_get_single_routes() -> None:
    made = calibrate(useless(90), COSTS, gate=False)
    plain = json.loads(json.dumps(made.to_dict()))
    del plain["routers"]["single"]
    space = random_model(NAME).space.to_dict()
    saved = Checkpoint(tensors={}, data={"routing": plain, "network": {"space": space}})
    again = Calibration.of(saved, "runs/mine")
    assert dict(again.routers) == dict(made.routers)
