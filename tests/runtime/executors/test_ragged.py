"""Kernels in which every image has its own widths, run by Triton's interpreter, against plain modules."""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dsnet import runtime
from dsnet.models.group_by_route import run_gated
from dsnet.routing import CascadePolicy, CostTable, GatePolicy
from dsnet.routing.policies import margin
from dsnet.runtime.backends.triton import TritonBackend
from dsnet.runtime.partition.segments import Segment, SegmentKey, pack
from dsnet.runtime.plan import Plan
from tests.support import assert_close, error_of, relative_error
from tests.support.networks import network, pictures

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install triton", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("on a GPU kernels are compiled: see test_gpu_plans.py", allow_module_level=True)
from dsnet.runtime.executors.ragged import _layers as ragged
from dsnet.runtime.executors.ragged._assignment import RouteAssignment
from dsnet.runtime.executors.ragged._layers import State, sums_of
from dsnet.runtime.executors.ragged.executor import RaggedExecutor
from dsnet.runtime.executors.ragged.network import Ragged
from dsnet.runtime.executors.ragged.support import unsupported

NAME = "ds_mbnet_tiny"


@functools.cache
def parts(name: str = NAME) -> dict[SegmentKey, Segment]:
    return pack(network(name), [network(name).gate(0).choices])


@functools.cache
def rest(name: str = NAME) -> Ragged:
    return Ragged([part.module for history, part in parts(name).items() if history])


def compiled(name: str, routes: list[int] | None = None) -> Plan:
    with mock.patch.object(TritonBackend, "unavailable", return_value=None):  # a GPU
        return runtime.compile(network(name), backend="triton", batch_buckets=(1, 4), routes=routes)


@functools.cache
def plan() -> Plan:
    return compiled(NAME)


def features(count: int, name: str = NAME) -> Tensor:
    actual: Tensor = parts(name)[()].module(pictures(network(name), count))[0]
    return actual


@pytest.mark.parametrize("name", [NAME, "ds_mbnet_plus_tiny"])
def test_a_prefix_returns_features_and_scores(name: str) -> None:
    x, module = pictures(network(name), 3), parts(name)[()].module
    actual, expected = Ragged([module])(x), module(x)
    assert_close(actual[0], expected[0], 1e-5)
    # These gates tell images apart by small differences: as near to the truth as torch is in this precision.
    truth = copy.deepcopy(module).double()(x.double())[1]
    error = relative_error(actual[1].double(), truth)
    assert error <= 4 * relative_error(expected[1].double(), truth)


@pytest.mark.parametrize("name", [NAME, "ds_mbnet_plus_tiny"])
@given(routes=st.lists(st.integers(-1, 3), min_size=1, max_size=6), few=st.sampled_from([0, 128]))
@example(routes=[3, -1, 0, 2, 1], few=0)
@example(routes=[1, 1, -1, 3], few=128)
@settings(max_examples=2, deadline=None)
def test_every_image_runs_at_its_route(name: str, routes: list[int], few: int) -> None:
    """In DS-MBNet++ kernel sizes, padding and the sizes of maps depend on the route too."""
    x, out = features(len(routes), name), torch.full((len(routes), 10), 7.0)
    with mock.patch.object(ragged, "SMALL_BATCH", few):  # blocks for small batches, or for large ones
        assignment = RouteAssignment.of_routes(torch.tensor(routes, dtype=torch.int32), 4)
        rest(name)(x, assignment=assignment, out=out)
    for i, route in enumerate(routes):
        if route < 0:
            assert bool((out[i] == 7).all())
        else:
            assert_close(out[i : i + 1], parts(name)[route,].module(x[i : i + 1]), 1e-5)


@pytest.mark.parametrize(
    ("positions", "ins", "outs", "small", "large"),
    [
        (49, 20, 40, (64, 64, 32, 4), (64, 64, 32, 4)),
        (49, 300, 300, (64, 128, 64, 4), (64, 128, 64, 4)),
        (196, 64, 128, (64, 64, 64, 4), (256, 64, 32, 8)),
        (784, 8, 24, (256, 32, 16, 4), (256, 32, 16, 4)),
        (784, 64, 128, (128, 64, 32, 4), (64, 128, 64, 4)),
    ],
)
def test_small_batches_have_smaller_blocks_unless_summed(
    positions: int, ins: int, outs: int, small: tuple[int, ...], large: tuple[int, ...]
) -> None:
    """The sizes were tuned on an H200. Blocks are no larger than a layer, in powers of two."""
    for images, blocks in ((1, small), (128, small), (129, large)):
        assert ragged.pointwise_blocks(positions, ins, outs, images, summed=False) == blocks
        assert ragged.pointwise_blocks(positions, ins, outs, images, summed=True) == large


