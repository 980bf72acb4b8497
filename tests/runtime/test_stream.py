"""Streams: every image answered once, in order, by the route it would take alone, and none waits too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsnet.routing import CostTable
from dsnet.routing.policies import OperatingPoint, RoutedOutput, margin
from dsnet.routing.router import Router
from dsnet.runtime import Plan
from dsnet.runtime import compile as compile_plan
from dsnet.runtime.stream import StreamResult, stream
from tests.support import assert_close, error_of
from tests.support.networks import network, pictures, plan_of

NAME = "ds_mbnet_tiny"


@given(
    sizes=st.lists(st.integers(0, 7), max_size=8),
    together=st.integers(1, 9),
    ahead=st.booleans(),
    delay=st.integers(0, 4),
    spoilt=st.sets(st.integers(0, 7), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_results_are_those_of_the_batches_in_order(
    sizes: list[int], together: int, ahead: bool, delay: int, spoilt: set[int]
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
    check = plan.network.check_images
    answers = list(stream(plan.run, check, iter(batches), images=together, delay=delay, ahead=ahead))
    assert [answer.index for answer in answers] == list(range(len(expected)))
    for answer, wanted in zip(answers, expected, strict=True):
        if wanted is None:
            assert answer.logits is None
            assert answer.error == "the image could not be read"
        else:
            assert answer.error is None
            assert answer.route == wanted[0]
            assert answer.logits is not None
            assert torch.allclose(answer.logits, wanted[1], atol=1e-5)


@pytest.mark.parametrize("delay", [0, 1, 3, 6])
@pytest.mark.parametrize("ahead", [False, True])
def test_no_image_waits_for_more_batches_than_the_delay(delay: int, ahead: bool) -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 40)
    given_out = 0

    def batches() -> Iterator[Tensor]:
        nonlocal given_out
        for i in range(40):
            given_out = i + 1
            yield x[i : i + 1]

    check, waited = plan.network.check_images, []
    for answer in stream(plan.run, check, batches(), images=1000, delay=delay, ahead=ahead):
        waited.append(given_out - 1 - answer.index)
    assert max(waited) <= delay
    assert len(waited) == 40


def test_a_batch_of_another_shape_gives_errors() -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 4)
    answers = list(plan.stream([x[:2], torch.zeros(3, 3, 8, 8), x[2:]]))
    assert [answer.error is None for answer in answers] == [True, True, False, False, False, True, True]
    assert "16 × 16" in str(answers[2].error)
    actual = torch.stack([a.logits for a in answers if a.logits is not None])
    assert_close(actual, plan(x), 1e-5)


@pytest.mark.parametrize("together", [1, 64])
def test_images_that_cannot_be_concatenated_do_not_affect_the_others(together: int) -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 4)
    answers = list(plan.stream([x[:2], x[:2].to_sparse(), x[2:]], images=together))
    assert [answer.error is None for answer in answers] == [True, True, False, False, True, True]
    assert "sparse" in str(answers[2].error)
    strange = x[:1].to_mkldnn()  # of which a check may know nothing
    kept = list(stream(plan.run, lambda x: None, [x[:1], strange, x[1:2]], images=together, delay=2))
    assert [kept[i].error is None for i in (0, 2)] == [True, True]


def test_streams_keep_the_budget() -> None:
    model = network(NAME)
    costs = CostTable.of_model(model)
    gate = Router(
        kind="gate",
        costs=costs,
        curve=(
            OperatingPoint(cost=costs.of((0,)), accuracy=0.5, parameters=(1e6,)),
            OperatingPoint(cost=9e9, accuracy=1, parameters=(0,)),
        ),
    )
    plan = Plan(plan_of(NAME, "eager").network, gate, costs.of((0,)))
    x = pictures(model, 5)
    assert [answer.route for answer in plan.stream([x])] == [0] * 5
    assert "at least 1" in error_of(lambda: plan.stream([x], images=0))
    assert "integer" in error_of(lambda: plan.stream([x], delay=float("nan")))


def test_cascades_and_several_gates_stream_too() -> None:
    model = network(NAME)
    costs, x = CostTable.of_model(model), pictures(model, 23)
    threshold = float(margin(model(x, 0)).median())
    point = OperatingPoint(cost=1e5, accuracy=0.5, parameters=(threshold,), routes=(0, 3))
    cascade = Plan(plan_of(NAME, "eager").network, Router(kind="cascade", costs=costs, curve=(point,)), 1e5)
    several = plan_of("three_gates", "eager")
    for plan, images in ((cascade, x), (several, pictures(network("three_gates"), 23))):
        expected = plan.run(images)
        answers = list(plan.stream(torch.split(images, 4), images=10))
        assert [answer.route for answer in answers] == expected.routes.tolist()
        actual = torch.stack([answer.logits for answer in answers if answer.logits is not None])
        assert_close(actual, expected.logits, 1e-5)
        assert len(set(expected.routes.tolist())) > 1


def test_batches_are_joined_and_progress_is_reported() -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 40)
    seen: list[int] = []
    result: list[tuple[int, str]] = []

    def run(images: Tensor) -> RoutedOutput:
        seen.append(len(images))
        return plan.run(images)

    list(stream(run, plan.network.check_images, torch.split(x, 4), images=16, delay=8))
    assert seen == [16, 16, 8]

    def progress(items: Iterable[Any], total: int, label: str) -> Iterable[Any]:
        result.append((total, label))
        return items

    assert len(list(plan.stream(torch.split(x, 4), progress=progress))) == 40
    assert result == [(10, "batch")]


def test_images_before_an_error_of_the_source_have_results() -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 3)

    def source() -> Iterator[Tensor]:
        yield x
        raise OSError("the disk is gone")

    answers: list[StreamResult] = []
    with pytest.raises(OSError, match="the disk is gone"):
        answers.extend(plan.stream(source()))
    assert [answer.index for answer in answers] == [0, 1, 2]


def threads() -> list[threading.Thread]:
    """Return the threads that read sources."""
    return [thread for thread in threading.enumerate() if thread.name == "dsnet stream"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("first", [1, 5])
def test_no_image_waits_longer_than_the_limit_while_the_source_blocks(first: int, ahead: bool) -> None:
    """The source blocks until the images so far have results."""
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 6)
    answered = threading.Event()

    def source() -> Iterator[Tensor]:
        for i in range(first):
            yield x[i : i + 1]
        assert answered.wait(60)
        yield x[5:]

    places = []
    check = plan.network.check_images
    answers = stream(plan.run, check, source(), images=4, delay=100, max_delay_ms=30, ahead=ahead)
    for answer in answers:
        places.append(answer.index)
        if answer.index == first - 1:
            answered.set()
    assert places == list(range(first + 1))
    assert not threads()
    for wrong in (-1, True, "1", float("nan")):
        error = error_of(lambda wrong=wrong: plan.stream([x], max_delay_ms=wrong))
        assert "max_delay_ms must be" in error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("ahead", [False, True])
def test_waiting_images_have_results_before_an_exception(error: type[BaseException], ahead: bool) -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 3)

    def source() -> Iterator[Tensor]:
        yield from x.split(1)
        raise error("the source ended")

    answers: list[StreamResult] = []
    with pytest.raises(error, match="the source ended"):
        answers.extend(stream(plan.run, plan.network.check_images, source(), images=64, delay=8, ahead=ahead))
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert not threads()


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_waiting_images_have_results_when_the_program_is_interrupted(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 3)
    ended, interrupts = threading.Event(), [KeyboardInterrupt("^C")]

    def source() -> Iterator[Tensor]:
        yield from x.split(1)
        if when == "waiting":
            ended.wait(60)

    wait = threading.Condition.wait

    def interrupted(self: threading.Condition, timeout: float | None = None) -> bool:
        if when == "waiting" and threading.current_thread() is threading.main_thread() and timeout:
            wait(self, 0.2)  # for the source to give what it has
            if interrupts:
                raise interrupts.pop()
        return wait(self, timeout)

    def run(images: Tensor) -> RoutedOutput:
        if when == "running" and interrupts:
            raise interrupts.pop()
        return plan.run(images)

    monkeypatch.setattr(threading.Condition, "wait", interrupted)
    answers: list[StreamResult] = []

    def noted() -> Iterator[StreamResult]:
        check = plan.network.check_images
        for answer in stream(run, check, source(), images=64, delay=8, max_delay_ms=60e3):
            ended.set()
            yield answer

    with pytest.raises(KeyboardInterrupt):
        answers.extend(noted())
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert all(answer.error is None for answer in answers)


def test_a_closed_stream_ends_its_thread_and_reads_no_further() -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 40)
    read: list[int] = []
    closed_by: list[str] = []

    def source() -> Iterator[Tensor]:
        assert not torch.is_grad_enabled()  # as where the stream is asked
        try:
            for i in range(40):
                read.append(i)
                yield x[i : i + 1]
        finally:
            closed_by.append(threading.current_thread().name)

    with torch.no_grad():
        answers = plan.stream(source(), images=4)
        assert not threads(), "nothing runs before the first answer is asked for"
        assert next(answers).index == 0
        assert len(threads()) == 1
        answers.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()
    assert len(read) == 4
    assert closed_by == ["dsnet stream"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_errors_of_their_images(bad: float) -> None:
    plan, x = plan_of(NAME, "eager"), pictures(network(NAME), 6).clone()
    x[2, 0, 3, 3] = x[5, 1, 0, 0] = bad
    expected = plan(x)
    assert expected.isfinite().all(1).tolist() == [True, True, False, True, True, False]
    answers = list(plan.stream(x.split(2)))
    assert [answer.index for answer in answers] == list(range(6))
    for answer, logits in zip(answers, expected, strict=True):
        assert answer.route is not None
        assert 0 <= answer.route < 4
        if logits.isfinite().all():
            assert answer.error is None
            assert answer.logits is not None
            assert torch.allclose(answer.logits, logits, atol=1e-5)
        else:
            assert answer.logits is None
            assert "not finite" in str(answer.error)


def test_routes_that_a_plan_does_not_hold_are_errors_of_their_images() -> None:
    model = network(NAME)
    plan, x = compile_plan(model, backend="eager", routes=[0, 3]), pictures(model, 40)
    taken = model.route(x)[:, 0]
    answers = list(plan.stream(torch.split(x, 5), delay=1))
    assert [answer.error is None for answer in answers] == [t in (0, 3) for t in taken.tolist()]
    assert any(answer.error for answer in answers)


@pytest.mark.parametrize("backend", ["openvino"])
def test_streams_on_another_backend(backend: str) -> None:
    plan, x = plan_of(NAME, backend), pictures(network(NAME), 30)
    answers = list(plan.stream(torch.split(x, 3), images=8, delay=2))
    actual = torch.stack([answer.logits for answer in answers if answer.logits is not None])
    assert_close(actual, plan(x), 1e-4)
