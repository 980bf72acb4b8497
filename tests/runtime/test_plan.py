"""Plans against the network that they are made from: the same routes, the same answers."""

from __future__ import annotations

import copy
import functools
import threading
from unittest import mock

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet import runtime
from dsnet.models.group_by_route import run_gated
from dsnet.routing import CascadePolicy, CostTable, GatePolicy, Routed
from dsnet.routing.policies import OperatingPoint, margin
from dsnet.routing.router import Router
from dsnet.routing.session import Session
from tests.support import TINY, assert_close, error_of, relative_error
from tests.support.networks import network, pictures, plan_of, sure_rows

pytestmark = pytest.mark.xdist_group("plans")  # they share plans, which take seconds to make

MAKERS = [
    ("ds_mbnet_tiny", "eager", "packed"),
    ("ds_mbnet_tiny", "eager", "shared"),
    ("ds_mbnet_tiny", "openvino", "packed"),
    ("ds_mbnet_tiny", "onnxruntime", "packed"),
    ("ds_resnet_tiny", "eager", "packed"),
    ("ds_resnet_tiny", "eager", "shared"),
    ("ds_vit_plus_tiny", "eager", "packed"),
    pytest.param("ds_vit_plus_tiny", "openvino", "packed", marks=pytest.mark.slow),
    ("ds_mbnet_plus_tiny", "eager", "packed"),
    ("three_gates", "eager", "packed"),
    ("three_gates", "eager", "shared"),
]


@pytest.mark.parametrize(("name", "backend", "memory"), MAKERS)
def test_a_plan_has_the_routes_and_logits_of_the_network(name: str, backend: str, memory: str) -> None:
    model, plan = network(name), plan_of(name, backend, memory)
    for count in (1, 2, 37):
        x = pictures(model, count, seed=count)
        expected, got = run_gated(model, x), plan.run(x)
        sure = sure_rows(model, x)
        assert sure.double().mean() > 0.9
        numbers = [model.space.of_choices(way).number for way in expected.choices.tolist()]
        assert torch.equal(got.routes[sure], torch.tensor(numbers)[sure])
        assert_close(got.logits[sure], expected.logits[sure], 1e-4)
        assert torch.equal(plan.route(x), got.routes)
        assert torch.equal(plan(x), got.logits)
    assert len(set(got.routes.tolist())) > 1


