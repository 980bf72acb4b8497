"""Sessions: counts, drift and caps."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsnet.routing import CascadePolicy, CostTable, OperatingPoint, Routed, Router
from dsnet.routing.budget import best_within, cheaper_switches
from dsnet.routing.policies import margin
from dsnet.routing.session import Drift, Session
from tests.support import error_of
from tests.support.routers import ONE, SEVERAL, cascade, gate, spread


@given(
    scores=st.lists(st.lists(st.integers(-6, 6), min_size=3, max_size=3), min_size=1, max_size=8),
    steps=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    share=st.floats(0, 1.1),
)
@settings(max_examples=200, deadline=None)
def test_the_best_choices_within_an_allowance(
    scores: list[list[int]], steps: tuple[int, int], share: float
) -> None:
    table = torch.tensor(scores, dtype=torch.float64)
    costs = torch.tensor([1.0, 1.0 + steps[0], 1.0 + sum(steps)], dtype=torch.float64)
    least, most = float(costs[0]) * len(table), float(costs[-1]) * len(table)
    allowance = least + share * (most - least)
    taken = best_within(table, costs, allowance)
    assert float(costs[taken].sum()) <= allowance + 1e-9
    # Some price makes every one of these choices best, but for ties at that price.
    prices = [0.0, *cheaper_switches(table, costs, table.argmax(1)).weight.tolist()]

    def all_best(price: float) -> bool:
        values = table - price * costs
        return bool((values.gather(1, taken[:, None])[:, 0] >= values.max(1)[0] - 1e-9).all())

    assert any(all_best(price) for price in prices)


@pytest.mark.parametrize("allowance", range(6, 13))
def test_an_allowance_is_used_to_the_end(allowance: int) -> None:
    """Two choices, of cost 1 and 2, so that the best six choices are found by trying all."""
    scores = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores[:, 1] = scores[:, 0] + scores[:, 1].abs()  # all would rather take the larger one
    every = [c for c in itertools.product((0, 1), repeat=6) if sum(c) + 6 <= allowance]
    best = max(every, key=lambda c: sum(scores[i, choice].item() for i, choice in enumerate(c)))
    assert best_within(scores, torch.tensor([1.0, 2.0]), float(allowance)).tolist() == list(best)


def test_switches_follow_the_upper_envelope() -> None:
    """Against the argmax itself, on a fine grid of prices."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(30, 5, generator=draw, dtype=torch.float64)
    costs = torch.tensor([1.0, 2.0, 3.5, 4.0, 7.0], dtype=torch.float64)
    start = torch.full((30,), 4)
    moves = cheaper_switches(scores, costs, start)
    for price in torch.linspace(-5, 5, 101, dtype=torch.float64).tolist():
        taken = start.clone()
        for at, image, after in zip(
            moves.weight.tolist(), moves.image.tolist(), moves.after.tolist(), strict=True
        ):
            if at < price:
                taken[image] = after
        if price > -3:  # below, images may still be where they started
            assert torch.equal(taken, (scores - price * costs).argmax(1)) or price < moves.weight.min()


@pytest.mark.parametrize("name", [ONE, SEVERAL])
@pytest.mark.parametrize("kind", ["gate", "cascade"])
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    window=st.integers(1, 40),
    share=st.floats(0, 1),
)
@settings(max_examples=12, deadline=None)
def test_a_cap_holds_after_every_batch(
    name: str, kind: str, sizes: list[int], window: int, share: float
) -> None:
    model, x, routed = gate(name, weight=-3.0) if kind == "gate" else cascade(name, 0.9)
    least = routed.policy.min_cost(model)
    cap = least + share * (routed.router.costs.largest - least)
    session = Session(routed, window=window, cap=cap)
    for size in sizes:
        output = session(x[:size])
        assert output.logits.shape == (size, 10)
        assert session.recent_cost <= cap * (1 + 1e-12)


@pytest.mark.parametrize("name", [ONE, SEVERAL])
@pytest.mark.parametrize("kind", ["gate", "cascade"])
def test_a_caps_logits_are_those_of_their_routes(name: str, kind: str) -> None:
    model, x, routed = gate(name, weight=-3.0) if kind == "gate" else cascade(name, 0.9)
    plain = Session(routed)(x)
    loose = Session(routed, cap=10 * routed.router.costs.largest)(x)
    assert torch.equal(loose.routes, plain.routes)
    assert torch.equal(loose.logits, plain.logits)
    mean = sum(map(routed.cost, plain.routes.tolist())) / len(x)
    least = routed.policy.min_cost(model)
    tight = Session(routed, cap=(mean + least) / 2)(x)
    assert not torch.equal(tight.routes, plain.routes)
    for i in range(len(x)):
        alone = model(x[i : i + 1], int(tight.routes[i]))
        assert torch.allclose(tight.logits[i : i + 1], alone, rtol=1e-9, atol=1e-9)


