"""A pass in eval mode changes nothing, so threads can share a network."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from dsnet.slicing import Mode, batch_statistics
from tests.support import TINY, images, random_model, snapshot


@pytest.mark.parametrize("name", TINY)
def test_a_pass_in_eval_mode_changes_no_attribute_and_no_buffer(name: str) -> None:
    model = random_model(name)
    before = snapshot(model)
    x = images(model, 4)
    model(x, model.space.smallest)
    model(x, model.space.largest)
    model(x)
    model.route(x)
    model(x, 0, mode=Mode(statistics=batch_statistics))
    after = snapshot(model)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        assert same, f"{key} changed"


@pytest.mark.parametrize("name", TINY)
def test_threads_at_different_routes_do_not_disturb_each_other(name: str) -> None:
    model = random_model(name)
    x = images(model, 4)
    routes = [model.space.smallest, model.space.largest]
    expected = [model(x, route) for route in routes]
    gated = model(x)
    failures: list[str] = []
    barrier = threading.Barrier(3)

    def work(run: object, want: Tensor) -> None:
        barrier.wait()
        for _ in range(20):
            if not torch.allclose(run(), want, rtol=1e-10, atol=1e-12):
                failures.append("differs")

    jobs = [(lambda r=r: model(x, r), want) for r, want in zip(routes, expected, strict=True)]
    threads = [threading.Thread(target=work, args=job) for job in [*jobs, (lambda: model(x), gated)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
