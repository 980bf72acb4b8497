"""Converted networks against the original, against narrow networks built by hand, and against counters."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import dsnet
from dsnet.models.convert import ConvertedNetwork, convert
from dsnet.training import Average, Projector, Scheme, Stage1
from tests.support import assert_close, relative_error, spread_gates
from tests.support.small_networks import (
    CLASSES,
    SMALL_NETWORKS,
    ResidualNet,
    converted_layer,
    cut_to,
    plain_cnn,
    random_images,
    randomise_module,
)
from tests.support.stage1 import SCHEMES

NAMES = list(SMALL_NETWORKS)
WIDTHS = (0.25, 0.5, 1.0)


@functools.cache
def converted(name: str) -> ConvertedNetwork:
    """A converted network with all weights and the statistics of all routes drawn anew; never changed."""
    small = SMALL_NETWORKS[name]
    model = convert(small.full(), random_images(1), widths=WIDTHS, gate=small.gate)
    randomise_module(model, seed=5)
    return model.requires_grad_(False)


# --- routes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_route_equals_the_original(name: str, sort: bool) -> None:
    network, x = SMALL_NETWORKS[name].full(), random_images(3)
    model = convert(network, x[:1], widths=WIDTHS, sort=sort)
    assert len(model.space) == 3
    assert model.conversion.error is not None
    assert model.conversion.error <= 1e-12
    assert_close(model(x, model.space.largest), network(x), 1e-10)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_a_route_equals_a_narrow_network_built_by_hand(name: str, share: float) -> None:
    small, x = SMALL_NETWORKS[name], random_images(3)
    network = small.full()
    model = convert(network, x[:1], widths=(share, 1.0), gate=small.gate, sort=False)
    assert_close(model(x, 0), small.narrowed(network, share)(x), 1e-10)


@pytest.mark.parametrize("fold_bn", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_extracted_route_equals_the_supernet(name: str, fold_bn: bool) -> None:
    model, x = converted(name), random_images(3)
    logits = [model(x, route) for route in model.space]
    for route, expected in zip(model.space, logits, strict=True):
        network = dsnet.extract(model, route, fold_bn=fold_bn)
        assert_close(network(x), expected, 1e-10)
        shared = {p.data_ptr() for p in network.parameters()} & {p.data_ptr() for p in model.parameters()}
        assert not shared
        assert all(
            type(m).__module__.startswith(("torch", "dsnet.models.convert")) for m in network.modules()
        )
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    assert (logits[1] - logits[2]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_mixed_batch_equals_single_images(name: str) -> None:
    x = random_images(12)
    model = spread_gates(copy.deepcopy(converted(name)), x)
    routes, logits = model.route(x), model(x)
    assert len(set(routes.flatten().tolist())) > 1
    for i in range(len(x)):
        one = x[i : i + 1]
        assert torch.equal(model.route(one), routes[i : i + 1])
        assert_close(model(one), logits[i : i + 1], 1e-10)
        assert_close(model(one, int(routes[i])), logits[i : i + 1], 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_an_eval_pass_changes_nothing(name: str) -> None:
    model = converted(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    names = {key: set(module.__dict__) for key, module in model.named_modules()}
    for route in model.space:
        model(random_images(2), route)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {key: set(module.__dict__) for key, module in model.named_modules()} == names


# --- counting ---------------------------------------------------------------------------------------------
class AveragePools(TorchDispatchMode):
    """Counts the elements that averages over positions read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: object = None
    ) -> object:
        if str(func).split(".")[1] in ("mean", "_adaptive_avg_pool2d", "avg_pool2d"):
            self.read += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_multiply_adds_equal_those_of_torch_on_the_extracted_route(name: str) -> None:
    """By the paper's convention: torch's products, without those of attention, plus what averages read.

    The gate's average and the first layer of its routing head count too, the last layer only by the
    convention "all"; the extracted route has no gate.
    """
    model, x = converted(name), random_images(1)
    state = model.run_prefix(x)
    last_layer = model.gate(0).routing.last.weight.numel()
    with FlopCounterMode(display=False) as flops:
        model.gate_scores(state)
    gate = state.x.numel() + flops.get_total_flops() // 2 - last_layer
    counts = []
    for route in model.space:
        network = dsnet.extract(model, route, fold_bn=False)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops, AveragePools() as pools:
            network(x)  # torch's counter does not know its fused attention on a CPU
        by_operation = {str(op): n // 2 for op, n in flops.get_flop_counts()["Global"].items()}
        attention = sum(n for op, n in by_operation.items() if "bmm" in op or "attention" in op)
        cost = dsnet.cost(model, route)
        assert (cost.attention > 0) == (attention > 0) == name.startswith("transformer")
        assert cost.attention == attention
        expected = flops.get_total_flops() // 2 - attention + pools.read + gate
        assert dsnet.madds(model, route) == expected
        assert dsnet.madds(model, route, convention="all") == expected + attention + last_layer
        assert dsnet.params(model, route) == sum(p.numel() for p in network.parameters())
        counts.append(expected)
    assert counts == sorted(set(counts))


# --- state ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_compute_the_same(name: str) -> None:
    model, x = converted(name), random_images(2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(other.state_dict()) == list(model.state_dict())
        for route in model.space:
            assert torch.equal(other(x, route), model(x, route))
            assert dsnet.cost(other, route) == dsnet.cost(model, route)
        assert str(other.conversion) == str(model.conversion)
        assert other.space == model.space


@pytest.mark.parametrize("name", NAMES)
def test_state_loads_into_another_conversion(name: str) -> None:
    small, x = SMALL_NETWORKS[name], random_images(2)
    model = converted(name)
    other = convert(small.full(seed=9), random_images(1), widths=WIDTHS, gate=small.gate)
    other.load_state_dict(model.state_dict())
    for route in model.space:
        assert torch.equal(other(x, route), model(x, route))


@pytest.mark.parametrize("name", NAMES)
def test_the_original_network_is_unchanged(name: str) -> None:
    network, x = SMALL_NETWORKS[name].full(), random_images(2)
    network.get_parameter(next(iter(dict(network.named_parameters())))).requires_grad_(False)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    attributes = {key: set(module.__dict__) for key, module in network.named_modules()}
    needs = [p.requires_grad for p in network.parameters()]
    expected = network(x)
    model = convert(network, x, batches=[x], widths=WIDTHS)
    randomise_module(model, seed=3)
    model.train()(x, 0).sum().backward()
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert {key: set(module.__dict__) for key, module in network.named_modules()} == attributes
    assert [p.requires_grad for p in network.parameters()] == needs
    assert all(p.grad is None for p in network.parameters())
    assert not any(module.training for module in network.modules())
    assert torch.equal(network(x), expected)


# --- training ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_the_original_network(name: str) -> None:
    network, x = SMALL_NETWORKS[name].full(), random_images(4)
    model = convert(network, x, widths=WIDTHS, sort=False)
    network(x).square().sum().backward()
    model(x, model.space.largest).square().sum().backward()
    ours = dict(model.named_parameters())
    for key, parameter in network.named_parameters():
        is_tensor = key.endswith(("class_token", "positions", "gamma"))
        layer = converted_layer(model, key if is_tensor else key.rpartition(".")[0])
        weight = layer.value if is_tensor else getattr(layer, key.rpartition(".")[2])
        assert any(weight is p for p in ours.values())
        assert_close(weight.grad, parameter.grad, 1e-9)
    without = {key for key, p in ours.items() if p.grad is None or not p.grad.abs().sum() > 0}
    assert {key for key in without if ".routing." not in key} == set()


@pytest.mark.parametrize("text", ["ib", "id"])
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step(name: str, text: str) -> None:
    model = copy.deepcopy(converted(name)).requires_grad_(True).train()
    scheme = Scheme.parse(text)
    average = Average(copy.deepcopy(converted(name))) if scheme.uses_average else None
    stage = Stage1(scheme=scheme, average=average, smoothing=0.1)
    routes = scheme.draw(model.space, 2, torch.Generator().manual_seed(0))
    views = [random_images(6, seed=10 + i) for i in range(scheme.views(len(routes)))]
    labels = torch.arange(6) % CLASSES
    losses = []
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(float(stage.step(model, routes, views, labels).total))
        optimizer.step()
    assert losses[-1] < losses[0]
    still = {key for key, p in model.named_parameters() if torch.equal(p, before[key])}
    assert all(key.endswith(".bias") or ".routing." in key for key in still)  # a batch norm undoes a bias
    assert any(not key.endswith(".bias") for key in before.keys() - still)


@pytest.mark.parametrize("text", SCHEMES)
def test_every_scheme_trains_all_weights(text: str) -> None:
    model = copy.deepcopy(converted("residual")).requires_grad_(True).train()
    scheme = Scheme.parse(text)
    frozen = copy.deepcopy(converted("residual")).eval()
    stage = Stage1(
        scheme=scheme,
        average=Average(copy.deepcopy(frozen)) if scheme.uses_average else None,
        projector=Projector.of(model, "all") if scheme.hierarchical else None,
        teacher=frozen.bind(frozen.space.largest) if scheme.external is not None else None,
    )
    routes = scheme.draw(model.space, 2, torch.Generator().manual_seed(0))
    views = [random_images(6, seed=10 + i) for i in range(scheme.views(len(routes)))]
    losses = stage.step(model, routes, views, torch.arange(6) % CLASSES)
    assert losses.total.isfinite()
    expected = {route.number: dict(stage.scheme.terms(i)) for i, route in enumerate(routes)}
    assert {term for loss in losses.networks for term, _ in loss.terms} == set().union(*expected.values())
    untrained = {key for key, p in model.named_parameters() if p.grad is None}
    assert all(".routing." in key for key in untrained)


def test_training_updates_the_statistics_of_the_route_only() -> None:
    model = copy.deepcopy(converted("plain")).train()
    norm = converted_layer(model, "7")
    before = norm.mean.clone(), norm.var.clone()
    model(random_images(4), 1)
    for key in range(3):
        assert torch.equal(norm.mean[key], before[0][key]) == (key != 1)
        assert torch.equal(norm.var[key], before[1][key]) == (key != 1)
    width = model.conversion.sliced[0].widths[1]
    assert torch.equal(norm.mean[1, width:], before[0][1, width:])


# --- routes that differ in depth and in residual streams --------------------------------------------------
def test_dropped_blocks_equal_a_network_built_without_them() -> None:
    network, x = randomise_module(ResidualNet().double()).eval(), random_images(3)
    model = convert(
        network, x[:1], widths=(1.0, 1.0, 1.0), depths=(1 / 3, 2 / 3, 1.0), gate="blocks.0", sort=False
    )
    assert model.conversion.depths == (4, 5, 6)
    for route, blocks in enumerate((3, 4, 5)):
        assert_close(model(x, route), cut_to(ResidualNet(blocks=blocks), network)(x), 1e-10)


def test_narrow_and_shallow_routes_equal_networks_built_by_hand() -> None:
    network, x = randomise_module(ResidualNet().double()).eval(), random_images(3)
    model = convert(
        network, x[:1], widths=(0.5, 0.25, 1.0), depths=(1 / 3, 2 / 3, 1.0), gate="blocks.0", sort=False
    )
    expected = [ResidualNet(0.25, blocks=4), ResidualNet(0.5, blocks=3)]
    costs = [dsnet.madds(model, route) for route in model.space]
    assert costs == sorted(costs)
    by_logits = [cut_to(other, network)(x) for other in expected]
    for logits in by_logits:
        assert min(relative_error(model(x, route), logits) for route in range(2)) < 1e-10
    assert_close(model(x, 2), network(x), 1e-10)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("stream", [0.25, 0.5])
def test_narrow_residual_streams_equal_a_network_built_by_hand(share: float, stream: float) -> None:
    network, x = randomise_module(ResidualNet().double()).eval(), random_images(3)
    model = convert(network, x[:1], widths=(share, 1.0), residual=(stream, 1.0), gate="blocks.0", sort=False)
    reasons = {group.name: group.reason for group in model.conversion.groups}
    assert reasons["stem.0"] is None
    assert reasons["blocks.1.conv2.0"] is None
    assert_close(model(x, 0), cut_to(ResidualNet(share, stream), network)(x), 1e-10)
    assert_close(model(x, 1), network(x), 1e-10)
    randomise_module(model, 5)
    for route in model.space:
        extracted = dsnet.extract(model, route, fold_bn=False)
        assert_close(extracted(x), model(x, route), 1e-10)
        assert dsnet.params(model, route) == sum(p.numel() for p in extracted.parameters())


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("plain", "concatenated")])
def test_narrow_residual_streams_of_every_kind_extract(name: str) -> None:
    network, x = SMALL_NETWORKS[name].full(), random_images(3)
    model = convert(network, x[:1], widths=(0.5, 1.0), residual=(0.5, 1.0), gate="blocks.0")
    assert all(group.reason != "residual stream" for group in model.conversion.groups)
    assert_close(model(x, 1), network(x), 1e-10)
    randomise_module(model, 5)
    for route in model.space:
        assert_close(dsnet.extract(model, route)(x), model(x, route), 1e-10)


