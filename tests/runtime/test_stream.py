"""Streams: every image answered once, in order, by the route it would take alone, and none waits too long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsnet.routing import CostTable
from dsnet.routing.router import Point, Router
from dsnet.runtime import Plan
from dsnet.runtime import compile as compile_plan
from dsnet.runtime.stream import Answer
from tests.runtime.conftest import network, pictures, plan_of
from tests.support import assert_close, error_of

NAME = "ds_mbnet_tiny"


@given(
    sizes=st.lists(st.integers(0, 7), max_size=8),
    group=st.integers(1, 9),
    delay=st.integers(0, 4),
    spoilt=st.sets(st.integers(0, 7), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_answers_are_those_of_the_batches_in_order(
    sizes: list[int], group: int, delay: int, spoilt: set[int]
) -> None:
    plan = plan_of(NAME, "eager")
    x = pictures(network(NAME), max(1, sum(sizes)))
    batches: list[Tensor | None] = list(torch.split(x[: sum(sizes)], sizes))
    expected: list[tuple[int, Tensor] | None] = []
    for number, batch in enumerate(list(batches)):
        assert batch is not None
        if number in spoilt:
            batches[number] = None
            expected.append(None)
        else:
            output = plan.run(batch)
            expected += list(zip(output.routes.tolist(), output.logits, strict=True))
    answers = list(plan.stream(iter(batches), group=group, delay=delay))
    assert [answer.place for answer in answers] == list(range(len(expected)))
    for answer, wanted in zip(answers, expected, strict=True):
        if wanted is None:
            assert answer.logits is None
            assert answer.error == "the image could not be read"
        else:
            assert answer.error is None
            assert answer.route == wanted[0]
            assert answer.logits is not None
            assert torch.allclose(answer.logits, wanted[1], atol=1e-5)


def test_nobody_waits_for_more_than_the_delay() -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 40)
    given_out = 0

    def batches() -> Iterator[Tensor]:
        nonlocal given_out
        for i in range(40):
            given_out = i + 1
            yield x[i : i + 1]

    for answer in plan.stream(batches(), group=1000, delay=3):
        assert given_out - 1 - answer.place <= 3 or given_out == 40


def test_a_batch_that_does_not_fit_is_answered_by_its_error() -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 4)
    answers = list(plan.stream([x[:2], torch.zeros(3, 3, 8, 8), x[2:]]))
    assert [answer.error is None for answer in answers] == [True, True, False, False, False, True, True]
    assert "16 × 16" in str(answers[2].error)
    found = torch.stack([a.logits for a in answers if a.logits is not None])
    assert_close(found, plan(x), 1e-5)


def test_streams_keep_the_budget_and_say_what_they_are_not_for() -> None:
    model = network(NAME)
    costs = CostTable.of_model(model)
    gate = Router(
        kind="gate",
        costs=costs,
        curve=(
            Point(cost=costs.of((0,)), accuracy=0.5, numbers=(1e6,)),
            Point(cost=9e9, accuracy=1, numbers=(0,)),
        ),
    )
    plan = Plan(plan_of(NAME, "eager").engine, gate, costs.of((0,)))
    x = pictures(model, 5)
    assert [answer.route for answer in plan.stream([x])] == [0] * 5
    cascade = Router(
        kind="cascade",
        costs=costs,
        curve=(Point(cost=1e5, accuracy=0.5, numbers=(0.5,), routes=(0, 3)),),
    )
    assert "batch by batch" in error_of(lambda: Plan(plan.engine, cascade, 1e5).stream([x]))
    assert "several gates" in error_of(lambda: list(plan_of("ds_resnet_tiny", "eager").stream([x])))
    assert "at least 1" in error_of(lambda: plan.stream([x], group=0))
    assert "integer" in error_of(lambda: plan.stream([x], delay=float("nan")))


def test_what_came_before_an_error_of_the_source_is_answered() -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 3)

    def source() -> Iterator[Tensor]:
        yield x
        raise OSError("the disk is gone")

    answers: list[Answer] = []
    with pytest.raises(OSError, match="the disk is gone"):
        answers.extend(plan.stream(source()))
    assert [answer.place for answer in answers] == [0, 1, 2]


def test_routes_that_a_plan_does_not_hold_are_errors_of_their_images() -> None:
    model = network(NAME)
    plan, x = compile_plan(model, backend="eager", routes=[0, 3]), pictures(model, 40)
    taken = model.route(x)[:, 0]
    answers = list(plan.stream(torch.split(x, 5), delay=1))
    assert [answer.error is None for answer in answers] == [t in (0, 3) for t in taken.tolist()]
    assert any(answer.error for answer in answers)


@pytest.mark.parametrize("backend", ["openvino"])
def test_other_backends_stream_alike(backend: str) -> None:
    plan, x = plan_of(NAME, backend), pictures(network(NAME), 30)
    answers = list(plan.stream(torch.split(x, 3), group=8, delay=2))
    found = torch.stack([answer.logits for answer in answers if answer.logits is not None])
    assert_close(found, plan(x), 1e-4)
