"""Gate scores do not depend on the other images of a batch: they are compared bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dsnet.runtime import _compiler as compiler
from dsnet.runtime.partition.batch_invariance import _OneDnnConv, _RowLinear, make_invariant
from dsnet.runtime.partition.segments import Segment, SegmentKey
from dsnet.runtime.plan import Plan
from dsnet.slicing import functional as SF
from tests.support import assert_close, error_of
from tests.support.networks import NEEDS, network, pictures, plan_of

pytestmark = pytest.mark.xdist_group("plans")

IMAGES = 33
BATCHES = [(start, size) for size in (1, 2, 3, 5, 8, 15, 16, 17) for start in (0, 1)]  # sub-batches of x
FEW_BATCHES = [(0, 1), (1, 3), (1, 16), (0, 17)]


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with `count` torch threads, on whose number the choice of kernels depends.

    With two threads on a busy machine every kernel may wait for a time slice: keep such cases short.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_alike(
    scores: Callable[[Tensor], Tensor], x: Tensor, batches: Sequence[tuple[int, int]] = BATCHES
) -> None:
    """Check that the scores of each sub-batch equal those of the same rows in the whole batch."""
    expected = scores(x)
    for start, size in batches:
        scores_BG = scores(x[start : start + size].clone())
        assert torch.equal(scores_BG, expected[start : start + size]), f"{size} images from {start} on"


def scores_of(plan: Plan) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the scores of every gate along the largest route."""
    choices = plan.network.space.largest.choices

    def scores(x: Tensor) -> Tensor:
        state = plan.network.run_prefix(x)
        scores_BG = [state.scores]
        for gates in range(1, len(choices)):
            state = plan.network.run_segment(state, choices[:gates])
            scores_BG.append(state.scores)
        return torch.cat(scores_BG, 1)

    return scores


@pytest.mark.parametrize(
    ("name", "buckets"),
    [
        ("ds_mbnet_tiny", None),  # by default batches are split by measured times
        ("ds_mbnet_tiny", (64,)),  # with one large bucket they are not split
        ("ds_vit_plus_tiny", (64,)),
        ("ds_resnet_tiny", (64,)),
        ("three_gates", (64,)),
    ],
)
def test_scores_of_eager_plans_do_not_depend_on_the_batch(name: str, buckets: tuple[int, ...] | None) -> None:
    model = network(name)
    plan = runtime.compile(model, backend="eager", batch_buckets=buckets, batch_invariant=True)
    assert plan.batch_invariant
    x = pictures(model, IMAGES)
    assert_alike(scores_of(plan), x)
    usual = plan_of(name, "eager")
    assert not usual.batch_invariant, "the default for small images"
    assert_close(scores_of(plan)(x), scores_of(usual)(x), 1e-4)  # other kernels, other orders of sums


def test_scores_do_not_depend_on_the_batch_with_two_threads() -> None:
    model = network("ds_mbnet_tiny")
    plan = runtime.compile(model, backend="eager", batch_buckets=(64,), batch_invariant=True)
    with torch_threads(2):
        assert_alike(scores_of(plan), pictures(model, IMAGES), FEW_BATCHES)


def test_all_layers_in_front_of_a_decision_are_replaced() -> None:
    """Not only those whose kernels sum in another order on this machine."""
    kinds: dict[bool, set[type]] = {True: set(), False: set()}

    def spy(parts: Mapping[SegmentKey, Segment], gates: int) -> None:
        make_invariant(parts, gates)
        for history, part in parts.items():
            kinds[len(history) < gates] |= {type(module) for module in part.module.modules()}

    with mock.patch.object(compiler, "make_invariant", spy):
        runtime.compile(network("three_gates"), backend="eager", batch_buckets=(1,), batch_invariant=True)
    assert {_RowLinear, _OneDnnConv} <= kinds[True]
    assert torch.nn.Linear not in kinds[True]
    assert not {_RowLinear, _OneDnnConv} & kinds[False]


def test_plans_that_share_weights_are_not_batch_invariant() -> None:
    model = network("ds_mbnet_tiny")
    shared = runtime.compile(model, backend="eager", memory="shared", image_size=96)
    assert not shared.batch_invariant
    message = error_of(lambda: runtime.compile(model, backend="eager", memory="shared", batch_invariant=True))
    assert "memory='packed'" in message


@pytest.mark.xdist_group("plans")
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", pytest.param("three_gates", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_other_backends_are_batch_invariant_by_default(name: str, backend: str) -> None:
    pytest.importorskip(NEEDS[backend])
    model = network(name)
    if name == "ds_mbnet_tiny":
        plan = plan_of(name, backend)
    else:  # many segments: compile only those of the route that is compared
        plan = runtime.compile(model, backend=backend, batch_buckets=(1, 4), routes=[len(model.space) - 1])
    assert plan.batch_invariant
    assert_alike(scores_of(plan), pictures(model, IMAGES))


@pytest.mark.xdist_group("plans")
def test_cascades_are_batch_invariant_if_logits_are() -> None:
    for backend, invariant in (("eager", False), ("openvino", False), ("onnxruntime", True)):
        plan = plan_of("ds_mbnet_tiny", backend)
        compiled = replace(plan.network, batch_invariant=True)
        costs = CostTable.of_model(network("ds_mbnet_tiny"))
        point = OperatingPoint(cost=costs.largest, accuracy=1.0, parameters=(0.5,), routes=(0, 3))
        cascade = Plan(compiled, Router(kind="cascade", costs=costs, curve=(point,)), "100%")
        assert cascade.batch_invariant is invariant
        assert Plan(compiled).batch_invariant


def test_plans_for_large_images_are_batch_invariant_by_default() -> None:
    model = network("ds_mbnet_tiny")
    plan = runtime.compile(model, backend="eager", batch_buckets=(64,), image_size=96)
    assert plan.batch_invariant
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(IMAGES, 3, 96, 96, generator=draw)
    assert_alike(scores_of(plan), x)
    assert_alike(lambda x: model.gate_scores(model.run_prefix(x, model.gated_mode)), x)


def test_an_image_on_a_decision_boundary_takes_one_route() -> None:
    """With another order of sums, the decision of this gate depends on the batch."""
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
            for start, size in BATCHES
            if start <= own < start + size
        }
        assert len(taken) == 1


def test_bfloat16_is_not_batch_invariant() -> None:
    made = runtime.compile(
        network("ds_mbnet_tiny"),
        backend="eager",
        precision="bfloat16",
        batch_buckets=(1,),
        batch_invariant=True,
    )
    assert not made.batch_invariant


def test_training_of_gates_is_not_changed() -> None:
    """Only passes in which gates decide are batch-invariant."""
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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("features", "out"), [(1, 1), (7, 1), (96, 24), (515, 300)])
def test_rows_of_a_linear_layer(features: int, out: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(IMAGES, features, generator=generator)
    weight = torch.randn(out, features + 3, generator=generator)[:, :features]
    bias = torch.randn(out, generator=generator)
    with torch_threads(threads):
        outputs = SF.row_linear(x, weight, bias)
        batches = BATCHES if threads == 1 else FEW_BATCHES
        assert_alike(lambda x: SF.row_linear(x, weight, bias), x, batches)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()
    assert_close(outputs, expected, 1e-5)