def test_the_least_confident_images_proceed_first() -> None:
    model, x, routed = cascade(ONE, 2.0)  # everyone would go on
    policy = routed.policy
    assert isinstance(policy, CascadePolicy)
    more = policy.cost(model.space, policy.routes[1]) - policy.cost(model.space, policy.routes[0])
    output = policy(model, x, len(x) * policy.min_cost(model) + 7.5 * more)
    sure = margin(model(x, policy.routes[0]))
    expected = set(sure.argsort()[:7].tolist())
    assert {i for i, route in enumerate(output.routes.tolist()) if route != policy.routes[0]} == expected


def test_counts_and_costs() -> None:
    _, x, routed = gate(ONE)
    session = Session(routed, window=10)
    routes = [*session(x[:15]).routes.tolist(), *session(x[15:18]).routes.tolist()]
    assert session.images == 18
    assert session.route_counts == {r: routes.count(r) for r in sorted(set(routes))}
    assert session.mean_cost == pytest.approx(sum(map(routed.cost, routes)) / 18)
    assert session.recent_cost == pytest.approx(sum(map(routed.cost, routes[-10:])) / 10)
    told = session.to_dict()
    assert told["images"] == 18
    assert sum(told["taken"].values()) == 18


def noted(session: Session, counts: dict[int, int]) -> Drift:
    for route, count in counts.items():
        session._recent.extend([(route, 1.0)] * count)
    found = session.drift()
    assert found is not None
    return found


def test_drift_is_distinguished_from_chance() -> None:
    stats = pytest.importorskip("scipy.stats")
    _, _, routed = gate(ONE)  # expects 60 and 40 of a hundred
    same = noted(Session(routed, window=500), {0: 290, 1: 210})
    assert not same.drifted
    assert "no drift" in str(same)
    other = noted(Session(routed, window=500), {0: 150, 1: 250, 3: 100})
    assert other.drifted
    assert other.distance == pytest.approx(0.3)
    assert "calibrate again" in str(other)
    table = [[150, 250, 100], [60, 40, 0]]
    assert other.chance == pytest.approx(stats.chi2_contingency(table, correction=False)[1])
    few = noted(Session(routed, window=500), {3: 50})
    assert not few.drifted
    none = Session(routed.at(None)) if routed.router.kind == "gate" else None
    assert none is not None
    assert none.drift() is None


def test_threads_share_a_session() -> None:
    _, x, routed = gate(ONE)
    session = Session(routed, window=50, cap=routed.router.costs.largest / 2)
    threads = [threading.Thread(target=lambda: [session(x[:8]) for _ in range(5)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.images == 80
    assert session.recent_cost <= session.cap


def test_two_threads_share_a_network_at_two_budgets() -> None:
    """Nothing is stored on the network: each thread gets what it would get alone."""
    model, x, _ = gate(ONE)
    costs = CostTable.of_model(model)
    curve = tuple(OperatingPoint(cost=c, accuracy=0.5, parameters=(w,)) for c, w in ((1e4, 9.0), (3e5, -9.0)))
    routed = Routed(model, Router(kind="gate", costs=costs, curve=curve), 1e4)
    both = [routed, routed.at(3e5)]
    alone = [one(x) for one in both]
    assert not torch.equal(*alone)
    found: list[list[torch.Tensor]] = [[], []]
    threads = [
        threading.Thread(target=lambda i=i: found[i].extend(both[i](x) for _ in range(10))) for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, expected in zip(found, alone, strict=True):
        assert len(got) == 10
        assert all(torch.equal(one, expected) for one in got)


def test_impossible_caps_and_windows_are_refused() -> None:
    _, _, routed = gate(ONE)
    assert "less than any route takes" in error_of(lambda: Session(routed, cap=1.0))
    for window in (0, -1, 1.5, "a", None, True, 10**30):
        assert "window" in error_of(lambda window=window: Session(routed, window=window))
    for cap in (float("inf"), float("nan"), 0, b"x"):
        assert "budget" in error_of(lambda cap=cap: Session(routed, cap=cap))


def test_a_cap_is_no_drift() -> None:
    _, x, routed = gate(ONE)
    session = Session(routed, window=200, cap=routed.router.costs.largest / 2)
    for _ in range(4):
        session(x)
    assert session.drift() is None


def test_free_steps_are_always_allowed() -> None:
    model, x = spread(ONE, 8)
    table = CostTable(unit="ms", prefix=1.0, segments=(((1.0, 0.0, 0.0, 1.0),),))
    policy = CascadePolicy(costs=table, routes=(0, 1), thresholds=(2.0,))
    assert policy(model, x, allowance=2.0 * len(x)).routes.tolist() == [1] * len(x)
