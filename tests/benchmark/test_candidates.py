"""The candidates of a benchmark compute the logits of the images' routes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dsnet
from dsnet.benchmark._candidates import Candidate, Candidates, batches_per_call
from dsnet.benchmark.workloads import Mix, mix_of
from dsnet.core.cuda_graphs import StreamPool
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors.grouped import GroupedExecutor
from dsnet.runtime.executors.host import CompiledNetwork
from dsnet.runtime.forced_routes import sample_routes
from dsnet.runtime.partition.segments import pack
from tests.support import assert_close
from tests.support.bench_result import MIXED
from tests.support.networks import network, plan_of

BATCH = 6


def candidates_of(
    model: dsnet.Supernet, compiled: CompiledNetwork, mix: Mix, batch: int = BATCH
) -> tuple[dict[str, Candidate], torch.Tensor]:
    """All candidates at a batch size, and the images that they run."""
    x = torch.randn(batch, *compiled.image_shape, generator=torch.Generator().manual_seed(0))
    return Candidates(model, compiled, mix, {}).at(batch), x.to(compiled.precision)


def logits_at(model: dsnet.Supernet, x: torch.Tensor, routes: list[int]) -> torch.Tensor:
    """The logits of each image at its route, one by one."""
    return torch.cat([model(x[i : i + 1], route) for i, route in enumerate(routes)])


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny"])
@torch.no_grad()
def test_every_candidate_computes_the_logits_of_the_images_routes(name: str) -> None:
    model = network(name)
    candidates, x = candidates_of(model, plan_of(name, "eager").network, MIXED)
    batches = candidates["gated"].batches
    routes = sample_routes(MIXED.shares, batches * BATCH)
    for key in ("gated", "slicing", "indexing"):
        outputs = candidates[key].run()
        assert len(outputs) == batches
        for number, output in enumerate(outputs):
            expected = logits_at(model, x, routes[number * BATCH : (number + 1) * BATCH])
            assert_close(output.logits, expected, 1e-4)
    assert_close(candidates["masking"].run(), logits_at(model, x, routes[:BATCH]), 1e-4)
    for key in ("largest", "full"):
        assert_close(candidates[key].run(), model(x, model.space.largest), 1e-4)
    steps = sample_routes(MIXED.cascade.final_shares, batches * BATCH)
    for number, output in enumerate(candidates["cascade"].run()):
        final = [MIXED.cascade.routes[step] for step in steps[number * BATCH : (number + 1) * BATCH]]
        assert sorted(output.routes.tolist()) == sorted(final)
        assert_close(output.logits, logits_at(model, x, output.routes.tolist()), 1e-4)
    for route in (0, 1, 3):
        assert_close(candidates[f"alone {route}"].run()[0], model(x, route), 1e-4)
    for route in (1, 3):
        assert_close(candidates[f"suffix {route}"].run(), model(x, route), 1e-4)


@torch.no_grad()
def test_grouped_graphs_take_the_same_routes() -> None:
    model, compiled = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", "eager").network
    image = torch.zeros(1, 3, *compiled.image_size)
    choices = model.gate(0).choices
    segments = pack(model, [choices])
    calls = {key: get_backend("eager").convert(s.module, image)(image) for key, s in segments.items()}
    executor = GroupedExecutor(
        calls, image=image, space=model.space, scored=[choices], sizes=(1, BATCH), streams=StreamPool()
    )
    candidates, x = candidates_of(model, dataclasses.replace(compiled, graph_executor=executor), MIXED)
    routes = sample_routes(MIXED.shares, candidates["gated"].batches * BATCH)
    gated = candidates["gated"].run()
    assert torch.cat([output.routes for output in gated]).tolist() == routes
    assert_close(gated[0].logits, logits_at(model, x, routes[:BATCH]), 1e-4)
    steps = sample_routes(MIXED.cascade.final_shares, candidates["cascade"].batches * BATCH)
    for number, output in enumerate(candidates["cascade"].run()):
        final = [MIXED.cascade.routes[step] for step in steps[number * BATCH : (number + 1) * BATCH]]
        assert sorted(output.routes.tolist()) == sorted(final), "the same number of images at each route"
    candidates["alone 0"].run()


@torch.no_grad()
def test_single_images_run_the_stand_alone_networks_in_turn() -> None:
    model, compiled = network("ds_mbnet_tiny"), plan_of("ds_mbnet_tiny", "eager").network
    candidates, _ = candidates_of(model, compiled, MIXED, batch=1)
    routes = sample_routes(MIXED.shares, candidates["in turn"].batches)
    for route, (logits,) in zip(routes, candidates["in turn"].run(), strict=True):
        assert_close(logits, candidates[f"alone {route}"].run()[0], 1e-6)


def test_a_call_runs_several_small_batches_so_that_all_routes_occur() -> None:
    few, many = mix_of(network("ds_mbnet_tiny"), "uniform"), mix_of(network("ds_resnet_tiny"), "uniform")
    assert [batches_per_call(few, batch) for batch in (1, 4, 8, 32)] == [20, 5, 2, 1]
    assert [batches_per_call(many, batch) for batch in (1, 7, 12, 32)] == [20, 3, 2, 1]
