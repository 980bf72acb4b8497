"""How a number of images is divided into batches that programs were made for."""

from __future__ import annotations

import functools
import random
import sys
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsnet.runtime.executors._batching import BatchSplitter
from dsnet.runtime.executors.host import BucketedProgram

SIZES = st.dictionaries(st.integers(2, 9), st.floats(0.1, 10), max_size=3)


class Echo:
    """Returns its input and records the batch sizes."""

    def __init__(self, size: int, seen: list[int]) -> None:
        self.size, self.seen = size, seen

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert len(x) == self.size
        self.seen.append(len(x))
        return (x, 2 * x)


@given(sizes=SIZES, one=st.floats(0.1, 10), images=st.integers(1, 24))
@settings(max_examples=200, deadline=None)
def test_batches_are_split_for_the_least_time(sizes: dict[int, float], one: float, images: int) -> None:
    times = {1: one, **sizes}
    seen: list[int] = []
    runner = BucketedProgram({size: Echo(size, seen) for size in times}, times)
    x = torch.arange(images)
    actual, doubled = runner(x)
    assert torch.equal(actual, x)
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
    sizes = BucketedProgram(dict.fromkeys(times, lambda x: (x,)), times, any_batch=True).split(images)
    best = min(times, key=lambda size: times[size] / size)
    assert sum(sizes) == images
    assert all(size == best for size in sizes[:-1])
    assert 0 < sizes[-1] <= best


def test_threads_split_batches_alike() -> None:
    times = {1: 1.0, 2: 1.5, 4: 2.4, 8: 4.0, 16: 7.0}
    expected, before = [BatchSplitter(times)(n) for n in range(1, 257)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(15):
            shared, ready = BatchSplitter(times), threading.Barrier(4)

            def ask(seed: int, shared: BatchSplitter = shared, ready: threading.Barrier = ready) -> None:
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
