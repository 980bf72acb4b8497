"""The ragged executor on detectors, by Triton's interpreter, against the detectors themselves."""

from __future__ import annotations

import copy
import functools
import importlib.util
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dsnet
from dsnet import runtime
from dsnet.detection.deploy._partition import split_detector
from dsnet.detection.deploy.plan import DetectorPlan
from dsnet.detection.model.fssd import Detector, FssdTable
from dsnet.runtime.backends.triton import TritonBackend
from dsnet.runtime.partition.feature_maps import Front
from tests.support import assert_close, error_of, images, randomise
from tests.support.detectors import NAMES, TABLE
from tests.support.detectors import detector as detector_of

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install triton", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("on a GPU kernels are compiled: see test_detecting.py", allow_module_level=True)
from dsnet.runtime.executors.ragged.executor import RaggedExecutor
from dsnet.runtime.executors.ragged.network import Ragged
from dsnet.runtime.executors.ragged.support import unsupported

SIZE = 16
EXACT = 1e-5


@functools.cache
def detector(name: str) -> Detector:
    return copy.deepcopy(detector_of(name)).float()


def compiled(made: Detector, routes: list[int] | None = None) -> DetectorPlan:
    with mock.patch.object(TritonBackend, "unavailable", return_value=None):  # a GPU
        return runtime.compile(made, backend="triton", image_size=SIZE, batch_buckets=(1, 2), routes=routes)


@functools.cache
def plan(name: str) -> DetectorPlan:
    return compiled(detector(name))


def recorded(some: DetectorPlan) -> RaggedExecutor:
    found = some.network.executor
    assert isinstance(found, RaggedExecutor)
    return found


def pictures(count: int) -> Tensor:
    return images(detector(NAMES[0]).network, count, size=SIZE)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_equals_the_detector(name: str) -> None:
    """More images than there is room for; in DS-MBNet++ routes have maps of different sizes."""
    x, programs = pictures(3), plan(name).network.num_programs
    expected, found = detector(name).run(x), plan(name).run(x)
    assert torch.equal(found.routes, expected.routes)
    for got, want in zip(found.output, expected.output, strict=True):
        assert_close(got, want, EXACT)
    assert plan(name).network.num_programs == programs == 2 * 2


@pytest.mark.parametrize("name", NAMES)
def test_mixed_batches_with_assigned_routes(name: str) -> None:
    x, routes = pictures(4), (3, 0, 2, 1)
    found = plan(name).split(recorded(plan(name)).run_assigned(x, torch.tensor(routes)[:, None]).logits)
    for i, route in enumerate(routes):
        alone = detector(name)(x[i : i + 1], route)
        assert_close(found.offsets[i : i + 1], alone.offsets, EXACT)
        assert_close(found.logits[i : i + 1], alone.logits, EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_one_route_at_once_or_segment_by_segment(name: str) -> None:
    x, expected = pictures(1), detector(name)(pictures(1), 0)
    assert_close(plan(name)(x, 0).logits, expected.logits, EXACT)
    row = plan(name).network.run_last_segment(plan(name).network.run_prefix(x), (0,))
    assert_close(plan(name).split(row).logits, expected.logits, EXACT)


def test_the_fused_map_is_batch_invariant() -> None:
    mixed, x, given = recorded(plan(NAMES[1])), pictures(2), torch.tensor([[3], [0]])
    mixed.run_assigned(x, given)
    together = mixed.logits[:2].clone()
    mixed.run_assigned(x[1:2], given[1:2])
    assert torch.equal(mixed.logits[0], together[1])


def test_a_plan_of_some_routes() -> None:
    some, x = compiled(detector(NAMES[0]), [0, 3]), pictures(2)
    found = some.split(recorded(some).run_assigned(x, torch.tensor([[3], [0]])).logits)
    for i, route in enumerate((3, 0)):
        assert_close(found.logits[i : i + 1], detector(NAMES[0])(x[i : i + 1], route).logits, EXACT)
    assert "does not hold route 1" in error_of(lambda: some(x, 1))


@pytest.mark.parametrize(("name", "strides"), [(NAMES[0], (1, 2)), (NAMES[1], (2,)), (NAMES[0], (2, 4, 8))])
def test_features_of_other_strides(name: str, strides: tuple[int, ...]) -> None:
    """All of them in front of the gate, or at it, or up to the last."""
    table = FssdTable(strides=strides, project=8, pyramid=(12,), ratios=((2.0,),))
    made = Detector(detector(name).network, 2, table).eval().requires_grad_(False)
    randomise(made.projections), randomise(made.norm), randomise(made.pyramid)
    (parts, _), x = split_detector(made, (0, 3), fused=True, image_size=SIZE), pictures(1)
    front, rest = Ragged([parts[()].module]), Ragged([parts[c,].module for c in (0, 3)])
    row, _ = front(x)
    assert_close(row, parts[()].module(x)[0], EXACT)
    for place, route in enumerate((0, 3)):
        assert_close(rest.at(place)(row)[0], parts[route,].module(row), EXACT)


def test_a_network_of_one_route() -> None:
    made = Detector(dsnet.create_model("mbnet"), 2).eval()
    parts, _ = split_detector(made, (0,), fused=True, image_size=32)
    assert unsupported([parts[()].module]) is unsupported([parts[0,].module]) is None
    gate = parts[()].module.gate
    front = Front([nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())], [], gate).eval()  # type: ignore[arg-type]
    x = torch.randn(2, 4, 3, 3)
    with torch.no_grad():
        (row, scores), (expected, open_scores) = Ragged([front])(x), front(x)
    assert_close(row, expected, EXACT)
    assert torch.equal(scores, open_scores)


def test_unsupported_layers_are_errors() -> None:
    deep = Detector(dsnet.create_model("mbnet_depth_cifar"), 2, TABLE).eval()
    message = error_of(lambda: compiled(deep))
    assert "backend triton: there is no kernel for" in message
    assert "try inductor or cudagraphs" in message
    mixed = recorded(plan(NAMES[0]))
    assert "a detector is routed by its gate" in error_of(
        lambda: mixed.run_cascade(pictures(1), (0, 1), (0.5,))
    )


def test_resident_bytes_count_joined_weights() -> None:
    made = detector(NAMES[0])
    _, shared = split_detector(made, (0, 1, 2, 3), fused=True, image_size=SIZE)
    end = sum(p.numel() for p in (*shared.module.parameters(), *shared.module.buffers()))
    assert plan(NAMES[0]).network.resident / 4 > end + sum(p.numel() for p in made.projections.parameters())
