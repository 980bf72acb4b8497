"""Supernets at several image sizes, against ordinary supernets with the same weights and their statistics."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dsnet
from dsnet.models import Supernet, run_gated
from dsnet.models.composite import CompositeNetwork, check_image_sizes, with_image_sizes
from dsnet.models.convert import convert
from dsnet.models.group_by_route import run_assigned
from dsnet.models.members import resize
from dsnet.routes import Route
from dsnet.slicing import KeyState, Mode, SplitBatchNorm2d, batch_statistics
from tests.support import (
    assert_close,
    error_of,
    images,
    need_timm,
    randomise,
    relative_error,
    snapshot,
    spread_gates,
)
from tests.support.hook_counter import count_by_hooks
from tests.support.image_sizes import pairs_by_cost, shrink
from tests.support.small_networks import plain_cnn, random_images, randomise_module

FAMILIES = {
    "ds_mbnet_tiny": (8, 16, 24),
    "ds_mbnet_plus_tiny": (16, 24),
    "ds_resnet_tiny": (8, 14),
    "ds_resnet_plus_tiny": (8, 16),
    "ds_vit_plus_tiny": (8, 12, 16),
}
CONVERTED = {"plain_cnn": (12, 16), "timm": (32, 64)}
SIZES = FAMILIES | CONVERTED
NAMES = list(SIZES)
GATED = [name for name in NAMES if name != "ds_resnet_tiny"]
TIMM_OPTIONS = {"num_classes": 5, "widths": (0.5, 1.0)}


def ordinary(name: str) -> Supernet:
    """A network of one image size, in float64, with the weights as built."""
    if name == "timm":
        need_timm()
        return dsnet.create_model("timm:resnet18", dtype=torch.float64, image_size=64, **TIMM_OPTIONS)
    if name == "plain_cnn":
        return convert(plain_cnn().double().eval(), random_images(1), widths=(0.25, 0.5, 1.0))
    return dsnet.create_model(name, dtype=torch.float64)


def composite(name: str) -> CompositeNetwork:
    """A composite network of one's own, with all weights and the statistics of all keys drawn at random."""
    model = with_image_sizes(ordinary(name), SIZES[name])
    (randomise if name in FAMILIES else randomise_module)(model, seed=3)
    return model.requires_grad_(False)


@functools.cache
def drawn(name: str) -> CompositeNetwork:
    """The same, shared between tests that do not change it."""
    return composite(name)


@functools.cache
def plain(name: str, size: int) -> Supernet:
    """An ordinary network with the weights of `drawn` and its statistics at an image size."""
    model, network = drawn(name), ordinary(name)
    position, count = SIZES[name].index(size), len(SIZES[name])
    state = model.networks[0].state_dict()
    for key, own in network.state_dict().items():
        if isinstance(own, Tensor) and own.shape != state[key].shape and "routing" not in key:
            keys = len(state[key]) // count
            assert own.shape[0] == keys
            state[key] = state[key][position * keys : (position + 1) * keys]
    network.load_state_dict({k: v for k, v in state.items() if "routing" not in k}, strict=False)
    return network.requires_grad_(False).eval()


@functools.cache
def by_cost(name: str) -> list[tuple[int, Route]]:
    """All pairs of an image size and a route of the ordinary network, cheapest first."""
    return pairs_by_cost(ordinary(name), SIZES[name])


def pictures(name: str, batch: int, seed: int = 1) -> Tensor:
    """Images at the largest size."""
    return random_images(batch, SIZES[name][-1], seed)


# --- routes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_routes_are_all_pairs_of_a_size_and_a_route_cheapest_first(name: str) -> None:
    model, pairs = drawn(name), by_cost(name)
    space = model.space
    assert model.image_sizes == SIZES[name]
    assert model.input_spec.image_size == SIZES[name][-1]
    assert [(r.number, r.choices) for r in space] == [(n, (n,)) for n in range(len(pairs))]
    assert [(r.image_size, r.stages) for r in space] == [(size, route.stages) for size, route in pairs]
    assert (space.smallest.image_size, space.largest.image_size) == (SIZES[name][0], SIZES[name][-1])
    assert model.choices == (len(pairs),)
    assert model.has_gate == (name != "ds_resnet_tiny")


