"""Routes and route spaces as values."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsnet
from dsnet.routes import Route, RouteSpace, Slice
from tests.support import SUPERNETS, error_of


def toy(count: int = 10, **narrowings: tuple[int, ...]) -> RouteSpace:
    return RouteSpace.of_table("toy", [(Slice(width=8 + i),) for i in range(count)], narrowings)


def product() -> RouteSpace:
    return dsnet.create_model("ds_resnet_tiny", device="meta").space


@pytest.mark.parametrize("name", SUPERNETS)
def test_spaces_are_ordered_cheapest_first_and_survive_json(name: str) -> None:
    model = dsnet.create_model(name, device="meta")
    space = model.space
    costs = [dsnet.madds(model, route) for route in space]
    assert costs == sorted(costs)
    assert [route.number for route in space] == list(range(len(space)))
    again = RouteSpace.from_dict(json.loads(json.dumps(space.to_dict())))
    assert again == space
    assert hash(again) == hash(space)
    assert {again.largest: "found"}[space.largest] == "found"
    for route in (space.smallest, space.largest):
        assert space.of_choices(route.choices) == route
        assert space.resolve(route.number) is route


SPACES = {
    "ds_mbnet": (14, 1, {"S": (0, 1, 2, 3), "M": (5, 6, 7, 8), "L": (10, 11, 12, 13)}),
    "ds_mbnet_cifar": (14, 1, {"S": (0, 1, 2, 3), "M": (5, 6, 7, 8), "L": (10, 11, 12, 13)}),
    "ds_mbnet_tiny": (4, 1, {}),
    "ds_mbnet_plus": (12, 1, {"S": (0, 1, 2, 3), "M": (4, 5, 6, 7), "L": (8, 9, 10, 11)}),
    "ds_mbnet_plus_tiny": (4, 1, {}),
    "ds_resnet": (256, 4, {name: tuple(range(256)) for name in "SML"}),
    "ds_resnet_tiny": (16, 2, {name: tuple(range(16)) for name in "SML"}),
    "ds_resnet_plus": (9, 1, {"S": (0, 1, 2, 3), "M": (2, 3, 4, 5), "L": (5, 6, 7, 8)}),
    "ds_resnet_plus_tiny": (4, 1, {}),
    "ds_vit_plus": (8, 1, {"Ti": (0, 1), "S": (2, 3), "M": (5, 6), "L": (6, 7)}),
    "ds_vit_plus_tiny": (3, 1, {}),
}


@pytest.mark.parametrize("name", SPACES)
def test_sizes_and_narrowings(name: str) -> None:
    routes, gates, narrowings = SPACES[name]
    space = dsnet.create_model(name, device="meta").space
    assert (len(space), space.gates) == (routes, gates)
    assert {k: tuple(r.number for r in space.narrow(k)) for k, _ in space.narrowings} == narrowings


def test_the_order_of_routes_does_not_depend_on_options() -> None:
    spaces = [
        dsnet.create_model("ds_resnet", device="meta", **options).space
        for options in ({}, {"num_classes": 2}, {"gate_first_layer": "separate"}, {"norm": "group"})
    ]
    assert all(space == spaces[0] for space in spaces)


@given(st.sets(st.integers(0, 9), min_size=1))
def test_narrowing_keeps_the_numbers(numbers: set[int]) -> None:
    narrowed = toy().narrow(numbers)
    assert [route.number for route in narrowed] == sorted(numbers)
    assert narrowed.smallest.number == min(numbers)
    assert narrowed.largest.number == max(numbers)
    assert narrowed.choices == (tuple(sorted(numbers)),)
    for number in range(10):
        if number in numbers:
            assert narrowed.resolve(number) == toy()[number]
        else:
            assert str(number) in error_of(lambda n=number: narrowed.resolve(n))


@given(st.integers(0, 2**31), st.integers(1, 12), st.booleans())
def test_sampling_is_a_function_of_the_generator(seed: int, count: int, interior: bool) -> None:
    space = toy(count)
    drawn, again = (
        space.sample(20, generator=torch.Generator().manual_seed(seed), interior=interior) for _ in range(2)
    )
    assert drawn == again
    allowed = set(space.routes[1:-1] if interior else space.routes)
    assert set(drawn) <= allowed
    assert len(drawn) == (20 if allowed else 0)


def test_sampling_is_uniform() -> None:
    drawn = toy(6).sample(12_000, generator=torch.Generator().manual_seed(0), interior=True)
    counts = [sum(route.number == n for route in drawn) for n in range(6)]
    assert counts[0] == counts[5] == 0
    assert all(abs(c - 3000) < 200 for c in counts[1:5])  # four standard deviations are 190


def test_several_gates_narrow_to_all_combinations_of_the_remaining_choices() -> None:
    space = product()
    kept = [space.of_choices((a, b)) for a in (0, 2) for b in (1, 2, 3)]
    narrowed = space.narrow(kept)
    assert narrowed.choices == ((0, 2), (1, 2, 3))
    assert "every combination" in error_of(lambda: space.narrow(kept[:-1]))


def test_values_cannot_be_changed() -> None:
    space = toy()
    for thing, name in ((space, "name"), (space[0], "number"), (space[0].stages[0], "width")):
        with pytest.raises(AttributeError):
            setattr(thing, name, 3)


def test_bad_spaces_and_data_are_errors() -> None:
    route = toy()[0]
    assert "at least one" in error_of(lambda: RouteSpace(name="toy", routes=()))
    assert "no route at all" in error_of(lambda: toy().narrow([]))
    assert "in order" in error_of(lambda: RouteSpace(name="toy", routes=(route, route)))
    assert "other" in error_of(lambda: RouteSpace(name="other", routes=(route,)))
    assert "S, M" in error_of(lambda: toy(S=(0,), M=(1,)).narrow("L"))
    assert "colour" in error_of(lambda: Route.from_dict({**route.to_dict(), "colour": 1}))
    assert "lacks the field number" in error_of(
        lambda: Route.from_dict({k: v for k, v in route.to_dict().items() if k != "number"})
    )
    assert "depht" in error_of(
        lambda: Route.from_dict({**route.to_dict(), "stages": [{"width": 1, "depht": 2}]})
    )
    assert "(4, 0)" in error_of(lambda: product().of_choices((4, 0)))
    twice = [
        Route(space="t", number=n, choices=c, stages=())
        for n, c in enumerate([(0, 0), (0, 1), (1, 1), (0, 0)])
    ]
    assert "every combination" in error_of(lambda: RouteSpace(name="t", routes=tuple(twice)))
    for width in (-5, 0, "a", 1.5, True, None):
        assert "width of a slice" in error_of(lambda w=width: Slice(width=w))
    for change in ({"number": "0"}, {"choices": "0"}, {"choices": []}):
        assert "a choice for every gate" in error_of(
            lambda c=change: Route.from_dict({**route.to_dict(), **c})
        )
    assert "lacks the field width" in error_of(
        lambda: Route.from_dict({**route.to_dict(), "stages": [{"depth": 2}]})
    )
    for to in (3, None, route):
        assert "to a name or to several" in error_of(lambda t=to: toy().narrow(t))
    for count in (-1, 2.5, True):
        assert "number of routes to draw" in error_of(lambda c=count: toy().sample(c))


def with_sizes() -> RouteSpace:
    return dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16), device="meta").space


def test_routes_with_an_image_size_survive_json() -> None:
    space = with_sizes()
    again = RouteSpace.from_dict(json.loads(json.dumps(space.to_dict())))
    assert again == space
    assert hash(again) == hash(space)
    assert [route.image_size for route in again] == [8, 8, 8, 16, 16, 8, 16, 16]
    assert space.narrow([0, 7]).largest.image_size == 16
    assert str(space.largest).startswith("route 7 of ds_mbnet_tiny (16 px: width=96")
    first, fourth = space[0], space[3]
    assert first.stages == fourth.stages
    assert first != fourth
    assert "has no such route" in error_of(
        lambda: space.resolve(dsnet.create_model("ds_mbnet_tiny", device="meta").space[0])
    )


def test_routes_without_an_image_size_are_stored_as_before() -> None:
    route = toy()[1]
    old = {"space": "toy", "number": 1, "choices": [1], "stages": [{"width": 9, "depth": 1}]}
    assert route.to_dict() == old
    assert Route.from_dict(old) == route
    assert route.image_size is None
    assert str(route) == "route 1 of toy (width=9 depth=1)"
    assert Route.from_dict({**old, "image_size": None}) == route
    assert Route.from_dict({**old, "image_size": 24}).image_size == 24
    for size in (0, -8, 16.0, "16", True, [16]):
        message = error_of(lambda s=size: Route.from_dict({**old, "image_size": s}))
        assert "image size of a route is a positive integer" in message