# --- widths -----------------------------------------------------------------------------------------------
def test_a_table_gives_the_width_of_groups_by_name() -> None:
    network, x = SMALL_NETWORKS["plain"].full(), random_images(3)
    table = ({"6": 5, "9": 3}, {"9": 7}, {})
    model = convert(network, x[:1], table=table, gate="3", sort=False)
    widths = {group.name: group.widths for group in model.conversion.sliced}
    assert widths == {"6": (5, 24, 24), "9": (3, 7, 16)}
    for route, sizes in enumerate([(5, 3), (24, 7), (24, 16)]):
        assert_close(model(x, route), cut_to(plain_cnn(widths=sizes), network)(x), 1e-10)


def test_a_table_overrides_the_shares_of_the_groups_that_it_names() -> None:
    network, x = SMALL_NETWORKS["plain"].full(), random_images(3)
    model = convert(network, x[:1], widths=(0.5, 1.0), table=({"6": 5}, {}), gate="3", sort=False)
    assert {group.name: group.widths for group in model.conversion.sliced} == {"6": (5, 24), "9": (8, 16)}
    assert_close(model(x, 0), cut_to(plain_cnn(widths=(5, 8)), network)(x), 1e-10)


def test_a_table_can_slice_one_residual_stream() -> None:
    network, x = randomise_module(ResidualNet().double()).eval(), random_images(2)
    model = convert(network, x[:1], table=({"blocks.1.conv2.0": 6}, {}), gate="blocks.0", sort=False)
    assert {g.name: g.widths for g in model.conversion.groups}["blocks.1.conv2.0"] == (6, 16)
    assert next(g for g in model.conversion.groups if g.name == "stem.0").reason == "residual stream"
    assert_close(model(x, 1), network(x), 1e-10)
    assert_close(dsnet.extract(model, 0)(x), model(x, 0), 1e-10)


