"""How a number of images is divided into batches that programs were made for."""

from __future__ import annotations

import functools
import random
import sys
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsnet.runtime.executors.batching import Division, promotions
from dsnet.runtime.executors.host import Runner

SIZES = st.dictionaries(st.integers(2, 9), st.floats(0.1, 10), max_size=3)


class Echo:
    """Gives its input back, and notes the sizes it saw."""

    def __init__(self, size: int, seen: list[int]) -> None:
        self.size, self.seen = size, seen

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert len(x) == self.size
        self.seen.append(len(x))
        return (x, 2 * x)


@given(sizes=SIZES, one=st.floats(0.1, 10), images=st.integers(1, 24))
@settings(max_examples=200, deadline=None)
def test_batches_hold_all_images_in_the_least_time(sizes: dict[int, float], one: float, images: int) -> None:
    times = {1: one, **sizes}
    seen: list[int] = []
    runner = Runner({size: Echo(size, seen) for size in times}, times)
    x = torch.arange(images)
    found, doubled = runner(x)
    assert torch.equal(found, x)
    assert torch.equal(doubled, 2 * x)
    assert sum(seen) - images < min(seen)  # the last batch may have room left

    @functools.cache
    def least(left: int) -> float:
        if left == 0:
            return 0.0
        return min(taken + least(max(0, left - size)) for size, taken in times.items())

    assert sum(times[size] for size in seen) <= least(images) * (1 + 1e-9)


@given(times=st.dictionaries(st.integers(1, 9), st.floats(0.1, 10), min_size=1), images=st.integers(1, 40))
def test_programs_of_any_size_run_in_the_best_one(times: dict[int, float], images: int) -> None:
    sizes = Runner(dict.fromkeys(times, lambda x: (x,)), times, any_batch=True).split(images)
    best = min(times, key=lambda size: times[size] / size)
    assert sum(sizes) == images
    assert all(size == best for size in sizes[:-1])
    assert 0 < sizes[-1] <= best


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    times=st.lists(SIZES.map(lambda sizes: {1: 1.0, **sizes}), min_size=5, max_size=5),
)
def test_promotion_never_costs_time_and_goes_up(counts: list[int], times: list[dict[int, float]]) -> None:
    divisions = [Division(own) for own in times]
    left, total = list(counts), sum(divisions[i].time(n) for i, n in enumerate(counts) if n)
    for small, large in promotions(counts, lambda place, images: divisions[place].time(images)):
        assert small < large
        assert left[small] > 0
        assert left[large] > 0
        left[small], left[large] = 0, left[small] + left[large]
        now = sum(divisions[i].time(n) for i, n in enumerate(left) if n)
        assert now < total
        total = now
    assert sum(left) == sum(counts)


def test_the_order_of_a_sum_is_no_reason_to_promote() -> None:
    same = Division({1: 1.0, 2: 0.28924081876868})
    assert promotions([9, 12], lambda place, images: same.time(images)) == []


def test_promotion_where_it_pays() -> None:
    slow = [Division({1: 5.0, 4: 6.0}), Division({1: 6.0, 4: 7.0}), Division({1: 50.0, 4: 60.0})]
    assert promotions([1, 2, 0], lambda place, images: slow[place].time(images)) == [(0, 1)]
    assert promotions([1, 4, 1], lambda place, images: slow[place].time(images)) == []


def test_threads_divide_alike() -> None:
    times = {1: 1.0, 2: 1.5, 4: 2.4, 8: 4.0, 16: 7.0}
    expected, before = [Division(times)(n) for n in range(1, 257)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(15):
            shared, ready = Division(times), threading.Barrier(4)

            def ask(seed: int, shared: Division = shared, ready: threading.Barrier = ready) -> None:
                ready.wait()
                for number in random.Random(seed).choices(range(1, 257), k=30):
                    shared(number)

            threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [shared(n) for n in range(1, 257)] == expected
    finally:
        sys.setswitchinterval(before)
