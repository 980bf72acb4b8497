"""Decisions of gates in any company: scores compared bit by bit, and routes of images that hesitate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet import runtime
from dsnet.models.group_by_route import run_gated
from dsnet.routing import CostTable
from dsnet.routing.policies import OperatingPoint
from dsnet.routing.router import Router
from dsnet.runtime import api as making
from dsnet.runtime.partition.batch_invariance import _OneKernel, _RowLinear, make_invariant
from dsnet.runtime.partition.segments import Segment, SegmentKey
from dsnet.runtime.plan import Plan
from dsnet.slicing import functional as SF
from tests.support import assert_close, error_of
from tests.support.networks import NEEDS, network, pictures, plan_of

pytestmark = pytest.mark.xdist_group("plans")

IMAGES = 33
COMPANIES = [(start, size) for size in (1, 2, 3, 5, 8, 15, 16, 17) for start in (0, 1)]


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_alike(scores: Callable[[Tensor], Tensor], x: Tensor) -> None:
    expected = scores(x)
    for start, size in COMPANIES:
        some = scores(x[start : start + size].clone())
        assert torch.equal(some, expected[start : start + size]), f"{size} images from {start} on"


def scores_of(plan: Plan) -> Callable[[Tensor], Tensor]:
    """Of all gates on the way of the last route."""
    choices = plan.network.space.largest.choices

    def scores(x: Tensor) -> Tensor:
        state = plan.network.run_prefix(x)
        found = [state.scores]
        for gates in range(1, len(choices)):
            state = plan.network.run_segment(state, choices[:gates])
            found.append(state.scores)
        return torch.cat(found, 1)

    return scores


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("buckets", [None, (64,)])
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_vit_plus_tiny", "ds_resnet_tiny", "three_gates"])
def test_scores_of_eager_plans_do_not_depend_on_the_batch(name: str, buckets: tuple[int, ...] | None) -> None:
    """By default batches are divided by measured times; with one large bucket they are not."""
    model = network(name)
    plan = runtime.compile(model, backend="eager", batch_buckets=buckets, batch_invariant=True)
    assert plan.batch_invariant
    x = pictures(model, IMAGES)
    assert_alike(scores_of(plan), x)
    usual = runtime.compile(model, backend="eager", batch_buckets=(1,))
    assert not usual.batch_invariant, "small images are not, unless asked for"
    assert_close(scores_of(plan)(x), scores_of(usual)(x), 1e-4)  # other kernels, other orders of sums


def test_all_layers_in_front_of_a_decision_are_replaced() -> None:
    """Also where torch's kernels on this machine happen to sum in one order."""
    kinds: dict[bool, set[type]] = {True: set(), False: set()}

    def spy(parts: Mapping[SegmentKey, Segment], gates: int) -> None:
        make_invariant(parts, gates)
        for history, part in parts.items():
            kinds[len(history) < gates] |= {type(module) for module in part.module.modules()}

    with mock.patch.object(making, "make_invariant", spy):
        runtime.compile(network("three_gates"), backend="eager", batch_buckets=(1,), batch_invariant=True)
    assert {_RowLinear, _OneKernel} <= kinds[True]
    assert torch.nn.Linear not in kinds[True]
    assert not {_RowLinear, _OneKernel} & kinds[False]


def test_plans_that_share_weights_are_not_batch_invariant() -> None:
    model = network("ds_mbnet_tiny")
    shared = runtime.compile(model, backend="eager", memory="shared", image_size=96)
    assert not shared.batch_invariant
    message = error_of(lambda: runtime.compile(model, backend="eager", memory="shared", batch_invariant=True))
    assert "memory='packed'" in message


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "three_gates"])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_other_backends_are_so_by_themselves(name: str, backend: str) -> None:
    pytest.importorskip(NEEDS[backend])
    model = network(name)
    largest = len(model.space) - 1
    plan = runtime.compile(model, backend=backend, batch_buckets=(1, 4), routes=[largest])
    assert plan.batch_invariant
    assert_alike(scores_of(plan), pictures(model, IMAGES))


def test_cascades_are_where_logits_are() -> None:
    for backend, invariant in (("eager", False), ("openvino", False), ("onnxruntime", True)):
        plan = plan_of("ds_mbnet_tiny", backend)
        compiled = replace(plan.network, batch_invariant=True)
        costs = CostTable.of_model(network("ds_mbnet_tiny"))
        point = OperatingPoint(cost=costs.largest, accuracy=1.0, parameters=(0.5,), routes=(0, 3))
        cascade = Plan(compiled, Router(kind="cascade", costs=costs, curve=(point,)), "100%")
        assert cascade.batch_invariant is invariant
        assert Plan(compiled).batch_invariant


@pytest.mark.usefixtures("_threads")
def test_images_of_a_usual_size() -> None:
    """Where no one asks."""
    model = network("ds_mbnet_tiny")
    plan = runtime.compile(model, backend="eager", batch_buckets=(64,), image_size=96)
    assert plan.batch_invariant
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(IMAGES, 3, 96, 96, generator=draw)
    assert_alike(scores_of(plan), x)
    assert_alike(lambda x: model.gate_scores(model.run_prefix(x, model.gated_mode)), x)


def test_an_image_on_a_decision_boundary_takes_one_route() -> None:
    """Without the order of sums being kept, this gate changes its mind with the company."""
    model = network("ds_mbnet_tiny")
    plan = runtime.compile(model, backend="eager", batch_buckets=(64,), batch_invariant=True)
    x = pictures(model, IMAGES)
    scores = scores_of(plan)(x)
    for own in range(8):
        best, second = scores[own].topk(2).indices.tolist()
        row = torch.zeros(scores.shape[1])
        row[best] = float(scores[own, best]) - float(scores[own, second])  # so that both are the same

        def decide(s: Tensor, gate: int, previous: int | None, row: Tensor = row) -> Tensor:
            return (s - row).argmax(1)

        taken = {
            run_gated(plan.network, x[start : start + size], decide).choices[own - start].item()
            for start, size in COMPANIES
            if start <= own < start + size
        }
        assert len(taken) == 1


def test_what_is_not_batch_invariant_says_so() -> None:
    made = runtime.compile(
        network("ds_mbnet_tiny"),
        backend="eager",
        precision="bfloat16",
        batch_buckets=(1,),
        batch_invariant=True,
    )
    assert not made.batch_invariant


def test_the_training_of_gates_sums_as_it_did() -> None:
    """Only passes in which gates decide are changed."""
    model = network("ds_mbnet_tiny")
    x = pictures(model, 5)
    state = model.run_prefix(x)
    assert not state.batch_invariant
    gate = model.gate(0)
    features = dsnet.models.blocks.run_steps(model.chain(()), x)
    hidden = torch.relu(
        SF.linear(features.mean((2, 3)), gate.first.weight, gate.first.bias, len(gate.first.bias))
    )
    assert torch.equal(state.encoding.hidden, hidden)
    assert model.run_prefix(x, model.gated_mode).batch_invariant


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("features", "out"), [(1, 1), (7, 1), (96, 24), (515, 300)])
def test_rows_of_a_linear_layer(features: int, out: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(IMAGES, features, generator=draw)
    weight, bias = (
        torch.randn(out, features + 3, generator=draw)[:, :features],
        torch.randn(out, generator=draw),
    )
    found = SF.row_linear(x, weight, bias)
    assert_alike(lambda x: SF.row_linear(x, weight, bias), x)
    assert_close(found, torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float(), 1e-5)