@pytest.mark.parametrize(
    ("channels", "share", "width"),
    [(64, 0.5, 32), (64, 0.3, 16), (64, 0.01, 8), (24, 0.5, 12), (36, 0.25, 9)],
)
def test_widths_are_shares_in_steps_of_8_where_there_are_many(
    channels: int, share: float, width: int
) -> None:
    network = plain_cnn(widths=(channels, 16)).eval()
    model = convert(network, torch.zeros(1, 3, 16, 16), widths=(share, 1.0), gate="3")
    (group,) = (group for group in model.conversion.sliced if group.name == "6")
    assert group.widths == (width, channels)


def test_routes_that_are_equal_become_one() -> None:
    network = SMALL_NETWORKS["plain"].full()
    model = convert(network, random_images(1), widths=(0.5, 0.51, 1.0, 1.0), gate="3")
    assert len(model.space) == 2
    assert model(random_images(2)).shape == (2, CLASSES)


# --- the gate ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gate", "before"), [("stem.0", 1), ("blocks.0", 2), ("blocks.1", 3), ("blocks.3", 5)]
)
def test_the_gate_is_behind_the_module_that_is_named(gate: str, before: int) -> None:
    network, x = SMALL_NETWORKS["residual"].full(), random_images(2)
    model = convert(network, x[:1], widths=(0.5, 1.0), gate=gate)
    assert model.conversion.gate == gate
    assert len(model.prefix_steps()) == before
    assert len(model.prefix_steps()) + len(model.segment_steps((0,))) == 6
    seen: list[Tensor] = []
    owner = network.stem if gate == "stem.0" else network.get_submodule(gate)
    owner.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    network(x)
    state = model.run_prefix(x).x
    assert_close(state, seen[0].relu() if gate == "stem.0" else seen[0], 1e-10)


