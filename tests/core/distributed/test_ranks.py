"""Two ranks with half a batch each make the same step as one rank with the whole batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dsnet.core.distributed.ranks import ALONE, Ranks
from dsnet.slicing import Mode
from dsnet.training import Average
from dsnet.training.sync_batch_norm import SharedStatistics
from tests.support import assert_close, error_of
from tests.support.stage1 import KINDS, SCHEMES, setting

pytestmark = pytest.mark.xdist_group("ranks")

CASES = [(name, text) for name in KINDS for text in SCHEMES]


def gradients_of_a_rank(rank: int, folder: str, world: int) -> None:
    """Makes the step of every case on this rank's half, and saves gradients and statistics."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    ranks = Ranks(rank=rank, world=world)
    results = {}
    for name, text in CASES:
        model, stage, routes, views, labels = setting(name, text)
        mine = slice(rank * 3, rank * 3 + 3)
        mode = Mode(statistics=SharedStatistics(update=True))
        average = stage.average
        if average is not None:
            average = Average(average.model, mode=Mode(statistics=SharedStatistics(update=False)))
        stage = replace(stage, mode=mode, average=average)
        stage.step(model, routes, [view[mine] for view in views], labels[mine])
        modules = [model] if stage.projector is None else [model, stage.projector]
        parameters = [p for module in modules for p in module.parameters() if p.grad is not None]
        ranks.reduce_gradients(parameters)
        buffers = {k: v.double() for k, v in model.named_buffers()}
        results[name, text] = ([p.grad for p in parameters], buffers)
    torch.save(results, f"{folder}/rank{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(gradients_of_a_rank, (str(folder), 2), nprocs=2)
    return [torch.load(folder / f"rank{rank}") for rank in range(2)]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_two_ranks_make_the_step_of_one(by_two_ranks: list[dict], name: str, text: str) -> None:
    model, stage, routes, views, labels = setting(name, text)
    stage.step(model, routes, views, labels)
    modules = [model] if stage.projector is None else [model, stage.projector]
    expected = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    for results in by_two_ranks:
        gradients, buffers = results[name, text]
        assert len(gradients) == len(expected)
        for ours, theirs in zip(gradients, expected, strict=True):
            assert (ours - theirs).abs().max() <= 1e-9 * max(theirs.abs().max().item(), 1e-3)
        for key, value in model.named_buffers():
            assert_close(buffers[key], value.double(), 1e-10)


def test_a_single_rank_does_not_communicate() -> None:
    values = torch.ones(3)
    assert ALONE.sum(values) is values
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert "optim.batch=7 does not divide by 2 ranks" in error_of(
        lambda: Ranks(world=2).share(7, "optim.batch")
    )
