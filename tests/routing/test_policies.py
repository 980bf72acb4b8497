"""Policies: the route of every image, in any batch, and its cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsnet
from dsnet.calibration import collect, simulate
from dsnet.models import GateState
from dsnet.models.group_by_route import greedy
from dsnet.routing import CascadePolicy, CostTable, GatePolicy, Routed, Router
from dsnet.routing.policies import margin
from tests.support import assert_close, error_of, images, random_model
from tests.support.routers import spread

NAMES = ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_adds_up_to_every_route(name: str) -> None:
    model = random_model(name)
    for size in (None, 2 * model.input_spec.image_size):
        table = CostTable.of_model(model, size)
        for route in model.space:
            assert table.of(route.choices) == dsnet.madds(model, route, size)
    assert table.largest == dsnet.madds(model, model.space.largest, size)
    assert table.fits(model)
    assert not table.fits(random_model("ds_mbnet_cifar"))


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_zero_is_the_gates_own_decision(name: str) -> None:
    model, x = spread(name)
    policy = GatePolicy(costs=CostTable.of_model(model))
    plain = dsnet.run_gated(model, x, greedy)
    output = policy(model, x)
    assert torch.equal(output.logits, plain.logits)
    taken = [model.space.of_choices(choices).number for choices in plain.choices.tolist()]
    assert output.routes.tolist() == taken
    assert len(set(taken)) > 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [-3.0, 0.0, 2.0])
def test_a_gate_decides_independently_for_every_image(name: str, weight: float) -> None:
    """Against the definition: log-softmax less the weighted share of cost, image by image, gate by gate."""
    model, x = spread(name)
    table = CostTable.of_model(model)
    output = GatePolicy(costs=table, weight=weight)(model, x)
    for i in range(len(x)):
        choices: tuple[int, ...] = ()
        state = model.run_prefix(x[i : i + 1])
        for gate in range(len(model.gates)):
            values = torch.log_softmax(model.gate_scores(state)[0], 0)
            options = model.gate(gate).choices
            costs = [table.segment(gate, choices[-1] if choices else None, c) for c in options]
            best = max(
                range(len(options)), key=lambda j: (values[j].item() - weight * costs[j] / table.largest, -j)
            )
            choices = (*choices, options[best])
            if gate + 1 < len(model.gates):
                state = model.run_segment(state, choices)
        route = model.space.of_choices(choices)
        assert output.routes[i].item() == route.number
        assert_close(output.logits[i], model(x[i : i + 1], route)[0], 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_cascades_logits_are_those_of_its_routes(name: str) -> None:
    model, x = spread(name)
    space = model.space
    routes = (0, space[len(space) // 2].number, space.largest.number)
    sure = [margin(model(x, route)) for route in routes[:2]]
    middle = slice(len(x) // 2 - 1, len(x) // 2 + 1)  # between two images: no margin is the threshold
    thresholds = tuple(float(s.sort()[0][middle].mean()) for s in sure)
    policy = CascadePolicy(costs=CostTable.of_model(model), routes=routes, thresholds=thresholds)
    output = policy(model, x)
    assert len(set(output.routes.tolist())) == 3
    for i in range(len(x)):
        expected = 0
        while expected < 2 and margin(model(x[i : i + 1], routes[expected]))[0] < thresholds[expected]:
            expected += 1
        assert output.routes[i].item() == routes[expected]
        assert_close(output.logits[i], model(x[i : i + 1], routes[expected])[0], 1e-9)
        alone = policy(model, x[i : i + 1])
        assert alone.routes.item() == output.routes[i].item()


def test_a_cascade_copies_no_features_where_all_images_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = spread("ds_mbnet_tiny")
    policy = CascadePolicy(costs=CostTable.of_model(model), routes=(0, 1, 3), thresholds=(2.0, 2.0))

    def copy(state: GateState, index: torch.Tensor) -> GateState:
        raise AssertionError("features are copied")

    monkeypatch.setattr(GateState, "take", copy)
    output = policy(model, x)
    assert output.routes.tolist() == [3] * len(x)
    assert_close(output.logits, model(x, 3), 1e-9)


def test_a_cascades_cost_counts_shared_segments_once() -> None:
    model = random_model("ds_resnet_tiny")
    table = CostTable.of_model(model)
    first, second = model.space.of_choices((1, 0)), model.space.of_choices((1, 2))
    policy = CascadePolicy(costs=table, routes=(first.number, second.number), thresholds=(0.5,))
    shared = table.prefix + table.segment(0, None, 1)
    assert policy.cost(model.space, first.number) == shared + table.segment(1, 1, 0) == table.of((1, 0))
    both = shared + table.segment(1, 1, 0) + table.segment(1, 1, 2)
    assert policy.cost(model.space, second.number) == both
    assert policy.path(second.number) == policy.routes
    ran: list[tuple[int, ...]] = []
    counted = dsnet.create_model("ds_resnet_tiny", dtype=torch.float64)
    counted.requires_grad_(False).load_state_dict(model.state_dict())
    chain = counted.chain
    counted.chain = lambda choices: (ran.append(choices), chain(choices))[1]  # type: ignore[method-assign]
    CascadePolicy(costs=table, routes=policy.routes, thresholds=(2.0,))(counted, images(counted, 3))
    assert {choices for choices in ran if choices} == {(1,), (1, 0), (1, 2)}
    before = ran.count((1,))
    ran.clear()
    counted(images(counted, 3), first)
    assert ran.count((1,)) == before  # the shared segment ran as often as for one route


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1])
def test_small_batches(name: str, count: int) -> None:
    model, x = spread(name)
    table = CostTable.of_model(model)
    largest = model.space.largest.number
    for policy in (
        GatePolicy(costs=table),
        CascadePolicy(costs=table, routes=(0, largest), thresholds=(2.0,)),
    ):
        output = policy(model, x[:count])
        assert output.logits.shape == (count, 10)
        assert output.routes.shape == (count,)


@pytest.mark.parametrize("name", NAMES)
def test_a_simulation_equals_the_policy(name: str) -> None:
    model, x = spread(name)
    labels = torch.arange(len(x)) % 10
    table = CostTable.of_model(model)
    outputs = collect(model, [(x[:10], labels[:10]), (x[10:], labels[10:])])
    largest = model.space.largest.number
    for policy in (
        GatePolicy(costs=table),
        GatePolicy(costs=table, weight=1.5),
        GatePolicy(costs=table, weight=-1.5),
        CascadePolicy(costs=table, routes=(0, 1, largest), thresholds=(0.3, 0.2)),
    ):
        seen, output = simulate(policy, outputs), policy(model, x)
        assert [outputs.routes[c].number for c in seen.columns.tolist()] == output.routes.tolist()
        assert torch.equal(seen.correct, output.logits.argmax(1) == labels)
        assert seen.costs.tolist() == [policy.cost(model.space, r) for r in output.routes.tolist()]


@given(
    weights=st.tuples(st.floats(-20, 20), st.floats(-20, 20)),
    thresholds=st.tuples(st.floats(0, 1.1), st.floats(0, 1.1), st.floats(0, 1.1)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_cost_falls_with_the_weight_and_rises_with_thresholds(
    weights: tuple[float, float], thresholds: tuple[float, float, float], seed: int
) -> None:
    model = random_model("ds_mbnet_tiny")
    outputs = collect(model, [(images(model, 16, seed=seed), torch.zeros(16, dtype=torch.long))])
    table = CostTable.of_model(model)
    low, high = sorted(weights)
    cheap, dear = (simulate(GatePolicy(costs=table, weight=w), outputs) for w in (high, low))
    assert (cheap.costs <= dear.costs).all()
    first, second, third = thresholds
    for step in (0, 1):
        few = [first, second]
        more = list(few)
        more[step] = max(third, few[step])
        small, large = (
            simulate(CascadePolicy(costs=table, routes=(0, 1, 3), thresholds=tuple(t)), outputs)
            for t in (few, more)
        )
        assert (small.costs <= large.costs).all()


def test_invalid_policies_are_refused() -> None:
    model = random_model("ds_mbnet_tiny")
    table = CostTable.of_model(model)
    assert "smallest to the largest" in error_of(
        lambda: CascadePolicy(costs=table, routes=(3, 0), thresholds=(0.1,))
    )
    assert "needs 1 thresholds" in error_of(lambda: CascadePolicy(costs=table, routes=(0, 3), thresholds=()))
    assert "must be finite" in error_of(
        lambda: GatePolicy(costs=table, weight=float("nan"))(model, images(model, 1))
    )
    training = dsnet.create_model("ds_mbnet_tiny").train()
    policy = CascadePolicy(costs=table, routes=(0,), thresholds=())
    assert "eval mode" in error_of(lambda: policy(training, torch.zeros(1, 3, 16, 16)))
    router = Router(kind="gate", costs=CostTable.of_model(random_model("ds_mbnet_cifar")))
    assert "ds_mbnet_cifar" in error_of(lambda: Routed(model, router))
    alike = dsnet.create_model("ds_mbnet_plus_tiny")  # as many choices, another network
    assert "ds_mbnet_tiny" in error_of(lambda: Routed(alike, Router(kind="gate", costs=table)))
    assert "has no route 2" in error_of(
        lambda: CascadePolicy(costs=table, routes=(0, 3), thresholds=(0.1,)).path(2)
    )
    assert "as a tensor" in error_of(lambda: policy(model, [1, 2]))  # type: ignore[arg-type]