def test_the_gate_is_where_a_quarter_of_the_cost_is_spent() -> None:
    network = SMALL_NETWORKS["residual"].full()
    model = convert(network, random_images(1), widths=(0.5, 1.0))
    pieces = [network.stem, *network.blocks]
    costs, x = [], random_images(1)
    for piece in pieces:
        with FlopCounterMode(display=False) as flops:
            x = piece(x)
        costs.append(flops.get_total_flops())
    shares = [sum(costs[: i + 1]) / sum(costs) for i in range(len(costs) - 1)]
    expected = min(range(len(shares)), key=lambda i: abs(shares[i] - 0.25))
    assert len(model.prefix_steps()) == expected + 1


# --- the order of channels --------------------------------------------------------------------------------
def _order(original: Tensor, sorted_weight: Tensor) -> list[int]:
    """Return which filter of the original each sorted filter is."""
    return [int((original == row).flatten(1).all(1).nonzero()) for row in sorted_weight]


def test_without_sorting_channels_keep_their_order() -> None:
    network = SMALL_NETWORKS["plain"].full()
    model = convert(network, random_images(1), gate="3", sort=False)
    for name in ("0", "3", "6", "9", "13"):
        assert torch.equal(converted_layer(model, name).weight, network.get_submodule(name).weight)


