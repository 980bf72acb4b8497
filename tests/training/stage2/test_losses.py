"""The losses of gates against values by hand, plain formulas and finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dsnet
from dsnet.routing import CostTable
from dsnet.training.stage1.joint import gumbel_one_hot
from dsnet.training.stage2 import _gate_signals as signals
from dsnet.training.stage2.losses import (
    complexity_penalty,
    even_weights,
    expected_costs,
    mixed_loss,
    sgs_loss,
    sgs_targets,
)
from tests.support import assert_close, error_of, images, random_model


def test_sgs_targets_by_hand() -> None:
    easy = torch.tensor([True, True, False, False])
    solved = torch.tensor([True, False, True, False])
    assert sgs_targets(easy, solved, 4).tolist() == [0, 0, 3, 3]
    assert sgs_targets(easy, solved, 4, "give_up").tolist() == [0, 0, 3, 0]
    assert "try_best, give_up" in error_of(lambda: sgs_targets(easy, solved, 4, "best"))  # type: ignore[arg-type]


def test_sgs_loss_by_hand() -> None:
    scores = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    other = torch.zeros(2, 2)
    targets = torch.tensor([0, 1])
    # Softmax: [1/4, 3/4] and [1/2, 1/2]; the other gate says 1/2 of everything.
    one = (math.log(4) + math.log(2)) / 2
    assert sgs_loss([scores], [targets]).item() == pytest.approx(one)
    assert sgs_loss([scores, other], [targets, targets]).item() == pytest.approx((one + math.log(2)) / 2)
    weights = torch.tensor([0.5, 1.5])
    assert sgs_loss([scores], [targets], weights).item() == pytest.approx(
        (0.5 * math.log(4) + 1.5 * math.log(2)) / 2
    )


def test_even_weights_by_hand() -> None:
    assert even_weights(torch.tensor([0, 0, 0, 3])).tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2])
    assert even_weights(torch.tensor([1, 1])).tolist() == [1, 1]


def test_complexity_by_hand() -> None:
    table = CostTable(unit="madds", prefix=10.0, segments=(((1.0, 5.0),), ((2.0, 20.0), (4.0, 40.0))))
    draws = [torch.eye(2)[[0, 1, 1]], torch.eye(2)[[1, 0, 1]]]
    costs = expected_costs(draws, table, [(0, 1), (0, 1)])
    assert costs.tolist() == [31.0, 19.0, 55.0]
    assert complexity_penalty(costs, 55.0).item() == pytest.approx((31**2 + 19**2 + 55**2) / 3 / 55**2)
    narrow = expected_costs([torch.ones(1, 1), torch.ones(1, 1)], table, [(1,), (0,)])
    assert narrow.tolist() == [19.0]


def test_costs_of_draws_are_differentiable() -> None:
    table = CostTable(unit="madds", prefix=10.0, segments=(((1.0, 5.0),), ((2.0, 20.0), (4.0, 40.0))))
    draws = [torch.rand(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda a, b: expected_costs([a, b], table, [(0, 1), (0, 1)]), draws)


def test_the_mixed_loss_is_that_of_the_mixed_logits() -> None:
    """Value and gradient, against mixing the logits themselves."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 10, generator=generator, dtype=torch.float64)
    labels = torch.randint(10, (6,), generator=generator)
    scores = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    plain = gumbel_one_hot(scores, torch.Generator().manual_seed(5))
    expected = F.cross_entropy(torch.einsum("br,brc->bc", plain, logits), labels)
    (wanted,) = torch.autograd.grad(expected, scores)
    off = F.softmax(logits, 2) - F.one_hot(labels, 10)[:, None]
    pull = torch.einsum("bkc,brc->bkr", off, logits)
    losses = torch.stack([F.cross_entropy(logits[:, r], labels, reduction="none") for r in range(4)], 1)
    draw = gumbel_one_hot(scores, torch.Generator().manual_seed(5))
    value = mixed_loss(draw, losses, pull)
    assert value.item() == pytest.approx(expected.item())
    (got,) = torch.autograd.grad(value, scores)
    assert_close(got, wanted, 1e-9)


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_vit_plus_tiny"])
def test_signals_of_one_gate(name: str) -> None:
    model = random_model(name)
    x, labels = images(model, 8), torch.arange(8) % 10
    space = model.space
    found = signals.one_gate(model, x, labels, space)
    logits = torch.stack([model(x, route) for route in space], 1)
    assert_close(found.losses.double(), -logits.log_softmax(2)[torch.arange(8), :, labels], 1e-5)
    off = logits.softmax(2) - F.one_hot(labels, 10)[:, None]
    assert_close(found.pull.double(), torch.einsum("bkc,brc->bkr", off, logits), 1e-5)
    assert torch.equal(found.right, logits.argmax(2) == labels[:, None])
    assert torch.equal(found.encoding.hidden, model.run_prefix(x).encoding.hidden)
    halves = [found.take(torch.arange(3)), found.take(torch.arange(3, 8))]
    joined = signals.Signals.join(halves)
    assert torch.equal(joined.pull, found.pull)
    assert torch.equal(joined.encoding.pooled, found.encoding.pooled)


