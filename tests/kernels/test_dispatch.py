"""Dispatch kernels in Triton's interpreter, against torch operations and the decisions of dsnet.routing."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsnet.kernels import dispatch, elementwise, gather, launch, nms, ragged, rows
from dsnet.kernels.dispatch import choose, gather_indices, scatter_scores, sort_by_choice
from dsnet.routing import CostTable
from dsnet.routing.policies import gate_decision
from tests.support.networks import network

pytestmark = pytest.mark.skipif(
    not launch.AVAILABLE or torch.cuda.is_available(), reason="needs Triton's interpreter"
)
CASES = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def by_torch_and_kernels(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., object], *tensors: Tensor
) -> list[list[Tensor]]:
    """Return copies of the tensors that a call wrote to, once with torch operations and once with kernels."""
    results = []
    for interpreted in (False, True):
        monkeypatch.setattr(launch, "INTERPRETED", interpreted)
        copies = [tensor.clone() for tensor in tensors]
        call(*copies)
        results.append(copies)
    return results


@CASES
@given(
    images=st.integers(1, 40),
    real=st.integers(0, 40),
    columns=st.integers(1, 4),
    before=st.integers(1, 3),
    paired=st.booleans(),
    decided=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sort_by_choice(
    monkeypatch: pytest.MonkeyPatch,
    images: int,
    real: int,
    columns: int,
    before: int,
    paired: bool,
    decided: bool,
    ties: bool,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    max_images, choices = 45, columns + 1
    scores = torch.randn(max_images + 1, columns, generator=draw)
    scores = scores.round() if ties else scores
    if seed % 3 == 0:
        scores[torch.randperm(max_images, generator=draw)[:9], int(seed % columns)] = float("nan")
    penalties = torch.randint(0, 2, (before, columns), generator=draw).double()
    choice_index = torch.randperm(choices, generator=draw)[:columns]
    previous = torch.randint(0, before, (max_images,), generator=draw)
    groups = choices * before if paired else choices
    valid = torch.tensor([min(real, images)])

    def call(chosen: Tensor, order: Tensor, counts: Tensor, starts: Tensor) -> None:
        sort_by_choice(
            chosen,
            order,
            counts,
            starts,
            images,
            valid,
            scores=None if decided else scores,
            penalties=penalties,
            choice_index=choice_index,
            previous=previous,
            paired_choices=choices if paired else 0,
        )

    chosen = torch.randint(0, choices, (max_images,), generator=draw)
    blank = [torch.full((count,), -7) for count in (max_images, groups, groups)]
    by_torch, by_kernels = by_torch_and_kernels(monkeypatch, call, chosen, *blank)
    for a, b in zip(by_torch, by_kernels, strict=True):
        assert torch.equal(a, b)
    order, counts, starts = by_torch[1:]
    assert sorted(order[:images].tolist()) == list(range(images))
    assert int(counts.sum()) == int(valid)
    for group in range(groups):
        members = order[int(starts[group]) :][: int(counts[group])]
        if not paired:
            assert bool((by_torch[0][members] == group).all())


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "three_gates"])
def test_kernels_subtract_cost_penalties_as_the_routing_policy_does(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = network(name)
    costs, options = CostTable.of_model(model), [model.gate(g).choices for g in range(len(model.gates))]
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(40, len(options[-1]), generator=draw)
    scores[::7] = scores[::7].round()  # equal scores
    scores[3, 1] = float("nan")
    gate, index = len(options) - 1, torch.arange(len(options[-1]))
    previous = torch.arange(40) % (len(options[-2]) if gate else 1)
    changed = 0
    for weight in (-2.0, 0.3, 2.0):
        decide = gate_decision(costs, weight, options)
        penalties = torch.tensor(costs.penalties(weight, options)[gate], dtype=torch.float64)
        expected = torch.empty(40, dtype=torch.long)
        for row, before in enumerate(options[-2] if gate else [None]):
            expected[previous == row] = decide(scores, gate, before)[previous == row]

        def call(chosen: Tensor, penalties: Tensor = penalties) -> None:
            out = [torch.empty(size, dtype=torch.long) for size in (40, len(index), len(index))]
            sort_by_choice(
                chosen,
                *out,
                40,
                torch.tensor([40]),
                scores=scores,
                penalties=penalties,
                choice_index=index,
                previous=previous if gate else None,
            )

        for (chosen,) in by_torch_and_kernels(monkeypatch, call, torch.empty(40, dtype=torch.long)):
            assert torch.equal(chosen, expected)
        if not gate:
            choose(scores, penalties, index, chosen.zero_())
            assert torch.equal(chosen, expected)
        changed += int((expected != scores.argmax(1)).sum())
    assert changed > 10


@CASES
@given(size=st.integers(1, 200), group=st.integers(0, 2), seed=st.integers(0, 99))
def test_gather_indices_and_scatter_scores(
    monkeypatch: pytest.MonkeyPatch, size: int, group: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    images = 150
    order, history = (
        torch.randperm(images, generator=draw),
        torch.randint(0, 9, (images + 1,), generator=draw),
    )
    counts, starts = torch.tensor([40, 0, 90]), torch.tensor([0, 40, 40])
    positions = torch.arange(size)
    results = []
    for interpreted in (False, True):
        monkeypatch.setattr(launch, "INTERPRETED", interpreted)
        results.append(gather_indices(order, counts, starts, history, group, positions, images))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    source, target, earlier = results[0]
    real = min(size, int(counts[group]))
    assert torch.equal(target[:real], order[int(starts[group]) :][:real])
    assert bool((target[real:] == images).all())
    scores = torch.randn(size, 3, generator=draw)

    def call(table: Tensor, later: Tensor) -> None:
        scatter_scores(target, scores, table, earlier, later, 4, 2)

    by_torch, by_kernels = by_torch_and_kernels(
        monkeypatch, call, torch.zeros(images + 1, 3), torch.zeros(images + 1, dtype=torch.long)
    )
    for a, b in zip(by_torch, by_kernels, strict=True):
        assert torch.equal(a[:images], b[:images])  # the last row is written by all of the padding
    assert torch.equal(by_torch[0][target[:real]], scores[:real])
    assert torch.equal(by_torch[1][target[:real]], history[source[:real]] * 4 + 2)


def test_no_kernel_has_a_parameter_that_its_launcher_reserves() -> None:
    reserved = {"options", "grid", "warmup", "num_warps", "num_stages", "num_ctas", "device", "stream"}
    names = {
        f"{module.__name__}.{name}": set(inspect.signature(kernel.fn).parameters)
        for module in (elementwise, rows, gather, dispatch, nms, ragged)
        for name, kernel in vars(module).items()
        if inspect.isfunction(getattr(kernel, "fn", None))
    }
    assert len(names) > 15
    assert {name: used & reserved for name, used in names.items() if used & reserved} == {}