def test_a_single_image_equals_the_same_image_in_a_batch() -> None:
    x, which = features(5), torch.tensor([3, 0, 2, 2, 1], dtype=torch.int32)
    (together,) = rest()(x, assignment=RouteAssignment.of_routes(which, 4))
    for i in (0, 3):
        (alone,) = rest()(x[i : i + 1], assignment=RouteAssignment.of_routes(which[i : i + 1], 4))
        assert torch.equal(alone[0], together[i])
    front, images = Ragged([parts()[()].module]), pictures(network(NAME), 4)
    for many, one in zip(front(images), front(images[2:3]), strict=True):
        assert torch.equal(many[2:3], one)
    assert torch.equal(plan()(images)[1:2], plan()(images[1:2]))


def test_sums_of_many_parts() -> None:
    x = torch.randn(3, 70, 40)
    actual = sums_of(State(x, ((1, 1),), sums=x))
    assert actual.shape == (3, 1, 40)
    assert_close(actual, x.sum(1, keepdim=True), 1e-5)


def test_nan_gives_nan() -> None:
    module = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    )
    (actual,) = Ragged([module])(torch.full((1, 4, 2, 2), torch.nan))
    assert bool(actual.isnan().all())


@given(routes=st.lists(st.integers(-1, 4), min_size=1, max_size=90))
@settings(max_examples=20, deadline=None)
def test_tiles_hold_every_image_once_and_one_route_each(routes: list[int]) -> None:
    which = RouteAssignment.of_routes(torch.tensor(routes, dtype=torch.int32), 5)
    assert which.order is not None
    assert which.tile_routes is not None
    seen = []
    for route, row in zip(which.tile_routes.tolist(), which.order.tolist(), strict=True):
        own = [image for image in row if image >= 0]
        assert all(routes[image] == route for image in own)
        assert bool(own) == (route >= 0)
        seen += own
    assert sorted(seen) == [image for image, route in enumerate(routes) if route >= 0]


@pytest.mark.parametrize("act", [nn.SiLU(), nn.ReLU(), nn.Hardswish(), nn.Identity()])
@pytest.mark.parametrize(("kernel", "stride", "size"), [(3, 2, (9, 7)), (5, 1, (6, 6)), (1, 1, (17, 4))])
def test_layers_of_any_form(act: nn.Module, kernel: int, stride: int, size: tuple[int, int]) -> None:
    torch.manual_seed(kernel)
    acts = [] if isinstance(act, nn.Identity) else [act]
    routes = []
    for width in (8, 20):
        routes.append(
            nn.Sequential(
                nn.Conv2d(6, width, 1),
                *acts,
                nn.Conv2d(width, width, kernel, stride, kernel // 2, groups=width),
                *acts,
                nn.Conv2d(width, 2 * width, 1),
                *acts,
                nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 5)),
            ).eval()
        )
    x = torch.randn(3, 6, *size)
    (actual,) = Ragged(routes)(
        x, assignment=RouteAssignment.of_routes(torch.tensor([1, 0, 1], dtype=torch.int32), 2)
    )
    with torch.no_grad():
        for i, route in enumerate((1, 0, 1)):
            assert_close(actual[i : i + 1], routes[route](x[i : i + 1]), 1e-5)


def test_maps_of_different_sizes() -> None:
    """Some routes leave whole tiles of positions empty: 24 x 24 of them beside 13 x 13."""
    torch.manual_seed(0)
    routes = [
        nn.Sequential(
            nn.Conv2d(8, 8, kernel, 1, padding, groups=8),
            nn.Conv2d(8, 16, 1),
            nn.Conv2d(16, 16, kernel, 1, padding, groups=16),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)),
        ).eval()
        for kernel, padding in ((3, 1), (7, 0), (5, 2))
    ]
    x = torch.randn(3, 8, 24, 25)
    (actual,) = Ragged(routes)(
        x, assignment=RouteAssignment.of_routes(torch.tensor([0, 1, 2], dtype=torch.int32), 3)
    )
    with torch.no_grad():
        assert_close(actual, torch.cat([routes[i](x[i : i + 1]) for i in range(3)]), 1e-5)