def test_channels_are_sorted_by_the_weights_that_read_them() -> None:
    network = SMALL_NETWORKS["plain"].full()
    model = convert(network, random_images(1), gate="3")
    importance = network[9].weight.abs().sum((0, 2, 3))
    assert (
        _order(network[6].weight, converted_layer(model, "6").weight[:, :, :, :])
        == importance.argsort(descending=True).tolist()
    )
    norm = converted_layer(model, "7")
    assert torch.equal(norm.mean[0], network[7].running_mean[importance.argsort(descending=True)])
    importance = network[13].weight.abs().sum(0)
    order = importance.argsort(descending=True)
    assert torch.equal(converted_layer(model, "9").bias, network[9].bias[order])
    assert torch.equal(converted_layer(model, "13").weight, network[13].weight[:, order])
    assert order.tolist() != list(range(16))


def test_channels_are_sorted_by_weights_times_activations() -> None:
    network, batches = SMALL_NETWORKS["plain"].full(), [random_images(5), random_images(3, seed=2)]
    model = convert(network, random_images(1), gate="3", batches=iter(batches))
    inputs = network[:9](torch.cat(batches)).abs().mean((0, 2, 3))
    importance = network[9].weight.abs().sum((0, 2, 3)) * inputs
    order = importance.argsort(descending=True)
    assert torch.equal(converted_layer(model, "6").bias, network[6].bias[order])
    by_weights = network[9].weight.abs().sum((0, 2, 3)).argsort(descending=True)
    assert order.tolist() != by_weights.tolist()
    inputs = network[:13](torch.cat(batches)).abs().mean(0)
    order = (network[13].weight.abs().sum(0) * inputs).argsort(descending=True)
    assert torch.equal(converted_layer(model, "13").weight, network[13].weight[:, order])


def test_heads_are_sorted_by_the_weights_that_read_them() -> None:
    network = SMALL_NETWORKS["transformer"].full()
    model = convert(network, random_images(1), gate="blocks.0")
    importance = network.blocks[1].attention.proj.weight.abs().sum(0).unflatten(0, (4, 4)).sum(1)
    order = importance.argsort(descending=True)
    qkv = network.blocks[1].attention.qkv.weight.unflatten(0, (3, 4, 4))[:, order].flatten(0, 2)
    assert order.tolist() != [0, 1, 2, 3]
    assert torch.equal(converted_layer(model, "blocks.1.attention.qkv").weight, qkv)


def test_a_smaller_route_keeps_the_most_important_channels() -> None:
    """A narrow network of the channels with the largest weights behind them, put together by hand."""
    network, x = SMALL_NETWORKS["plain"].full(), random_images(3)
    model = convert(network, x[:1], widths=(0.5, 1.0), gate="3")
    third = network[9].weight.abs().sum((0, 2, 3)).topk(12).indices
    fourth = network[13].weight.abs().sum(0).topk(8).indices
    other = copy.deepcopy(network)
    with torch.no_grad():
        keep = torch.zeros(24, dtype=torch.bool)
        keep[third] = True
        other[9].weight[:, ~keep] = 0
        keep = torch.zeros(16, dtype=torch.bool)
        keep[fourth] = True
        other[13].weight[:, ~keep] = 0
    assert_close(model(x, 0), other(x), 1e-10)
