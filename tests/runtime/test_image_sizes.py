"""Plans of networks with several image sizes against the networks that they are made from."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet import runtime
from dsnet.models.members import resize
from dsnet.routing import CascadePolicy, CostTable, GatePolicy, LatencyTable, Routed
from dsnet.routing.policies import OperatingPoint, margin
from dsnet.routing.router import Router
from dsnet.routing.session import Session
from dsnet.runtime.plan import Plan
from dsnet.runtime.profile import profile, profile_plan
from dsnet.slicing import SplitBatchNorm2d
from dsnet.training import recalibrate
from tests.support import assert_close, error_of, images, random_model, spread_gates

pytestmark = pytest.mark.xdist_group("plans of image sizes")

NEAR = 1e-4
SIZES = (8, 16)
BACKENDS = ["eager", "onnxruntime", pytest.param("openvino", marks=pytest.mark.slow)]


@functools.cache
def network(name: str) -> dsnet.Supernet:
    """A network whose weights and statistics are random; its gate, if any, takes all routes."""
    model = copy.deepcopy(random_model(name, torch.float32, image_sizes=SIZES))  # type: ignore[arg-type]
    x = pictures(model, 128)
    recalibrate(model, [x])  # so that images differ in their features
    with torch.no_grad():  # and in their margins
        model.head.classifier.weight.div_(model(x, model.space.largest).std())
    return spread_gates(model, x) if model.has_gate else model


@functools.cache
def plan_of(name: str, backend: str) -> Plan:
    if backend != "eager":
        pytest.importorskip(backend)
    model = network(name)
    routes = range(len(model.space)) if model.space.gates == 1 and len(model.space) < 16 else (0, 9, 31)
    return runtime.compile(model, backend=backend, batch_buckets=(1, 8), routes=list(routes))


def pictures(model: dsnet.Supernet, count: int) -> Tensor:
    return images(model, count, size=SIZES[-1])


def cascade(model: dsnet.Supernet, x: Tensor, routes: tuple[int, ...]) -> CascadePolicy:
    """A cascade in which some of the images stop at each route."""
    thresholds = []
    for route in routes[:-1]:
        margins = margin(model(x, route)).sort().values[len(x) // 4 : 3 * len(x) // 4]
        widest = int(margins.diff().argmax())  # away from all images
        thresholds.append(float(margins[widest : widest + 2].mean()))
    return CascadePolicy(costs=CostTable.of_model(model), routes=routes, thresholds=tuple(thresholds))


def sure(model: dsnet.Supernet, x: Tensor, policy: CascadePolicy) -> Tensor:
    """Images whose margins are not within rounding of a threshold."""
    pairs = zip(policy.routes, policy.thresholds, strict=False)
    distances = [(margin(model(x, route)) - threshold).abs() for route, threshold in pairs]
    return torch.stack(distances).min(0).values > NEAR


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("ds_resnet_tiny", "eager"),
        ("ds_mbnet_tiny", "eager"),
        pytest.param("ds_mbnet_tiny", "onnxruntime", marks=pytest.mark.slow),
    ],
)
def test_every_compiled_route(name: str, backend: str) -> None:
    model, plan = network(name), plan_of(name, backend)
    x = pictures(model, 11)
    for route in plan.routes():
        assert_close(plan(x, route), model(x, route), 1e-4)
        member, own = model.at(route)
        assert_close(plan(x, route), member(resize(x, route.image_size or 0), own), 1e-4)
        assert plan(x[:0], route).shape == (0, 10)


@pytest.mark.parametrize(
    ("name", "routes", "backend"),
    [
        ("ds_resnet_tiny", (0, 9, 31), "eager"),
        ("ds_mbnet_tiny", (1, 4), "eager"),
        ("ds_mbnet_tiny", (0, 2, 5, 7), "eager"),
        ("ds_mbnet_tiny", (0, 2, 5, 7), "onnxruntime"),
        pytest.param("ds_mbnet_tiny", (0, 2, 5, 7), "openvino", marks=pytest.mark.slow),
    ],
)
def test_cascades(name: str, routes: tuple[int, ...], backend: str) -> None:
    model, plan = network(name), plan_of(name, backend)
    x = pictures(model, 40)
    policy = cascade(model, x, routes)
    expected = policy(model, x)
    assert len(set(expected.routes.tolist())) > 1
    for output in (
        plan.network.executor.run_cascade(x, policy.routes, policy.thresholds),
        policy(plan.network, x),
    ):
        rows = sure(model, x, policy)
        assert rows.double().mean() > 0.9
        assert torch.equal(output.routes[rows], expected.routes[rows])
        assert_close(output.logits[rows], expected.logits[rows], 1e-4)
    empty = plan.network.executor.run_cascade(x[:0], policy.routes, policy.thresholds)
    assert (empty.logits.shape, empty.routes.shape) == ((0, 10), (0,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates(backend: str) -> None:
    model, plan = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", backend)
    x = pictures(model, 60)
    best = model.gate_scores(model.run_prefix(x)).topk(2, dim=1).values
    rows = best[:, 0] - best[:, 1] > NEAR
    expected, got = GatePolicy(costs=CostTable.of_model(model))(model, x), plan.run(x)
    assert len({model.space[int(route)].image_size for route in expected.routes}) > 1
    assert torch.equal(got.routes[rows], expected.routes[rows])
    assert_close(got.logits[rows], expected.logits[rows], 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_mix_of_routes(backend: str) -> None:
    model, plan = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", backend)
    x = pictures(model, 33)
    choices = torch.randint(8, (33, 1), generator=torch.Generator().manual_seed(0))
    output = plan.network.executor.run_assigned(x, choices)
    assert torch.equal(output.routes, choices[:, 0])
    for row, route in enumerate(choices[:, 0].tolist()):
        assert_close(output.logits[row : row + 1], model(x[row : row + 1], route), 1e-4)


def routed(model: dsnet.Supernet, x: Tensor) -> Routed:
    costs, points = CostTable.of_model(model), []
    for routes in ((0,), (0, 3), (1, 7)):
        policy = cascade(model, x, routes)
        cost = sum(policy.cost(model.space, int(r)) for r in policy(model, x).routes) / len(x)
        points.append(OperatingPoint(cost=cost, accuracy=0.5, parameters=policy.thresholds, routes=routes))
    router = Router(kind="cascade", costs=costs, curve=tuple(sorted(points, key=lambda p: p.cost)))
    return Routed(model, router, router.curve[0].cost)


def test_a_plan_holds_what_its_budget_needs_and_gets_the_rest_later() -> None:
    model = network("ds_mbnet_tiny")
    x = pictures(model, 30)
    small = routed(model, x)
    plan = runtime.compile(small, backend="eager", batch_buckets=(8,))
    assert [route.number for route in plan.routes()] == [0]
    assert [member is None for member in plan.network.members] == [False, True]  # type: ignore[union-attr]
    largest = small.router.curve[-1].cost
    more = plan.at(largest)
    assert {1, 7} <= {route.number for route in more.routes()}
    assert torch.equal(more.run(x).routes, small.at(largest).run(x).routes)
    assert "does not hold route 7" in error_of(lambda: plan(x, 7))


def test_streams_sessions_and_break_even() -> None:
    model = network("ds_mbnet_tiny")
    x = pictures(model, 24)
    router = routed(model, x).router
    plan = runtime.compile(Routed(model, router, router.curve[-1].cost), backend="eager", batch_buckets=(8,))
    expected = plan.run(x)
    results = list(plan.stream(list(x.split(5))))
    assert [r.route for r in results] == expected.routes.tolist()
    assert_close(torch.stack([r.logits for r in results if r.logits is not None]), expected.logits, 1e-5)
    session = Session(plan, cap=router.curve[-1].cost)
    session(x)
    assert session.recent_cost <= router.curve[-1].cost * (1 + 1e-9)
    assert "Routing pays" in str(plan.break_even(4))


def test_a_plan_without_a_gate_needs_a_router() -> None:
    plan = plan_of("ds_resnet_tiny", "eager")
    assert "no gate" in error_of(lambda: plan.run(pictures(network("ds_resnet_tiny"), 2)))


def test_images_of_another_size_are_refused() -> None:
    plan = plan_of("ds_mbnet_tiny", "eager")
    message = error_of(lambda: plan(torch.zeros(1, 3, 8, 8), 0))
    assert "16 × 16" in message
    assert "8 × 8" in message


def test_copies_in_other_precisions_run() -> None:
    model = copy.deepcopy(network("ds_mbnet_tiny")).double()
    plan = runtime.compile(model, backend="eager", batch_buckets=(8,))
    x = pictures(model, 9).double()
    policy = cascade(model, x, (0, 5, 7))
    output, expected = (
        plan.network.executor.run_cascade(x, policy.routes, policy.thresholds),
        policy(model, x),
    )
    assert torch.equal(output.routes, expected.routes)
    assert_close(output.logits, expected.logits, 1e-10)


PROFILES: dict[str, Callable[[dsnet.Supernet], LatencyTable]] = {
    "network": lambda model: profile(model, repeats=1),
    "plan": lambda model: profile_plan(model, backend="eager", repeats=1),
}


@pytest.mark.parametrize("kind", PROFILES)
def test_profiles_time_whole_routes_and_the_prefix_of_every_size(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = network("ds_mbnet_tiny")
    table = PROFILES[kind](model)
    assert table.members == tuple(SIZES.index(route.image_size or 0) for route in model.space)
    (entry,) = table.entries
    assert len(entry.prefixes) == len(SIZES)
    costs = table.costs()
    for number, member in enumerate(table.members):
        alone = table.route_time((number,)).p50
        assert costs.of((number,)) == pytest.approx(alone)
        gated = entry.segments[0][0][number].p50 + entry.prefix.p50
        assert costs.gated((number,)) == pytest.approx(gated)
        assert (member == 0) == (costs.gated((number,)) == pytest.approx(alone))
    assert LatencyTable.from_dict(table.to_dict()) == table
    path = tmp_path_factory.mktemp("latency") / "table.json"
    table.save(path)
    LatencyTable.load(path).check(model, torch.device("cpu"), SIZES[-1])


def test_profiles_leave_the_network_alone() -> None:
    model = network("ds_mbnet_tiny")
    before = [(m.mean.clone(), list(m.states)) for m in model.modules() if isinstance(m, SplitBatchNorm2d)]
    profile_plan(model, backend="eager", repeats=1)
    after = [(m.mean, list(m.states)) for m in model.modules() if isinstance(m, SplitBatchNorm2d)]
    assert all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(before, after, strict=True))