@pytest.mark.parametrize("name", NAMES)
def test_every_route_equals_an_ordinary_network_on_images_resized_by_hand(name: str) -> None:
    model, x = drawn(name), pictures(name, 2)
    pairs = list(zip(model.space, by_cost(name), strict=True))
    for route, (size, local) in pairs[:: 1 + len(pairs) // 12]:
        small = shrink(x, size)
        expected = plain(name, size)(small, local)
        assert_close(model(x, route), expected, 1e-10)
        assert_close(model.bind(route)(x), expected, 1e-10)
        assert_close(dsnet.extract(model, route)(small), expected, 1e-10)
        assert_close(model.run_from_states({(): model.run_prefix(x)}, route.choices), expected, 1e-10)
        logits, stages = model.run_stages(x, route)
        assert_close(logits, expected, 1e-10)
        for ours, theirs in zip(stages, plain(name, size).run_stages(small, local)[1], strict=True):
            assert_close(ours, theirs, 1e-10)


def test_images_are_resized_with_antialiasing() -> None:
    x = random_images(2, 24)
    for size in (8, 12, 16, 24, 40):
        assert_close(resize(x, size), shrink(x, size), 1e-12)
    assert resize(x, 24) is x


@pytest.mark.parametrize("name", NAMES)
def test_routes_that_share_a_prefix_run_it_once_for_each_size(name: str) -> None:
    model, x = composite(name), pictures(name, 2)
    calls: list[int] = []
    first = model.members[0].network.chain(())[0].block
    first.register_forward_hook(lambda module, args, output: calls.append(args[0].shape[-1]))
    states = {(): model.run_prefix(x)}
    for route in model.space:
        model.run_from_states(states, route.choices)
    assert sorted(calls) == list(SIZES[name])


# --- norm keys ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_keys_are_distinct_and_all_used(name: str) -> None:
    """Before the first gate one for each size, behind it one for each size and choices up to there."""
    model = drawn(name)
    users: dict[tuple[SplitBatchNorm2d, int], list[Route]] = {}
    for route in model.space:
        for norm, key in model.norms(route.choices):
            users.setdefault((norm, key), []).append(route)
    norms = [m for m in model.modules() if isinstance(m, SplitBatchNorm2d)]
    assert norms
    names = {module: key for key, module in model.networks[0].named_modules()}
    network = ordinary(name)
    of_network = {module: key for key, module in network.named_modules()}
    own = {(of_network[n], key) for route in network.space for n, key in network.norms(route.choices)}
    prefix = {norm for norm, _ in model.members[0].network.norms(())}
    for norm in norms:
        keys = [key for n, key in users if n is norm]
        count = norm.keys // len(SIZES[name])
        of_size = {key for n, key in own if n == names[norm]}  # routes of less depth skip norms
        expected = {count * position + key for position in range(len(SIZES[name])) for key in of_size}
        assert set(keys) == expected, "a key that no route uses, or one that does not exist"
        for key in keys:
            routes = users[norm, key]
            assert len({route.image_size for route in routes}) == 1
            if norm in prefix:
                assert len(routes) == len(model.space) // len(SIZES[name])
            elif model.has_gate:
                assert len(routes) == 1
        assert norm.keys % len(SIZES[name]) == 0
        assert (norm.keys == len(SIZES[name])) == (norm in prefix)


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny", "plain_cnn"])
def test_a_keys_statistics_matter_to_the_routes_that_use_it_alone(name: str) -> None:
    model, x = composite(name), pictures(name, 2)
    before = [model(x, route) for route in model.space]
    used = [set(model.norms(route.choices)) for route in model.space]
    norms = [m for m in model.modules() if isinstance(m, SplitBatchNorm2d)]
    for norm in (norms[0], norms[len(norms) // 2], norms[-1]):
        for key in sorted({0, 1, norm.keys // 2, norm.keys - 1}):
            mean = norm.mean[key].clone()
            norm.mean[key] += 0.5
            changed = [
                relative_error(model(x, r), old) > 1e-6 for r, old in zip(model.space, before, strict=True)
            ]
            norm.mean[key] = mean
            assert changed == [(norm, key) in of_route for of_route in used]


def test_keys_by_stage_are_repeated_too() -> None:
    model = dsnet.create_model("ds_resnet_tiny", bn_key="stage", image_sizes=(8, 16))
    keys = {m.keys for m in model.modules() if isinstance(m, SplitBatchNorm2d)}
    assert keys == {2, 8}
    last = [list(model.norms(route.choices))[-1] for route in model.space]
    assert {key for _, key in last} == set(range(8))
    for route in model.space:
        network, local = model.at(route)
        assert model.key(route.choices) == local.choices[-1] + 4 * (route.image_size == 16)
        assert network.key(local.choices) == model.key(route.choices)


def test_statistics_of_the_network_stay_exact_at_the_largest_size_only() -> None:
    model = with_image_sizes(randomise(ordinary("ds_mbnet_tiny")), (8, 16))
    x = random_images(2)
    for route in model.space:
        state = KeyState.CALIBRATED if route.image_size == 16 else KeyState.RUNNING
        assert model.key_states(route) == {state}
        small = resize(x, route.image_size)
        network = randomise(ordinary("ds_mbnet_tiny"))
        assert_close(model(x, route), network(small, model.at(route)[1].number), 1e-12)


def test_routes_without_statistics_are_errors() -> None:
    model = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16))
    x = images(model, 8)
    model(x, 0)  # as built
    trained = model.space.largest
    model.train()(x, trained)
    model.eval()(x, trained)
    assert model.key_states(trained) == {KeyState.RUNNING}
    small = next(route for route in model.space if route.image_size == 8)
    for call in (
        lambda: model(x, small),
        lambda: dsnet.extract(model, small),
        lambda: model.bind(small),
        lambda: model.features(x, small),
    ):
        assert "dsnet recalibrate" in error_of(call)
    model(x, small, mode=Mode(statistics=batch_statistics))


# --- costs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_costs_equal_independent_counters_at_the_size_of_the_route(name: str) -> None:
    model = copy.deepcopy(drawn(name)).to("meta")  # where the counter knows all kernels
    costs = [dsnet.madds(model, route) for route in model.space]
    assert costs == sorted(costs)
    for number in {0, 1, len(costs) // 2, len(costs) - 1}:
        route = model.space[number]
        network, _ = model.at(route)
        net = dsnet.extract(model, route, fold_bn=False)
        x = torch.zeros(2, 3, route.image_size, route.image_size, dtype=torch.float64, device="meta")
        decides = model.has_gate and route.image_size == SIZES[name][0]  # the gate of this size routes
        gate = 0
        if name in CONVERTED:  # their gates are not extracted; they pool at every size
            gate = network.run_prefix(x).x[0].numel()
            gate += network.gate(0).routing.first.weight.numel() if decides else 0
        assert costs[number] == count_by_hooks(net, x) + gate
        with FlopCounterMode(display=False) as counter:
            net(x)
        products = counter.get_total_flops() // (2 * len(x)) + count_by_hooks(net, x, pools_only=True)
        routing = network.gate(0).routing.last.weight.numel() if decides else 0
        assert dsnet.madds(model, route, convention="all") == products + gate + routing
        if route.image_size == ordinary(name).input_spec.image_size and name in FAMILIES:
            assert dsnet.params(model, route) == sum(p.numel() for p in net.parameters())
        assert sum(cost.madds() for cost in model.segment_costs(route).values()) == costs[number]
        assert model.cost(route) == dsnet.cost(model, route)


# --- gates -------------------------------------------------------------------------------------------------
@functools.cache
def spread(name: str) -> tuple[CompositeNetwork, Tensor]:
    """A composite network whose gate decides differently for these images."""
    model, x = composite(name), pictures(name, 8 if name == "timm" else 24)
    return spread_gates(model, x), x


@pytest.mark.parametrize("name", GATED)
def test_the_gate_looks_at_the_smallest_size(name: str) -> None:
    model, x = spread(name)
    size = SIZES[name][0]
    network = plain(name, size)
    state = network.run_prefix(shrink(x, size))
    scores = model.gate(0).score(state.encoding)
    assert scores.shape == (len(x), len(model.space))
    assert_close(model.gate_scores(model.run_prefix(x)), scores, 1e-10)
    taken = model.route(x)
    assert taken[:, 0].tolist() == scores.argmax(1).tolist()
    assert len(taken.unique()) > 2
    assert len({model.space[n].image_size for n in taken[:, 0].tolist()}) > 1


@pytest.mark.parametrize("name", GATED)
def test_mixed_batches_equal_single_images(name: str) -> None:
    model, x = spread(name)
    output = run_gated(model, x)
    assert torch.equal(model(x), output.logits)
    for i in range(len(x)):
        one = x[i : i + 1]
        assert model.route(one).tolist() == output.choices[i : i + 1].tolist()
        assert_close(output.logits[i : i + 1], model(one, int(output.choices[i])), 1e-10)
        assert_close(model(one), output.logits[i : i + 1], 1e-10)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert_close(model(x[order]), output.logits[order], 1e-10)
    assert model(x[:0]).shape == (0, output.logits.shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_images_run_at_the_routes_they_are_assigned(name: str) -> None:
    model = drawn(name)
    x = pictures(name, len(model.space))
    output = run_assigned(model, x, torch.arange(len(model.space))[:, None]) if model.has_gate else None
    if output is not None:
        for route in model.space:
            assert_close(output.logits[route.number], model(x, route)[route.number], 1e-10)


def test_a_gate_may_decide_between_some_of_the_routes() -> None:
    model = composite("ds_mbnet_tiny")
    kept = [model.space.smallest, model.space.largest]
    model.reset_routing(model.space.narrow(kept), generator=torch.Generator().manual_seed(0))
    x = pictures("ds_mbnet_tiny", 8)
    assert model.gate(0).choices == (kept[0].number, kept[1].number)
    assert set(model.route(x).flatten().tolist()) <= {route.number for route in kept}


def test_several_gates_do_not_decide_between_sizes() -> None:
    model, x = drawn("ds_resnet_tiny"), pictures("ds_resnet_tiny", 2)
    assert not model.has_gate
    for call in (
        lambda: model(x),
        lambda: model.route(x),
        lambda: model.features(x),
        lambda: run_gated(model, x),
        model.reset_routing,
    ):
        message = error_of(call)
        assert "has no gate" in message
        assert "(8, 14)" in message
        assert "dsnet calibrate" in message


# --- features ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(FAMILIES))
def test_feature_maps_are_those_of_the_routes_size(name: str) -> None:
    model, x = drawn(name), pictures(name, 2)
    pairs = by_cost(name)
    for number in (0, len(pairs) // 2, len(pairs) - 1):
        size, local = pairs[number]
        route, found = model.space[number], model.features(x, number)
        expected = plain(name, size).features(shrink(x, size), local)
        assert found.route == route
        assert found.indices.tolist() == [0, 1]
        assert list(found.maps) == list(expected.maps)
        shapes = model.feature_shapes(route)
        for stride, features in found.maps.items():
            assert_close(features, expected.maps[stride], 1e-10)
            assert tuple(features.shape[1:]) == tuple(shapes[stride])


def test_feature_maps_by_the_gates_decisions() -> None:
    model, x = spread("ds_mbnet_tiny")
    taken = model.route(x)[:, 0]
    results = model.features(x)
    assert [features.route.number for features in results] == sorted(set(taken.tolist()))
    assert sorted(torch.cat([features.indices for features in results]).tolist()) == list(range(len(x)))
    for features in results:
        assert features.indices.tolist() == (taken == features.route.number).nonzero()[:, 0].tolist()
        alone = model.features(x[features.indices], features.route)
        for stride, found in features.maps.items():
            assert_close(found, alone.maps[stride], 1e-10)
    with pytest.raises(dsnet.DsnetError, match="eval"):
        copy.deepcopy(model).train().features(x)


# --- as a module -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny", "plain_cnn"])
def test_a_pass_changes_nothing(name: str) -> None:
    model, x = composite(name), pictures(name, 4)
    networks = [model, *(member.network for member in model.members)]
    before = [snapshot(network) for network in networks]
    for route in model.space:
        model(x, route)
        model(x, route, mode=Mode(statistics=batch_statistics))
    if model.has_gate:
        model(x)
        model.features(x)
    for network, old in zip(networks, before, strict=True):
        new = snapshot(network)
        assert old.keys() == new.keys()
        for key, value in old.items():
            same = torch.equal(value, new[key]) if isinstance(value, Tensor) else value == new[key]
            assert same, f"{key} changed"


COPIES: dict[str, Callable[[CompositeNetwork], CompositeNetwork]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def saved_and_loaded(model: CompositeNetwork) -> CompositeNetwork:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: CompositeNetwork = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("make", [*COPIES.values(), saved_and_loaded])
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_a_copy_computes_the_same_and_shares_nothing(
    name: str, make: Callable[[CompositeNetwork], CompositeNetwork]
) -> None:
    model, x = composite(name), pictures(name, 2)
    other = make(model)
    before = [model(x, route) for route in model.space]
    for route, expected in zip(other.space, before, strict=True):
        assert torch.equal(other(x, route), expected)
    randomise(other, seed=9)
    for route, expected in zip(model.space, before, strict=True):
        assert torch.equal(model(x, route), expected)
        assert relative_error(other(x, route), expected) > 1e-3, "a member kept the old weights"
    tensors = {t.data_ptr() for t in (*other.parameters(), *other.buffers())}
    for member in other.members:
        assert {t.data_ptr() for t in (*member.network.parameters(), *member.network.buffers())} == tensors


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_vit_plus_tiny", "plain_cnn"])
def test_precision_and_mode_reach_all_sizes(name: str) -> None:
    model = composite(name)
    for change, dtype in (
        (lambda: model.float(), torch.float32),
        (lambda: model.double(), torch.float64),
        (lambda: model.to(torch.bfloat16), torch.bfloat16),
        (lambda: model.to(dtype=torch.float32, device="cpu"), torch.float32),
    ):
        assert change() is model
        x = pictures(name, 2).to(dtype)
        assert {model(x, route).dtype for route in model.space} == {dtype}
    for training in (True, False, True):
        assert model.train(training) is model
        assert {member.network.training for member in model.members} == {training}
        assert {module.training for module in model.modules()} == {training}
    model.eval()
    assert not any(member.network.training for member in model.members)


def test_training_updates_the_keys_of_the_routes_size() -> None:
    model = composite("ds_mbnet_tiny").train()
    norm = model.networks[0].stem.norm
    route = next(r for r in model.space if r.image_size == 16)
    before = norm.mean.clone()
    model(pictures("ds_mbnet_tiny", 4), route)
    assert (norm.mean != before).any(1).tolist() == [False, True, False]
    assert norm.states == [KeyState.CALIBRATED, KeyState.RUNNING, KeyState.CALIBRATED]


def test_the_meta_device_and_equal_generators() -> None:
    meta = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16), device="meta")
    models = [
        dsnet.create_model(
            "ds_mbnet_tiny", image_sizes=(8, 16), generator=torch.Generator().manual_seed(seed)
        )
        for seed in (0, 0, 1)
    ]
    assert meta.space == models[0].space
    assert meta.space != dsnet.create_model("ds_mbnet_tiny", device="meta").space
    states = [model.state_dict() for model in models]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert not torch.equal(*(state["networks.0.stem.conv.weight"] for state in states[1:]))
    assert models[0].spec == meta.spec
    assert dict(meta.spec.options) == {"image_sizes": (8, 16)}


def test_one_size_is_an_ordinary_network_with_a_size() -> None:
    model, x = (
        dsnet.create_model("ds_mbnet_tiny", dtype=torch.float64, image_sizes=[24]),
        random_images(2, 24),
    )
    randomise(model)
    network = ordinary("ds_mbnet_tiny")
    network.load_state_dict(model.networks[0].state_dict())
    for route in model.space:
        assert route.image_size == 24
        assert_close(model(x, route), network(x, route.number), 1e-12)
    assert_close(model(x), network(x), 1e-12)


# --- bad input ---------------------------------------------------------------------------------------------
BAD_SIZES = [
    (8, "up to 16 sides in pixels"),
    ("8,16", "up to 16 sides in pixels"),
    ((), "up to 16 sides"),
    ((8, "16"), "up to 16 sides"),
    ((8, 16.0), "up to 16 sides"),
    ((8, True), "up to 16 sides"),
    ((0, 8), "up to 16 sides"),
    ((-8, 8), "up to 16 sides"),
    (tuple(range(8, 8 * 18, 8)), "up to 16 sides"),
    ((8, 10**9), "up to 16 sides"),
    ((16, 8), "must rise"),
    ((8, 8, 16), "must rise"),
    ((8, 15), "image size 15 × 15 does not run"),
    ((4, 16), "at least 8"),
    ((math.nan, 16), "up to 16 sides"),
]


@pytest.mark.parametrize(("sizes", "message"), BAD_SIZES)
def test_sizes_that_are_not_possible(sizes: object, message: str) -> None:
    assert message in error_of(lambda: dsnet.create_model("ds_mbnet_tiny", image_sizes=sizes))


def test_networks_that_cannot_have_several_sizes() -> None:
    assert "no option image_sizes" in error_of(lambda: dsnet.create_model("resnet50", image_sizes=(8, 16)))
    model = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16))
    assert "has image sizes already: (8, 16)" in error_of(lambda: with_image_sizes(model, (8, 16)))
    assert check_image_sizes([8, 16]) == (8, 16)


def test_networks_of_timm_with_several_sizes() -> None:
    need_timm()
    options = {"image_sizes": (32, 64), "image_size": 32, **TIMM_OPTIONS}
    message = error_of(lambda: dsnet.create_model("timm:resnet18", **options))
    assert "image_size=32 must be the largest of image_sizes=(32, 64)" in message
    vit = {"image_sizes": (32, 64), **TIMM_OPTIONS}
    message = error_of(lambda: dsnet.create_model("timm:vit_tiny_patch16_224", **vit))
    assert "timm:vit_tiny_patch16_224 runs at 64 × 64 pixels only" in message
    odd = {"image_sizes": (32, 40), **TIMM_OPTIONS}
    assert "not a multiple of their stride" in error_of(lambda: dsnet.create_model("timm:resnet18", **odd))


def test_images_and_routes_that_do_not_fit() -> None:
    model = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16))
    other = dsnet.create_model("ds_mbnet_tiny")
    for call in (
        lambda: model(torch.zeros(1, 3, 8, 8), 0),
        lambda: model(torch.zeros(1, 3, 8, 8)),
        lambda: dsnet.madds(model, 0, image_size=8),
        lambda: dsnet.extract(model, 0, image_size=8),
        lambda: model.feature_shapes(0, 8),
    ):
        assert "takes 16 × 16 only" in error_of(call)
    assert "no such route" in error_of(lambda: model(torch.zeros(1, 3, 16, 16), other.space[0]))
    assert "no route 8" in error_of(lambda: model(torch.zeros(1, 3, 16, 16), 8))
    for call in (
        model.prefix_steps,
        lambda: model.chain(()),
        lambda: model.segment_steps((0,)),
        lambda: model.segment_output(torch.zeros(1, 12, 8, 8), (0,)),
    ):
        assert "for each image size" in error_of(call)
    assert "one gate, number 0" in error_of(lambda: model.gate(1))