def test_signals_in_lower_precision_are_near() -> None:
    """Signals are computed from the logits in float32: products in bfloat16 would be off by percents."""
    model = random_model("ds_mbnet_tiny", torch.float32)
    x, labels = images(model, 32), torch.arange(32) % 10
    low = signals.one_gate(model, x, labels, model.space, torch.bfloat16)
    off = torch.stack([model.run_last_segment(model.run_prefix(x), r.choices) for r in model.space], 1)
    assert not torch.equal(low.losses, signals.one_gate(model, x, labels, model.space).losses)
    with torch.autocast("cpu", torch.bfloat16):
        state = model.run_prefix(x)
        logits = torch.stack([model.run_last_segment(state, r.choices) for r in model.space], 1).float()
    assert_close(logits, off, 0.1)
    wanted = torch.einsum("bkc,brc->bkr", logits.softmax(2) - F.one_hot(labels, 10)[:, None], logits)
    assert_close(low.pull, wanted, 1e-5)


# --- several gates -------------------------------------------------------------------------------------
def given_draws(monkeypatch: pytest.MonkeyPatch, draws: list[Tensor]) -> None:
    """Replace the draws of the gates."""
    left = iter(draws)
    monkeypatch.setattr("dsnet.training.stage2._gate_signals.gumbel_one_hot", lambda *_: next(left))


def one_by_one(
    model: dsnet.Supernet, x: Tensor, shares: list[Tensor], taken: list[tuple[int, ...]]
) -> Tensor:
    """The definition, image by image: a stage's candidates, padded to full width, summed by their share."""
    rows = []
    for i in range(len(x)):
        state = model.run_prefix(x[i : i + 1])
        for gate in range(len(model.gates)):
            total: Tensor | float = 0.0
            full = model.slice_table[gate][-1][-1].width
            for position, choice in enumerate(model.gate(gate).choices):
                choices = (*taken[i][:gate], choice)
                y = model.segment_output(state.x, choices)
                if gate + 1 < len(model.gates):
                    padded = y.new_zeros(1, full, *y.shape[2:])
                    padded[:, : y.shape[1]] = y
                    y = padded
                total = total + shares[gate][i, position] * y
            assert isinstance(total, Tensor)
            if gate + 1 < len(model.gates):
                state = model.apply_gate(gate + 1, total)
        rows.append(total)
    return torch.cat(rows)


@pytest.mark.parametrize("bn_key", ["prefix", "stage"])
def test_a_one_hot_mix_is_the_route_itself(bn_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of choices, in one batch."""
    model = random_model("ds_resnet_tiny", bn_key=bn_key)
    ways = list(itertools.product(*model.space.choices))
    x = images(model, len(ways))
    draws = [
        F.one_hot(torch.tensor([way[gate] for way in ways]), len(model.space.choices[gate])).double()
        for gate in range(len(model.gates))
    ]
    given_draws(monkeypatch, draws)
    walk = signals.several_gates(model, x, model.space, torch.Generator())
    for i, way in enumerate(ways):
        assert_close(walk.logits[i : i + 1], model(x[i : i + 1], model.space.of_choices(way)), 1e-9)
    assert_close(walk.ends[0], model(x, model.space.smallest), 1e-9)
    assert_close(walk.ends[1], model(x, model.space.largest), 1e-9)


@given(st.integers(1, 600).flatmap(lambda n: st.tuples(st.just(n), *[st.integers(0, n)] * 2)))
def test_windows_contain_their_group_and_have_sizes_in_eighths(drawn: tuple[int, int, int]) -> None:
    count, *ends = drawn
    start, stop = sorted(ends)
    first, end = signals._window((start, stop), count)
    assert 0 <= first <= start <= stop <= end <= count
    eighth = -(-count // 8)
    assert (end - first) % eighth == 0 or end - first == count
    assert end - first < stop - start + eighth


@pytest.mark.parametrize(
    "numbers",
    [
        [0, 3, 6, 9, 12, 15],
        [6] * 6,
        [0, 0, 0, 15, 15, 15],
        [3, 3, 9, 15, 0, 6, 6, 6, 1, 14, 14, 2, 9, 9, 9, 7, 7],
    ],
)
@pytest.mark.parametrize("bn_key", ["prefix", "stage"])
def test_gradients_of_the_mix_are_those_of_its_definition(
    numbers: list[int], bn_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all images draw the same choice, and none another."""
    model = random_model("ds_resnet_tiny", bn_key=bn_key)
    x, labels = images(model, len(numbers)), torch.arange(len(numbers)) % 10
    ways = [model.space[n].choices for n in numbers]

    def fresh() -> list[Tensor]:
        return [
            F.one_hot(torch.tensor([way[gate] for way in ways]), len(model.space.choices[gate]))
            .double()
            .requires_grad_()
            for gate in range(len(model.gates))
        ]

    draws = fresh()
    given_draws(monkeypatch, draws)
    F.cross_entropy(signals.several_gates(model, x, model.space, torch.Generator()).logits, labels).backward()
    wanted = fresh()
    F.cross_entropy(one_by_one(model, x, wanted, ways), labels).backward()
    for got, expected in zip(draws, wanted, strict=True):
        assert got.grad is not None
        assert expected.grad is not None
        assert_close(got.grad, expected.grad, 1e-9)
    # And by finite differences, where nothing is differentiated by anyone.
    with torch.no_grad():
        for gate, image, position in [(0, 0, 1), (0, 3, 0), (1, 5, 0), (1, 2, 2)]:
            ends = []
            for step in (-1e-5, 1e-5):
                moved = [draw.detach().clone() for draw in fresh()]
                moved[gate][image, position] += step
                ends.append(F.cross_entropy(one_by_one(model, x, moved, ways), labels).item())
            slope = (ends[1] - ends[0]) / 2e-5
            assert draws[gate].grad[image, position].item() == pytest.approx(slope, rel=1e-4, abs=1e-8)