# --- plans -----------------------------------------------------------------------------------------------
def test_a_plan_routes_as_the_network_does() -> None:
    model, own = network(NAME), compiled(NAME)  # the shared plan may have recorded more programs
    assert own.network.num_programs == 2 * 4
    for count in (4, 1, 3, 6):
        x = pictures(model, count, seed=count)
        expected, actual = run_gated(model, x), own.run(x)
        routes = [model.space.of_choices(way).number for way in expected.choices.tolist()]
        assert actual.routes.tolist() == routes
        assert_close(actual.logits, expected.logits, 1e-5)
    assert_close(own(x, 2), model(x, 2), 1e-5)
    assert own.network.num_programs == 2 * 4


def test_penalties_and_assigned_choices() -> None:
    model, recorded = network(NAME), plan().network.executor
    x, costs = pictures(model, 4), CostTable.of_model(model)
    for weight in (-2.0, 0.4, 0.0):
        expected = GatePolicy(costs=costs, weight=weight)(model, x)
        actual = recorded.run_gate(x, costs.penalties(weight, [model.gate(0).choices]))
        assert torch.equal(actual.routes, expected.routes)
    taken, wrong = torch.tensor([[3], [1], [0]]), torch.tensor([[0], [99], [0]])
    actual = recorded.run_assigned(x[:3], taken)
    assert actual.routes.tolist() == [3, 1, 0]
    for i, route in enumerate((3, 1, 0)):
        assert_close(actual.logits[i : i + 1], model(x[i : i + 1], route), 1e-5)
    taken[0] = 0  # the same tensor with other choices
    assert recorded.run_assigned(x[:3], taken).routes.tolist() == [0, 1, 0]
    recorded.run_route(x[:3], model.space.resolve(3))
    assert recorded.run_assigned(x[:3], taken).routes.tolist() == [0, 1, 0]
    for _ in range(2):  # what is no choice is not taken for one the second time either
        with pytest.raises((RuntimeError, IndexError)):
            recorded.run_assigned(x[:3], wrong)
    assert recorded.run_assigned(x[:3], taken).routes.tolist() == [0, 1, 0]


def test_programs_cover_only_what_the_gate_chooses() -> None:
    model = copy.deepcopy(network(NAME))
    model.reset_routing([0, 2], generator=torch.Generator().manual_seed(0))
    with mock.patch.object(TritonBackend, "unavailable", return_value=None):
        some = runtime.compile(model, backend="triton", batch_buckets=(4,), routes=[0, 2, 3])
    recorded, x = some.network.executor, pictures(model, 4)
    assert isinstance(recorded, RaggedExecutor)
    assert (recorded.gate_limit, recorded.rest.count) == (2, 3)
    assert some.network.num_programs == 2 * 5
    expected = run_gated(model, x)
    assert_close(some(x), expected.logits, 1e-5)
    assert_close(some(x, 3), model(x, 3), 1e-5)
    taken = torch.tensor([[2], [0], [0], [2]])
    ours, theirs = recorded.run_assigned(x, taken, within_gates=True), recorded.run_assigned(x, taken)
    assert ours.routes.tolist() == [2, 0, 0, 2]
    assert torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize(("routes", "quantile"), [((0, 3), 0.4), ((0, 1, 3), 0.7)])
def test_cascades(routes: tuple[int, ...], quantile: float) -> None:
    model, recorded = network(NAME), plan().network.executor
    x = pictures(model, 4)
    thresholds = tuple(float(margin(model(x, r)).quantile(quantile)) for r in routes[:-1])
    expected = CascadePolicy(costs=CostTable.of_model(model), routes=routes, thresholds=thresholds)(model, x)
    actual = recorded.run_cascade(x, routes, thresholds)
    assert torch.equal(actual.routes, expected.routes)
    assert len(set(actual.routes.tolist())) > 1
    assert_close(actual.logits, expected.logits, 1e-5)


def test_a_cascade_goes_on_from_nan() -> None:
    model, recorded = network(NAME), plan().network.executor
    x = pictures(model, 3).clone()
    x[1, 0, 0, 0] = float("nan")
    actual = recorded.run_cascade(x, (0, 3), (-1.0,))  # the margin of a number is larger
    assert actual.routes.tolist() == [0, 3, 0]
    assert actual.logits.isfinite().all(1).tolist() == [True, False, True]