@pytest.mark.parametrize(("name", "backend", "memory"), MAKERS)
def test_every_route_and_empty_batches(name: str, backend: str, memory: str) -> None:
    model, plan = network(name), plan_of(name, backend, memory)
    x = pictures(model, 5)
    assert plan.routes() == list(model.space)
    for route in list(model.space)[:: max(1, len(model.space) // 5)]:
        assert_close(plan(x, route), model(x, route), 1e-4)
    assert plan(x[:0]).shape == (0, 10)
    assert plan(x[:0], 0).shape == (0, 10)
    assert plan.route(x[:0]).shape == (0,)


@pytest.mark.parametrize(("name", "backend", "memory"), MAKERS[:5])
def test_any_mix_of_routes(name: str, backend: str, memory: str) -> None:
    """Includes mixes of few routes and of a single route."""
    model, plan = network(name), plan_of(name, backend, memory)
    x, draw = pictures(model, 23), torch.Generator().manual_seed(0)
    options = len(model.gate(0).choices)
    for drawn in (
        torch.randint(options, (23,), generator=draw),
        torch.full((23,), options - 1),
        torch.arange(23) % 2 * (options - 1),
    ):
        actual = []
        for network_ in (model, plan.network):
            left = iter([drawn])
            actual.append(
                run_gated(network_, x, lambda s, gate, _, left=left: next(left) if gate == 0 else s.argmin(1))
            )
        same = (actual[0].choices == actual[1].choices).all(1)
        assert same.double().mean() > 0.9
        assert_close(actual[1].logits[same], actual[0].logits[same], 1e-4)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("memory", ["packed", "shared"])
def test_routes_in_float64_do_not_depend_on_the_batch(name: str, memory: str) -> None:
    model = network(name, torch.float64)
    plan = runtime.compile(model, backend="eager", memory=memory)
    x = pictures(model, 19)
    together = plan.run(x)
    assert_close(together.logits, run_gated(model, x).logits, 1e-9)
    for i in range(len(x)):
        alone = plan.run(x[i : i + 1])
        assert alone.routes.item() == together.routes[i].item()
        assert_close(alone.logits[0], together.logits[i], 1e-9)


def test_bfloat16_is_accurate_and_gates_stay_in_float32() -> None:
    model = network("ds_mbnet_tiny")
    plan = runtime.compile(model, backend="eager", precision="bfloat16")
    x = pictures(model, 32)
    low = copy.deepcopy(model).bfloat16()  # the network itself, rounded as much
    assert plan(x, 3).dtype == torch.bfloat16
    assert_close(plan(x, 3).float(), model(x, 3), 0.05)
    scores, rounded = model.gate_scores(model.run_prefix(x)), low.gate_scores(low.run_prefix(x.bfloat16()))
    got = plan.network.gate_scores(plan.network.run_prefix(x))
    assert got.dtype == rounded.dtype == torch.float32
    assert relative_error(got, scores) <= 1.5 * relative_error(rounded, scores)


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", pytest.param("ds_vit_plus_tiny", marks=pytest.mark.slow)])
def test_openvino_in_bfloat16_takes_the_routes_of_float32(name: str) -> None:
    pytest.importorskip("openvino")
    reason = runtime.get_backend("openvino").unavailable(torch.device("cpu"), torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)
    model = network(name)
    plan = runtime.compile(model, backend="openvino", precision="bfloat16", batch_buckets=(2,))
    x = pictures(model, 7)
    expected, got = run_gated(model, x), plan.run(x)
    numbers = [model.space.of_choices(row).number for row in expected.choices.tolist()]
    assert got.routes.tolist() == numbers
    assert got.logits.dtype == plan(x[:0]).dtype == plan(x, 0).dtype == torch.bfloat16
    assert relative_error(got.logits.float(), expected.logits) > 1e-6  # it is rounded somewhere
    assert_close(got.logits.float(), expected.logits, 0.03)
    assert torch.equal(plan(x.double()), got.logits)
    assert plan.network.gate_scores(plan.network.run_prefix(x)).dtype == torch.float32


def routers(model: dsnet.Supernet, x: Tensor) -> tuple[Router, Router]:
    """Return a gate or a cascade with two operating points."""
    costs = CostTable.of_model(model)
    last = model.space.largest.number
    sure = margin(model(x, 0)).sort()[0]
    gate, cascade = [], []
    for share in (0.25, 0.75):
        policy = CascadePolicy(costs=costs, routes=(0, last), thresholds=(float(sure[int(share * len(x))]),))
        weight = 2.0 * (0.5 - share)
        for points, one, numbers, routes in (
            (gate, GatePolicy(costs=costs, weight=weight), (weight,), ()),
            (cascade, policy, policy.thresholds, policy.routes),
        ):
            out = one(model, x)
            cost = sum(one.cost(model.space, number) for number in out.routes.tolist()) / len(x)
            points.append(OperatingPoint(cost=cost, accuracy=0.5, parameters=numbers, routes=routes))
    return Router(kind="gate", costs=costs, curve=tuple(gate)), Router(
        kind="cascade", costs=costs, curve=tuple(cascade)
    )


@pytest.mark.parametrize(("name", "backend", "memory"), [MAKERS[0], MAKERS[2], MAKERS[4]])
@pytest.mark.parametrize("kind", ["gate", "cascade"])
def test_budgets_need_no_new_programs(name: str, backend: str, memory: str, kind: str) -> None:
    model = network(name)
    x = pictures(model, 48)
    router = routers(model, x)[kind == "cascade"]
    routed = Routed(model, router, router.curve[0].cost)
    plan = runtime.Plan(plan_of(name, backend, memory).network, router, routed.budget)
    programs = plan.network.num_programs
    assert plan(x[:0]).shape == (0, 10)
    answered = []
    for point in router.curve:
        other = plan.at(point.cost)
        assert other.network is plan.network
        expected, got = routed.at(point.cost).run(x), other.run(x)
        same = expected.routes == got.routes
        assert same.double().mean() > 0.95
        assert_close(got.logits[same], expected.logits[same], 1e-4)
        answered.append(got.routes.double().mean().item())
    assert answered[0] < answered[1]
    assert plan.network.num_programs == programs


@pytest.mark.parametrize("kind", ["gate", "cascade"])
def test_a_session_runs_on_a_plan_as_on_the_network(kind: str) -> None:
    """Routes depend on earlier batches of the session, so all batches run on both."""
    model = network("ds_mbnet_tiny")
    x = pictures(model, 48)
    router = routers(model, x)[kind == "cascade"]
    dear, cheap = router.curve[1].cost, router.curve[0].cost
    routed = Routed(model, router, dear)
    plan = runtime.Plan(plan_of("ds_mbnet_tiny", "eager").network, router, dear)
    assert plan.routed is not None
    ours, theirs = (Session(r, cap=cheap, window=20) for r in (plan.routed, routed))
    for batch in torch.split(x, 7):
        assert torch.equal(ours(batch).routes, theirs(batch).routes)
    assert ours.route_counts == theirs.route_counts
    assert ours.recent_cost <= cheap * (1 + 1e-9)


@pytest.mark.parametrize("backend", ["eager", "openvino", "onnxruntime"])
def test_threads_at_two_budgets_are_independent(backend: str) -> None:
    model = network("ds_mbnet_tiny")
    x = pictures(model, 30)
    router = routers(model, x)[1]
    plan = runtime.Plan(plan_of("ds_mbnet_tiny", backend).network, router, router.curve[0].cost)
    plans = [plan.at(point.cost) for point in router.curve]
    alone = [p.run(x) for p in plans]
    assert not torch.equal(alone[0].routes, alone[1].routes)
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(12):
            actual = plans[which].run(x)
            if not torch.equal(actual.routes, alone[which].routes) or not torch.allclose(
                actual.logits, alone[which].logits, atol=1e-5
            ):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_shared_plan_refuses_a_changed_network() -> None:
    model = copy.deepcopy(network("ds_mbnet_tiny"))
    plan = runtime.compile(model, backend="eager", memory="shared")
    x, before = pictures(model, 3), {name: t.clone() for name, t in model.state_dict().items()}
    model.train()
    assert "training mode" in error_of(lambda: plan(x))
    assert "training mode" in error_of(lambda: plan(x, 0))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    model.eval().reset_routing(model.space.narrow([1, 2]))
    assert "other routing heads" in error_of(lambda: plan(x))


def test_autocast_around_a_plan_changes_nothing() -> None:
    model, plan = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", "eager")
    x = pictures(model, 9)
    with torch.autocast("cpu", torch.bfloat16):
        actual = plan.run(x)
    assert torch.equal(actual.logits, plan(x))
    assert torch.equal(actual.routes, plan.route(x))


# --- bad input -----------------------------------------------------------------------------------------
def test_settings_that_cannot_be_compiled() -> None:
    model = network("ds_mbnet_tiny")
    make = functools.partial(runtime.compile, backend="eager")
    assert "possible: auto, eager, cudagraphs, inductor, triton, onnxruntime, openvino" in error_of(
        lambda: make(model, backend="x")
    )
    assert "possible: packed, shared" in error_of(lambda: make(model, memory="x"))
    assert "possible: float32" in error_of(lambda: make(model, precision="int4"))
    assert "positive integers" in error_of(lambda: make(model, batch_buckets=[0]))
    assert "at least one route" in error_of(lambda: make(model, routes=[]))
    assert "not from a Linear" in error_of(lambda: make(torch.nn.Linear(1, 1)))
    assert "call .eval()" in error_of(lambda: make(copy.deepcopy(model).train()))
    assert "memory='shared'" in error_of(lambda: make(model, precision="bfloat16", memory="shared"))
    assert "batch_buckets" in error_of(lambda: make(model, batch_buckets=8))
    assert "routes are a list" in error_of(lambda: make(model, routes=5))
    assert "cuda" in error_of(lambda: make(model, device="nonsense"))
    assert "is for eager" in error_of(lambda: runtime.compile(model, backend="inductor", memory="shared"))
    if runtime.get_backend("onnxruntime").unavailable(torch.device("cpu"), torch.float32) is None:
        assert "float32" in error_of(lambda: make(model, backend="onnxruntime", precision="bfloat16"))
        assert "copies weights" in error_of(lambda: make(model, backend="onnxruntime", memory="shared"))
    if runtime.get_backend("openvino").unavailable(torch.device("cpu"), torch.float32) is None:
        assert "float32 or bfloat16" in error_of(lambda: make(model, backend="openvino", precision="float64"))
        with mock.patch("dsnet.runtime.backends.openvino._core") as core:
            core().get_property.return_value = ["FP32"]
            error = error_of(lambda: make(model, backend="openvino", precision="bfloat16"))
        assert "no instructions for bfloat16" in error


def test_images_and_budgets_that_a_plan_refuses() -> None:
    plan = plan_of("ds_mbnet_tiny", "eager")
    assert "made for images of 16 × 16" in error_of(lambda: plan(torch.zeros(1, 3, 32, 32)))
    assert "[batch, 3, height, width]" in error_of(lambda: plan(torch.zeros(3, 16, 16)))
    assert "floating-point" in error_of(lambda: plan(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)))
    for wrong in (None, 5, torch.tensor(1.0)):
        assert "takes images" in error_of(lambda wrong=wrong: plan(wrong, 0))
        assert "takes images" in error_of(lambda wrong=wrong: plan(wrong))
    assert "dsnet calibrate" in error_of(lambda: plan.at("45%"))
    assert "eager on cpu, packed, 4 routes, 5 programs" in repr(plan)
