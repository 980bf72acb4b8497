"""What a plan is made of: parts, histories, weights."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import dsnet
from dsnet import runtime
from dsnet.models.group_by_route import run_gated
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.partition.segments import pack, segment_histories, weight_bytes
from tests.support import assert_close, error_of
from tests.support.networks import NEEDS, network, pictures, plan_of

pytestmark = pytest.mark.xdist_group("plans")  # they share plans, which take seconds to make


def test_packed_weights_are_copies() -> None:
    model = copy.deepcopy(network("ds_mbnet_tiny"))
    plan = runtime.compile(model, backend="eager")
    x = pictures(model, 4)
    before = plan(x, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(plan(x, 2), before)
    gone = weakref.ref(model)
    del model, parameter
    gc.collect()
    assert gone() is None, "a packed plan keeps no supernet"


def test_weight_bytes_of_both_memories() -> None:
    model = network("ds_mbnet_tiny")
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    shared, packed = (plan_of("ds_mbnet_tiny", "eager", memory).network for memory in ("shared", "packed"))
    assert shared.resident == own
    parts = [
        runtime.compile(model, backend="eager", routes=[route.number]).network.resident
        for route in model.space
    ]
    fronts = 3 * weight_bytes([pack(model, [(0,)])[()].module])
    assert packed.resident == sum(parts) - fronts
    assert packed.resident > shared.resident


@pytest.mark.parametrize(("bn_key", "parts"), [("prefix", 1 + 4 + 16), ("stage", 1 + 4 + 16)])
def test_segments_of_every_pair_of_choices(bn_key: str, parts: int) -> None:
    model = network("ds_resnet_tiny", torch.float64, bn_key)
    plan = runtime.compile(model, backend="eager")
    assert len(plan.network.segments) == parts
    x = pictures(model, 21)
    assert_close(plan(x), run_gated(model, x).logits, 1e-9)


@pytest.mark.parametrize("backend", ["eager", "openvino", "onnxruntime", "inductor"])
def test_segments_tell_histories_apart_on_every_backend(backend: str) -> None:
    if backend in NEEDS:
        pytest.importorskip(NEEDS[backend])
    model = network("three_gates")
    parts = pack(model, [model.gate(g).choices for g in range(3)])
    part = parts[0, 1, 2]
    assert part.histories == 4
    assert {h for h, p in parts.items() if p.histories > 1} == {h for h in parts if len(h) == 3}
    x, _ = part.example(4, torch.Generator().manual_seed(0))
    which = torch.tensor([3, 0, 2, 0])
    made = get_backend(backend).convert(part.module, x, which)(x, which)
    for order in (which, which.flip(0)):
        (actual,) = made(x, order)
        for i, first in enumerate(order.tolist()):
            assert_close(actual[i : i + 1], model.segment_output(x[i : i + 1], (first, 1, 2)), 1e-4)


def test_number_of_segments_of_four_gates() -> None:
    """4 + 3 × 16 behind the prefix, whatever the key of the norms."""
    for bn_key, count in (("stage", 1 + 4 + 3 * 16), ("prefix", 1 + 4 + 3 * 16)):
        model = dsnet.create_model("ds_resnet_cifar", device="meta", bn_key=bn_key)
        options = [model.gate(g).choices for g in range(4)]
        assert len(segment_histories(model, options)) == count


def test_only_some_routes() -> None:
    model = network("ds_mbnet_tiny")
    plan = runtime.compile(model, backend="eager", routes=[1, 3])
    x = pictures(model, 3)
    assert [route.number for route in plan.routes()] == [1, 3]
    assert_close(plan(x, 3), model(x, 3), 1e-5)
    assert "does not hold route 0; it holds 1, 3" in error_of(lambda: plan(x, 0))


def test_one_route_of_three_gates_without_the_first_choice() -> None:
    """A segment key depends on two choices only, so its other choices need not be compiled."""
    model = network("three_gates")
    (route,) = (route for route in model.space if route.choices == (3, 2, 1))
    plan = runtime.compile(model, backend="eager", routes=[route.number])
    x = pictures(model, 3)
    assert_close(plan(x, route.number), model(x, route.number), 1e-5)