def test_routes_that_are_not_compiled() -> None:
    model = network(NAME)
    some = compiled(NAME, [0, 3])
    assert_close(some(pictures(model, 2), 3), model(pictures(model, 2), 3), 1e-5)
    recorded = some.network.executor
    message = "does not hold the choices [1]"
    assert message in error_of(lambda: recorded.run_assigned(pictures(model, 2), torch.tensor([[0], [1]])))
    assert message in error_of(lambda: recorded.run_cascade(pictures(model, 2), (0, 1), (0.5,)))
    assert "does not hold route 1" in error_of(lambda: some(pictures(model, 2), 1))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.Sequential(nn.Conv2d(8, 8, 1)), "end at a gate, at a classifier"),
        (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2)), "no kernel for Conv2d"),
        (nn.Sequential(nn.Conv2d(8, 8, 1, bias=False)), "no kernel for Conv2d"),
        (nn.Sequential(nn.Conv2d(8, 16, 3, padding=1)), "no kernel for Conv2d"),  # a stem of 72 inputs
        (nn.Sequential(nn.Conv2d(8, 8, 1), nn.MaxPool2d(2)), "no kernel for MaxPool2d"),
        (
            nn.Sequential(nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 2)),
            "no kernel for AdaptiveAvgPool2d",
        ),
        (
            nn.Sequential(
                nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2, bias=False)
            ),
            "no kernel for AdaptiveAvgPool2d",
        ),
    ],
)
def test_layers_without_kernels(module: nn.Module, why: str) -> None:
    assert why in str(unsupported([module]))


@pytest.mark.parametrize("name", ["ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_unsupported_networks_are_refused_with_a_remedy(name: str) -> None:
    message = error_of(lambda: compiled(name))
    assert "backend triton: there is no kernel for" in message
    assert "try inductor or cudagraphs" in message


def test_devices_and_precisions() -> None:
    cuda = torch.device("cuda")
    assert "float32 and bfloat16, not in torch.float64" in str(
        TritonBackend().unavailable(cuda, torch.float64)
    )
    assert TritonBackend().unavailable(cuda, torch.bfloat16) is None
    assert "for CUDA, not for cpu" in error_of(lambda: runtime.compile(network(NAME), backend="triton"))


def test_different_structures_are_refused() -> None:
    def made(*layers: Any) -> nn.Module:  # noqa: ANN401
        return nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)))

    pointwise, deeper = made(nn.Conv2d(8, 8, 1)), made(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    assert "different kinds" in str(unsupported([pointwise, deeper]))
    strided = [made(nn.Conv2d(8, 8, 3, stride, 1, groups=8)) for stride in (1, 2)]
    assert "different strides or activations" in str(unsupported(strided))
    wider = made(nn.Conv2d(16, 8, 1))
    assert "different numbers of input channels" in str(unsupported([pointwise, wider]))
    large = Ragged([made(nn.Conv2d(8, 8, 7, groups=8))])
    assert "does not fit a map of (4, 4)" in error_of(lambda: large(torch.zeros(1, 8, 4, 4)))
    assert unsupported([pointwise, pointwise]) is None
    mean = nn.AdaptiveAvgPool2d((1, 1))  # as that of one number
    assert unsupported([nn.Sequential(nn.Conv2d(8, 8, 1), mean, nn.Flatten(), nn.Linear(8, 2))]) is None


def test_weight_bytes_of_joined_routes() -> None:
    """Routes are padded to the largest, and the original weights are not kept."""
    largest = sum(p.numel() for p in parts()[3,].module.parameters())
    front = sum(p.numel() for p in parts()[()].module.parameters())
    held = plan().network.resident / 4
    assert 4 * largest + front <= held < 1.1 * (4 * largest + front)


def test_the_calls_of_a_profile_run_the_prefix_or_a_route() -> None:
    executor, model = plan().network.graph_executor, network(NAME)
    assert isinstance(executor, RaggedExecutor)
    x = pictures(model, 3)
    calls, cumulative, *_ = executor.segment_calls(x)
    assert cumulative
    assert list(calls) == [(), *((choice,) for choice in model.space.choices[0])]
    for choice in model.space.choices[0]:
        executor.logits.zero_()
        calls[choice,]()
        assert_close(executor.logits[:3], model(x, model.space.of_choices((choice,))), 1e-5)
    executor.logits.zero_()
    calls[()]()
    assert not executor.logits.any()
    _, scores = parts()[()].module(x)
    decided = executor.unused_decisions[:3]
    assert torch.equal(decided, scores.argmax(1))
