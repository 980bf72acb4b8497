"""Programs at fixed places, as a GPU replays them, against the network: without a GPU they run one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch

import dsnet
from dsnet import runtime
from dsnet.core.cuda_graphs import StreamPool
from dsnet.models import Factory, Step
from dsnet.models.conv_blocks import ChannelAttention, ConvNormAct, ConvSpec, MaxPool
from dsnet.models.group_by_route import run_gated
from dsnet.models.options import ConvOptions
from dsnet.models.resnet import DS_RESNET_TINY, ResNet
from dsnet.routing import CostTable
from dsnet.routing.policies import OperatingPoint, run_gated_routes
from dsnet.routing.router import Router
from dsnet.runtime._compiler import default_buckets
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.executors._batching import BatchSplitter
from dsnet.runtime.executors.buffers import FeatureTable, GateBuffers
from dsnet.runtime.executors.grouped import GroupedExecutor
from dsnet.runtime.partition.segments import find_shared_segments, pack, segment_histories
from dsnet.runtime.plan import Plan
from tests.support import assert_close, error_of, randomise, spread_gates
from tests.support.networks import network, pictures

KINDS = [  # name, key of norms, whether parts stand in for others
    ("ds_mbnet_tiny", None, False),
    ("ds_vit_plus_tiny", None, False),
    ("ds_resnet_tiny", "stage", False),
    ("ds_resnet_tiny", "stage", True),
    ("ds_resnet_tiny", "prefix", True),
    ("three_gates", "prefix", False),
    ("three_gates", "prefix", True),
]
SIZES = (1, 3, 8)


class Counting(StreamPool):
    """Counts how often the host waited."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


@functools.cache
def made(
    name: str, bn_key: str | None, shared_segments: bool, only: tuple[int, ...] | None = None
) -> tuple[Any, GroupedExecutor]:
    model = network(name, torch.float64, bn_key)
    options = [gate.choices if only is None else only for gate in map(model.gate, range(len(model.gates)))]
    return model, recorded(model, options, shared_segments)


def recorded(
    model: dsnet.Supernet, options: list[tuple[int, ...]], shared_segments: bool, backend: str = "eager"
) -> GroupedExecutor:
    image = pictures(model, 1)
    parts = pack(
        model, options, shared_segments=find_shared_segments(model, options) if shared_segments else None
    )
    calls = {h: get_backend(backend).convert(p.module, image)(image) for h, p in parts.items()}
    choices = [model.gate(g).choices for g in range(len(model.gates))]
    return GroupedExecutor(
        calls,
        image=image,
        space=model.space,
        scored=choices,
        keyed={h for h, p in parts.items() if p.histories > 1},
        sizes=SIZES,
        streams=Counting(),
    )


def numbers(model: dsnet.Supernet, choices: torch.Tensor) -> torch.Tensor:
    return torch.tensor([model.space.of_choices(way).number for way in choices.tolist()])


@pytest.mark.parametrize(("name", "bn_key", "shared_segments"), KINDS)
def test_routes_and_order_are_those_of_the_network(
    name: str, bn_key: str | None, shared_segments: bool
) -> None:
    model, executor = made(name, bn_key, shared_segments)
    for count in (8, 1, 2, 7, 20):  # smaller ones find what larger ones left behind
        x = pictures(model, count, seed=count)
        expected, actual = run_gated(model, x), executor.run_gate(x)
        assert torch.equal(actual.routes, numbers(model, expected.choices))
        assert_close(actual.logits, expected.logits, 1e-10)
    assert len(set(actual.routes.tolist())) > 1


def test_choices_that_are_not_compiled_are_named() -> None:
    model, executor = made("ds_mbnet_tiny", None, False, (0, 3))
    x = pictures(model, 4)
    assert_close(executor.run_route(x, model.space.largest), model(x, 3), 1e-10)
    taken = torch.tensor([[1], [0], [3], [0]])
    assert "does not hold the choices [1]" in error_of(lambda: executor.run_assigned(x, taken))
    assert_close(executor.run_route(x, model.space.largest), model(x, 3), 1e-10)


