"""Plans that are copied, pickled or forked, and images that are not dense tensors."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import pickle
import sys
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsnet import runtime
from dsnet.routing import CostTable
from dsnet.routing.policies import OperatingPoint
from dsnet.routing.router import Router
from dsnet.routing.session import Session
from tests.support import error_of
from tests.support.networks import network, pictures, plan_of

pytestmark = pytest.mark.xdist_group("plans")  # they share plans, which take seconds to make

NAME = "ds_mbnet_tiny"


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino"])
def test_copying_a_plan_returns_it_and_pickling_is_refused(backend: str) -> None:
    plan = plan_of(NAME, backend)
    assert copy.deepcopy(plan) is plan
    assert copy.copy(plan) is plan
    held = torch.nn.Module()
    held.plan = plan
    assert copy.deepcopy(held).plan is plan
    for what in (plan, plan.network):
        for call in (functools.partial(pickle.dumps, what), functools.partial(torch.save, what, os.devnull)):
            assert "dsnet.runtime.compile there" in error_of(call)


def test_a_plan_that_shares_weights_is_not_copied_deeply() -> None:
    plan = plan_of(NAME, "eager", "shared")
    assert "compile the copied network" in error_of(lambda: copy.deepcopy(plan))
    assert "compile the copied network" in error_of(lambda: copy.deepcopy(plan.network))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_plan_in_a_forked_process_runs_or_explains_why_not(threads: int) -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 2)
    before, compiled = torch.get_num_threads(), plan.network
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def ask() -> None:
        try:
            send.send(plan.route(x).tolist())
        except ValueError as error:
            send.send(str(error))

    torch.set_num_threads(1)
    try:
        routes = plan.route(x).tolist()
        made = compiled.threads
        object.__setattr__(compiled, "threads", threads)
        process = context.Process(target=ask)
        process.start()
        object.__setattr__(compiled, "threads", made)
        assert receive.poll(60)
        answer = receive.recv()
        process.join(60)
    finally:
        torch.set_num_threads(before)
    assert process.exitcode == 0
    if threads == 1:
        assert answer == routes
    else:
        assert "before this process was forked" in answer
        assert "spawn" in answer


def test_a_gpu_plan_in_a_forked_process_is_refused() -> None:
    compiled, x = plan_of(NAME, "eager").network, pictures(network(NAME), 1)
    with (
        mock.patch("dsnet.runtime.executors.host.os.getpid", return_value=compiled.process + 1),
        mock.patch("dsnet.runtime.executors.host.torch.get_num_threads", return_value=2),
    ):
        assert "spawn" in error_of(lambda: compiled.run_route(x, compiled.space.smallest))


def strange(x: Tensor) -> dict[str, Tensor]:
    """Images that are no dense tensor."""
    rows = list(x)
    return {
        "sparse": x.to_sparse(),
        "_mkldnn": x.to_mkldnn(),
        "nested tensor": torch.nested.nested_tensor(rows, layout=torch.jagged),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_dense_are_refused() -> None:
    model, plan = network(NAME), plan_of(NAME, "eager")
    x = pictures(model, 2)
    given = strange(x) | {"a nested tensor": torch.nested.nested_tensor(list(x))}
    for kind, wrong in given.items():
        calls = [plan, lambda x: plan(x, 0), plan.route, model, lambda x: model(x, 0)]
        for call in calls:
            assert kind in error_of(functools.partial(call, wrong))
        answers = list(plan.stream([x, wrong, x]))
        assert [answer.error is None for answer in answers] == [True, True, False, False, True, True]
        assert kind in str(answers[2].error)


def test_a_session_counts_the_routes_of_a_plan() -> None:
    model = network(NAME)
    x, costs = pictures(model, 20), CostTable.of_model(model)
    points = tuple(
        OperatingPoint(cost=cost, accuracy=0.5, parameters=(weight,))
        for cost, weight in ((costs.of((0,)), 0.5), (costs.largest, -0.5))
    )
    plan = runtime.Plan(
        plan_of(NAME, "eager").network, Router(kind="gate", costs=costs, curve=points), points[1].cost
    )
    session = Session(plan)
    assert torch.equal(session(x).routes, plan.route(x))
    assert session.images == 20
    assert session.mean_cost > costs.of((0,))
    capped = Session(plan, cap=costs.of((0,)) * 1.0001)
    assert set(capped(x).routes.tolist()) == {0}
    assert "no router" in error_of(lambda: Session(plan_of(NAME, "eager")))
    assert "not a ResNet" in error_of(lambda: Session(network("three_gates")))
