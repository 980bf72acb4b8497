"""Decisions and sorting by kernels, run by Triton's interpreter, against the plain way."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsnet.kernels import decide as deciding
from dsnet.kernels import dispatch as sorting
from dsnet.kernels import elementwise as scaling
from dsnet.kernels import gather as reading
from dsnet.kernels import nms as suppress
from dsnet.kernels import ragged as kernels
from dsnet.kernels import rows
from dsnet.kernels.dispatch import find, put_away, settle

pytestmark = pytest.mark.skipif(
    not scaling.AVAILABLE or torch.cuda.is_available(), reason="needs Triton's interpreter"
)
CASES = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def both(monkeypatch: pytest.MonkeyPatch, call: object, *tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    """What a call leaves in copies of these, the plain way and by kernels."""
    found = []
    for interpreted in (False, True):
        monkeypatch.setattr(scaling, "INTERPRETED", interpreted)
        own = [tensor.clone() for tensor in tensors]
        call(*own)  # type: ignore[operator]
        found.append(own)
    return found


@CASES
@given(
    images=st.integers(1, 40),
    real=st.integers(0, 40),
    choices=st.integers(1, 4),
    before=st.integers(1, 3),
    paired=st.booleans(),
    decided=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_settle(
    monkeypatch: pytest.MonkeyPatch,
    images: int,
    real: int,
    choices: int,
    before: int,
    paired: bool,
    decided: bool,
    ties: bool,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    most, held = 45, choices + 1
    scores = torch.randn(most + 1, choices, generator=draw)
    scores = scores.round() if ties else scores
    if seed % 3 == 0:
        scores[torch.randperm(most, generator=draw)[:9], int(seed % choices)] = float("nan")
    prices = torch.randint(0, 2, (before, choices), generator=draw).double()
    places = torch.randperm(held, generator=draw)[:choices]
    previous = torch.randint(0, before, (most,), generator=draw)
    pairs = held * before if paired else held
    valid = torch.tensor([min(real, images)])

    def call(taken: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor) -> None:
        settle(
            taken,
            order,
            counts,
            starts,
            images,
            valid,
            scores=None if decided else scores,
            prices=prices,
            places=places,
            previous=previous,
            held=held if paired else 0,
        )

    taken = torch.randint(0, held, (most,), generator=draw)
    blank = [torch.full((count,), -7) for count in (most, pairs, pairs)]
    plain, kernels = both(monkeypatch, call, taken, *blank)
    for a, b in zip(plain, kernels, strict=True):
        assert torch.equal(a, b)
    order, counts, starts = plain[1:]
    assert sorted(order[:images].tolist()) == list(range(images))
    assert int(counts.sum()) == int(valid)
    for pair in range(pairs):
        own = order[int(starts[pair]) :][: int(counts[pair])]
        if not paired:
            assert bool((plain[0][own] == pair).all())


@CASES
@given(size=st.integers(1, 200), pair=st.integers(0, 2), seed=st.integers(0, 99))
def test_find_and_put_away(monkeypatch: pytest.MonkeyPatch, size: int, pair: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    most = 150
    order, earlier = torch.randperm(most, generator=draw), torch.randint(0, 9, (most + 1,), generator=draw)
    counts, starts = torch.tensor([40, 0, 90]), torch.tensor([0, 40, 40])
    places = torch.arange(size)
    found = []
    for interpreted in (False, True):
        monkeypatch.setattr(scaling, "INTERPRETED", interpreted)
        found.append(find(order, counts, starts, earlier, pair, places, most))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    at, to, before = found[0]
    there = min(size, int(counts[pair]))
    assert torch.equal(to[:there], order[int(starts[pair]) :][:there])
    assert bool((to[there:] == most).all())
    scores = torch.randn(size, 3, generator=draw)

    def call(table: torch.Tensor, later: torch.Tensor) -> None:
        put_away(to, scores, table, before, later, 4, 2)

    plain, kernels = both(
        monkeypatch, call, torch.zeros(most + 1, 3), torch.zeros(most + 1, dtype=torch.long)
    )
    for a, b in zip(plain, kernels, strict=True):
        assert torch.equal(a[:most], b[:most])  # in the last row any of them may be
    assert torch.equal(plain[0][to[:there]], scores[:there])
    assert torch.equal(plain[1][to[:there]], earlier[at[:there]] * 4 + 2)


def test_no_kernel_takes_what_its_launcher_keeps_for_itself() -> None:
    kept = {"options", "grid", "warmup", "num_warps", "num_stages", "num_ctas", "device", "stream"}
    modules = [scaling, rows, reading, sorting, suppress, kernels, deciding]
    names = {
        f"{module.__name__}.{name}": set(inspect.signature(kernel.fn).parameters)
        for module in modules
        for name, kernel in vars(module).items()
        if inspect.isfunction(getattr(kernel, "fn", None))
    }
    assert len(names) > 15
    assert {name: found & kept for name, found in names.items() if found & kept} == {}