def test_a_plan_with_a_grouped_executor() -> None:
    model, executor = made("ds_mbnet_tiny", None, False)
    plan = runtime.compile(model, backend="eager")
    compiled = dataclasses.replace(plan.network, graph_executor=executor)
    x, costs = pictures(model, 21), CostTable.of_model(model)
    own = Plan(compiled)
    assert torch.equal(own.run(x).routes, run_gated_routes(model, x).routes)
    assert_close(own(x, 2), model(x, 2), 1e-10)
    assert own(x[:0]).shape == (0, 10)
    assert own.network.num_programs == len(executor.programs)
    ends = [costs.of((choice,)) for choice in (0, 3)]
    for kind, first, last in (("gate", (4.0,), (-4.0,)), ("cascade", (-1.0,), (2.0,))):
        curve = tuple(
            OperatingPoint(
                cost=cost, accuracy=0.5, parameters=n, routes=(0, 3), route_counts=((0, 1), (3, 1))
            )
            for cost, n in zip(ends, (first, last), strict=True)
        )
        routed = Plan(compiled, Router(kind=kind, costs=costs, curve=curve), ends[0])
        for budget in ends:
            expected = dsnet.Routed(model, routed.router, budget).run(x)
            actual = routed.at(budget).run(x)
            assert torch.equal(actual.routes, expected.routes)
            assert_close(actual.logits, expected.logits, 1e-10)


def as_on_a_gpu(model: dsnet.Supernet, **options: Any) -> Plan:  # noqa: ANN401
    backend = get_backend("cudagraphs")
    with mock.patch.object(type(backend), "unavailable", return_value=None):
        return runtime.compile(model, backend="cudagraphs", batch_buckets=(1, 4), **options)


