"""Plans on a GPU equal the network: captured programs, concurrent streams, one host wait per gate."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet import runtime
from dsnet.models.group_by_route import run_gated
from dsnet.routing import CascadePolicy, CostTable, GatePolicy
from dsnet.routing.policies import OperatingPoint, margin
from dsnet.routing.router import Router
from dsnet.runtime.plan import Plan
from tests.support.networks import network, pictures, sure_rows

pytestmark = pytest.mark.gpu

MAKERS = [
    ("ds_mbnet_tiny", None, "cudagraphs"),
    ("ds_vit_plus_tiny", None, "cudagraphs"),
    ("ds_resnet_tiny", "stage", "cudagraphs"),
    ("three_gates", "prefix", "cudagraphs"),
    ("ds_mbnet_tiny", None, "inductor"),
    ("ds_mbnet_tiny", None, "triton"),
]
SIZES = (1, 2, 8, 32)


@pytest.fixture(autouse=True)
def _cuda_in_full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_gpu(name: str, bn_key: str | None, backend: str) -> tuple[dsnet.Supernet, Plan]:
    model = copy.deepcopy(network(name, torch.float32, bn_key)).cuda()
    return model, runtime.compile(model, backend=backend, batch_buckets=SIZES)


def near(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize(("name", "bn_key", "backend"), MAKERS)
def test_mixed_batches_equal_the_network(name: str, bn_key: str | None, backend: str) -> None:
    model, plan = on_gpu(name, bn_key, backend)
    graphed = plan.network.executor
    programs = plan.network.num_programs
    for count in (32, 1, 2, 7, 31, 50, 100):
        x = pictures(model, count, seed=count).cuda()
        expected, actual = run_gated(model, x), plan.run(x)
        routes = torch.tensor([model.space.of_choices(way).number for way in expected.choices.tolist()])
        sure = sure_rows(model, x).cuda()
        assert float(sure.double().mean()) > 0.9
        assert torch.equal(actual.routes[sure].cpu(), routes[sure.cpu()])
        near(actual.logits[sure], expected.logits[sure], 1e-3)
        draw = torch.Generator().manual_seed(count)
        ways = [
            torch.tensor(model.gate(g).choices)[
                torch.randint(0, len(model.gate(g).choices), (count,), generator=draw)
            ]
            for g in range(len(model.gates))
        ]
        taken = torch.stack(ways, 1)
        given = graphed.run_assigned(x, taken.cuda())
        for i in range(0, count, 7):
            route = model.space.of_choices(tuple(taken[i].tolist()))
            assert int(given.routes[i]) == route.number
            near(given.logits[i : i + 1], model(x[i : i + 1], route), 1e-3)
    for route in (model.space.smallest, model.space.largest):
        near(plan(x, route), model(x, route), 1e-3)
    assert plan.network.num_programs == programs


@pytest.mark.parametrize("backend", ["cudagraphs", "triton"])
def test_penalties_and_cascades(backend: str) -> None:
    model, plan = on_gpu("ds_mbnet_tiny", None, backend)
    graphed, costs = plan.network.executor, CostTable.of_model(model)
    x = pictures(model, 40).cuda()
    for weight in (-2.0, 0.4, 0.0, 3.0):
        expected = GatePolicy(costs=costs, weight=weight)(model, x)
        actual = graphed.run_gate(x, costs.penalties(weight, [model.gate(0).choices]))
        assert float((actual.routes == expected.routes).double().mean()) > 0.95
    for routes, quantile in (((0, 3), 0.4), ((0, 1, 3), 0.7)):
        thresholds = tuple(float(margin(model(x, r)).quantile(quantile)) for r in routes[:-1])
        rule = CascadePolicy(costs=costs, routes=routes, thresholds=thresholds)
        expected, actual = rule(model, x), graphed.run_cascade(x, routes, thresholds)
        same = actual.routes == expected.routes
        assert float(same.double().mean()) > 0.9
        near(actual.logits[same], expected.logits[same], 1e-3)


@pytest.mark.parametrize("backend", ["cudagraphs", "triton"])
def test_threads_and_streams_take_turns(backend: str) -> None:
    model, plan = on_gpu("ds_mbnet_tiny", None, backend)
    costs, x = CostTable.of_model(model), pictures(model, 30).cuda()
    ends = [costs.of((choice,)) for choice in (0, 3)]
    points = [
        OperatingPoint(
            cost=cost, accuracy=0.5, parameters=(weight,), routes=(0, 1, 2, 3), route_counts=((0, 1),)
        )
        for cost, weight in zip(ends, (0.3, -0.3), strict=True)
    ]
    router = Router(kind="gate", costs=costs, curve=tuple(points))
    plans = [Plan(plan.network, router, cost) for cost in ends]
    alone = [p.run(x) for p in plans]
    wrong: list[int] = []

    def work(which: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                actual = plans[which].run(x)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(actual.routes, alone[which].routes):
                    wrong.append(which)
                if not torch.allclose(actual.logits, alone[which].logits, atol=1e-4):
                    wrong.append(which)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("backend", ["cudagraphs", "triton"])
def test_bfloat16_is_accurate_and_memory_does_not_grow(backend: str) -> None:
    model = copy.deepcopy(network("ds_mbnet_tiny")).cuda()
    plan = runtime.compile(model, backend=backend, precision="bfloat16", batch_buckets=SIZES)
    x = pictures(model, 32).cuda()
    expected = model(x, 3)
    assert float((plan(x, 3).float() - expected).abs().max() / expected.abs().max()) < 0.1
    plan(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for count in (32, 5, 17):
        plan(x[:count])
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_single_image_equals_the_same_image_in_a_large_batch(precision: str) -> None:
    model = copy.deepcopy(network("ds_mbnet_tiny")).cuda()
    plan = runtime.compile(model, backend="triton", precision=precision, batch_buckets=(1, 8, 256))
    x = pictures(model, 200).cuda()
    together = plan.run(x)
    for some in (slice(0, 1), slice(77, 78), slice(30, 37)):
        actual = plan.run(x[some])
        assert torch.equal(actual.logits, together.logits[some])
        assert torch.equal(actual.routes, together.routes[some])