@pytest.mark.parametrize(
    ("name", "bn_key"),
    [("three_gates", "prefix"), ("three_gates", "stage"), ("ds_resnet_tiny", None), ("ds_mbnet_tiny", None)],
)
def test_segments_can_be_called_one_by_one(name: str, bn_key: str | None) -> None:
    """Sessions with a cap and cascades over several gates do so."""
    model = network(name, torch.float64, bn_key)
    plan = as_on_a_gpu(model)
    x = pictures(model, 6)
    expected, actual = run_gated_routes(model, x), run_gated_routes(plan.network, x)
    assert torch.equal(actual.routes, expected.routes)
    assert_close(actual.logits, expected.logits, 1e-10)
    assert_close(plan.run(x).logits, expected.logits, 1e-10)
    state = {(): plan.network.run_prefix(x)}
    for route in list(model.space)[:: max(1, len(model.space) // 8)]:
        assert plan.network.holds(route)
        assert_close(plan.network.run_from_states(state, route.choices), model(x, route), 1e-10)


@pytest.mark.parametrize("bn_key", ["stage", "prefix"])
def test_some_routes_of_several_gates(bn_key: str) -> None:
    """The widest compiled choice is then not the widest of the network."""
    model = network("three_gates", torch.float64, bn_key)
    ways = [(0, 2, 1), (2, 0, 3), (2, 2, 3)]
    numbers = [model.space.of_choices(way).number for way in ways]
    plan, x = as_on_a_gpu(model, routes=numbers), pictures(model, 6)
    executor = plan.network.executor
    assert isinstance(executor, GroupedExecutor)
    assert {part for part in executor.segments if len(part) == 2} == {(2, 0), (2, 2)}
    actual = executor.run_assigned(x, torch.tensor(ways * 2))
    assert actual.routes.tolist() == numbers * 2
    for i, number in enumerate(numbers * 2):
        assert_close(actual.logits[i : i + 1], model(x[i : i + 1], number), 1e-10)
        assert_close(plan(x, number), model(x, number), 1e-10)
    assert "does not hold the choices" in error_of(
        lambda: executor.run_assigned(x, torch.tensor([(0, 2, 0)] * 6))
    )


# --- parts that stand in for others ---------------------------------------------------------------------
def test_one_shared_segment_per_choice() -> None:
    for bn_key, histories in (("stage", [1, 1, 1, 1, 1]), ("prefix", [1, 1, 4, 16, 64])):
        model = dsnet.create_model("ds_resnet_cifar", device="meta", bn_key=bn_key)
        options = [model.gate(g).choices for g in range(4)]
        actual = segment_histories(model, options, find_shared_segments(model, options))
        assert len(actual) == 1 + 4 + 3 * 4
        assert set(actual) == {(), *((c,) for c in range(4))} | {
            (*(0,) * before, 3, c) for before in range(3) for c in range(4)
        }
        assert [max(len(own) for h, own in actual.items() if len(h) == n) for n in range(5)] == histories


@pytest.mark.parametrize("bn_key", ["stage", "prefix"])
def test_shared_segments_take_less_memory(bn_key: str) -> None:
    model = network("three_gates", torch.float64, bn_key)
    plan, pairs = as_on_a_gpu(model), runtime.compile(model, backend="eager", batch_buckets=(1,))
    executor = plan.network.executor
    assert isinstance(executor, GroupedExecutor)
    assert len(executor.segments) == 1 + 4 + 2 * 4
    assert set(plan.network.segments) == set(pairs.network.segments)
    assert plan.network.resident < 0.6 * pairs.network.resident
    assert [gate.num_pairs for gate in executor.gates] == [4, 4, 4]
    assert [len({id(table.rows) for table in tables.values()}) for tables in executor.tables] == [1, 1, 1]


def test_larger_batches_with_shared_segments() -> None:
    backend, device = get_backend("cudagraphs"), torch.device("cuda")
    assert max(default_buckets(backend, device, pairs=False)) == 1024
    assert max(default_buckets(backend, device, pairs=True)) == 256


class Changed(ResNet):
    """A network with a layer in front of the second segment or behind the first."""

    def segment_steps(self, choices: tuple[int, ...]) -> list[Step]:
        steps = super().segment_steps(choices)
        in_front, behind = getattr(self, "in_front", None), getattr(self, "behind", None)
        if in_front is not None and len(choices) == 2:
            return [Step(in_front, steps[0].size), *steps]
        if behind is not None and choices == (1,):
            return [*steps, Step(behind, steps[0].size)]
        return steps


@functools.cache
def changed(kind: str, bn_key: str) -> tuple[dsnet.Supernet, GroupedExecutor]:
    factory = Factory(device=None, dtype=torch.float64)
    options = ConvOptions(num_classes=10, bn_key="stage" if bn_key == "stage" else "prefix")
    model = Changed("ds_resnet_tiny", DS_RESNET_TINY, options, factory)
    if kind == "attention":  # of as many channels as came in
        model.in_front = ChannelAttention(64, factory)
    elif kind == "depthwise":  # zeros do not stay zeros
        spec = ConvSpec(activation="relu", factory=factory)
        model.in_front = ConvNormAct(64, 64, spec, kernel=3, groups=64, filters="input")
    else:  # maps of other sizes
        model.behind = MaxPool()
    model.eval().seal()
    randomise(model)
    model.requires_grad_(False)
    spread_gates(model, pictures(model, 64))
    return model, recorded(model, [model.gate(g).choices for g in range(2)], shared_segments=True)


@pytest.mark.parametrize("bn_key", ["stage", "prefix"])
@pytest.mark.parametrize("kind", ["attention", "depthwise", "sizes"])
def test_pairs_where_segments_cannot_be_shared(kind: str, bn_key: str) -> None:
    model, executor = changed(kind, bn_key)
    assert len(executor.segments) == 1 + 4 + 16
    assert [gate.num_pairs for gate in executor.gates] == [4, 16]
    for count in (8, 3, 20):
        x = pictures(model, count, seed=count)
        expected, actual = run_gated(model, x), executor.run_gate(x)
        assert torch.equal(actual.routes, numbers(model, expected.choices))
        assert_close(actual.logits, expected.logits, 1e-10)
    for route in list(model.space)[::5]:
        assert_close(executor.run_route(x, route), model(x, route), 1e-10)


def test_an_identity_shortcut_prevents_sharing() -> None:
    model = dsnet.create_model("ds_resnet_tiny")
    options = [model.gate(g).choices for g in range(2)]
    assert find_shared_segments(model, options)
    model.stages[1][0].shortcut = None
    assert not find_shared_segments(model, options)


def test_missing_channels_are_zeros() -> None:
    table = FeatureTable.allocate(torch.ones(1, 6, 3, 2), 4)
    table.rows.fill_(7)
    x = torch.randn(2, 4, 3, 2)
    table.scatter(torch.tensor([3, 1]), x)
    actual = table.gather(torch.tensor([1, 3, 0]))
    assert torch.equal(actual[:2, :4], x.flip(0))
    assert not actual[:2, 4:].any()
    assert bool((actual[2] == 7).all())


def test_counts_are_sent_without_waiting() -> None:
    """A blocking copy would stop the host until the GPU has run all that was queued before."""
    counts = torch.zeros(2, dtype=torch.long)
    gate = GateBuffers([0, 1], [0, 1], 1, torch.zeros(3, dtype=torch.long), torch.zeros(3, 2), counts)
    gate.host_counts = sent = mock.Mock()
    gate.select(torch.tensor([True, False, True]))
    gate.sort_images(3, torch.tensor([3]), None, paired=False)
    assert sent.copy_.mock_calls == [mock.call(gate.counts, non_blocking=True)] * 2


@pytest.mark.parametrize(("name", "bn_key", "shared_segments"), KINDS)
def test_fused_segments(name: str, bn_key: str | None, shared_segments: bool) -> None:
    model, plain = made(name, bn_key, shared_segments)
    options = [model.gate(g).choices for g in range(len(model.gates))]
    executor = recorded(model, options, shared_segments, "cudagraphs")
    if name == "ds_resnet_tiny":  # features are as wide as their routes', and read where they lie
        assert [executor._reads_rows(number) for number in range(len(options))] == [True, True]
        assert all((table.widths is not None) is shared_segments for table in executor.tables[1].values())
    x = pictures(model, 8)
    actual, expected = executor.run_gate(x), plain.run_gate(x)
    assert torch.equal(actual.routes, expected.routes)
    assert_close(actual.logits, expected.logits, 1e-9)
    for number in (model.space.smallest.number, model.space.largest.number):
        route = model.space.resolve(number)
        assert_close(executor.run_route(x, route), plain.run_route(x, route), 1e-9)


@pytest.mark.parametrize("concurrency", [1, 2, 3, 4])
def test_as_many_segments_run_at_once_as_was_fastest(
    concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, executor = made("ds_mbnet_tiny", None, False)
    streams: list[int] = []
    used = executor.streams.use
    monkeypatch.setattr(executor.streams, "use", lambda stream: streams.append(stream) or used(stream))
    monkeypatch.setattr(executor, "concurrency", dict(executor.concurrency))
    times = itertools.cycle([1.0 if count == concurrency else 2.0 for count in (1, 2, 3, 4)])
    monkeypatch.setattr(
        "dsnet.runtime.executors.grouped.timed", lambda call, device: (call(), next(times))[1]
    )
    executor.concurrency[8] = executor._best_concurrency(8)
    assert executor.concurrency[8] == concurrency
    streams.clear()
    milliseconds = {(0,): 1.0, (1,): 1.5, (2,): 3.0, (3,): 4.0}
    splitters = {part: BatchSplitter({8: took}) for part, took in milliseconds.items()}
    monkeypatch.setattr(executor, "splitters", executor.splitters | splitters)
    actual = executor.run_assigned(pictures(model, 8), torch.tensor([[0], [1], [2], [3]] * 2))
    assert actual.routes.tolist() == [0, 1, 2, 3] * 2
    # The longest first, each where it begins first.
    assert streams == {1: [0] * 4, 2: [1, 2, 2, 1], 3: [1, 2, 3, 3], 4: [1, 2, 3, 4]}[concurrency]


def test_segments_that_share_memory_never_run_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    model, executor = made("ds_resnet_tiny", "stage", False)  # a part for every pair of choices
    monkeypatch.setattr(executor, "concurrency", dict.fromkeys(executor.sizes, 2))
    started: dict[tuple[int, int], set[int]] = {}  # streams, by gate and memory
    current = [0]

    def use(number: int) -> contextlib.AbstractContextManager[None]:
        current[0] = number
        return contextlib.nullcontext()

    monkeypatch.setattr(executor.streams, "use", use)
    run = executor._launch

    def note(part: tuple[int, ...], count: int) -> None:
        started.setdefault((len(part), executor._stream_of(part)), set()).add(current[0])
        run(part, count)

    monkeypatch.setattr(executor, "_launch", note)
    choices = [gate.choices for gate in map(model.gate, range(len(model.gates)))]
    taken = torch.tensor(list(itertools.product(*choices)))[:8]
    executor.run_assigned(pictures(model, len(taken)), taken)
    assert {len(streams) for streams in started.values()} == {1}
    assert set().union(*started.values()) == {1, 2}


def test_refused_choices_leave_no_state_behind() -> None:
    model, executor = made("ds_mbnet_tiny", None, False, (0, 2))
    x = pictures(model, 3)
    wrong = torch.tensor([[0], [1], [2]])
    for _ in range(2):
        assert "hold the choices [1]" in error_of(lambda: executor.run_assigned(x, wrong))
    given = torch.tensor([[0], [2], [2]])
    assert executor.run_assigned(x, given).routes.tolist() == [0, 2, 2]
    given[0] = 2  # the same tensor with other choices
    assert executor.run_assigned(x, given).routes.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("name", "bn_key", "shared"), KINDS)
def test_the_calls_of_a_profile_run_their_paths(name: str, bn_key: str | None, shared: bool) -> None:
    model, executor = made(name, bn_key, shared)
    x = pictures(model, 5)
    calls, cumulative, *_ = executor.segment_calls(x)
    assert cumulative
    for route in model.space:
        if route.choices in calls:
            executor.logits.zero_()
            calls[route.choices]()
            assert_close(executor.logits[:5], model(x, route), 1e-10)
    depths = {len(path) for path in calls}
    assert depths == set(range(len(model.gates) + 1))
    executor.logits.zero_()
    calls[()]()
    assert not executor.logits.any()
    _, scores = executor.segments[()](x)
    assert_close(executor.gates[0].scores[:5], scores, 1e-10)
