"""Cascades over separate networks against these networks, run by hand on resized images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dsnet
from dsnet import runtime
from dsnet.calibration import calibrate, collect
from dsnet.models.composite import CompositeNetwork
from dsnet.routing import CascadePolicy, CostTable, Routed, Session
from dsnet.routing.policies import margin
from dsnet.routing.route_outputs import simulate
from tests.support import assert_close, error_of, randomise
from tests.support.small_networks import CLASSES, SMALL_NETWORKS, TinyViT, plain_cnn, random_images

SIZES = (24, 16, 32)
NORMALISATIONS = (
    ((0.5, 0.4, 0.3), (0.2, 0.3, 0.25)),
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
)


def supernet(seed: int = 2) -> dsnet.Supernet:
    model = dsnet.create_model("ds_mbnet_tiny", num_classes=CLASSES, dtype=torch.float64)
    randomise(model, seed)
    return model.requires_grad_(False).eval()


def three_networks() -> list[nn.Module]:
    """A plain network, a supernet of four routes and a residual network."""
    return [SMALL_NETWORKS["plain"].full(), supernet(), SMALL_NETWORKS["residual"].full(1)]


def make(networks: Sequence[nn.Module] | None = None, **options: Any) -> CompositeNetwork:  # noqa: ANN401
    given = three_networks() if networks is None else networks
    options = {"sizes": SIZES, "normalisations": NORMALISATIONS} | options
    return dsnet.cascade(given, **options).requires_grad_(False)


def by_hand(network: nn.Module, member: int, raw: Tensor, route: dsnet.Route | None = None) -> Tensor:
    """Run a network on images with values in [0, 1]."""
    mean, std = (torch.tensor(v, dtype=raw.dtype)[:, None, None] for v in NORMALISATIONS[member])
    size = SIZES[member]
    if raw.shape[-1] != size:
        raw = F.interpolate(raw, (size, size), mode="bicubic", antialias=True, align_corners=False)
    x = (raw - mean) / std
    logits: Tensor = network(x) if route is None else network(x, route)
    return logits


def raw_images(batch: int) -> Tensor:
    return torch.rand(
        batch, 3, max(SIZES), max(SIZES), generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )


def normalised(raw: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, dtype=raw.dtype)[:, None, None] for v in NORMALISATIONS[-1])
    return (raw - mean) / std


# --- routes and costs -----------------------------------------------------------------------------------
def test_the_routes_are_those_of_all_networks_cheapest_first() -> None:
    model = make()
    counts = [dsnet.madds(model, route) for route in model.space]
    assert counts == sorted(counts)
    assert [route.number for route in model.space] == list(range(1 + len(supernet().space) + 1))
    by_member = {m: [r for r in model.space if model.member_of(r) == m] for m in range(3)}
    assert [len(by_member[m]) for m in range(3)] == [1, len(supernet().space), 1]
    for member, routes in by_member.items():
        assert {route.image_size for route in routes} == {SIZES[member]}
    assert [r.stages for r in by_member[1]] == [r.stages for r in supernet().space]
    assert model.input_spec.image_size == max(SIZES)
    assert not model.has_gate


def test_counts_equal_those_of_torch() -> None:
    networks = three_networks()
    model = make(networks)
    for route in model.space:
        member = model.member_of(route)
        if member == 1:  # counted at the size of its member
            alone = replace(
                dsnet.cost(supernet(), model.at(route)[1], SIZES[1]), routing=0
            )  # no gate decides
        else:
            with FlopCounterMode(display=False) as counter:
                networks[member](torch.zeros(1, 3, SIZES[member], SIZES[member], dtype=torch.float64))
            alone = dsnet.cost(model, route)
            assert 2 * alone.layers == counter.get_total_flops()
            assert alone.routing == 0
        assert dsnet.cost(model, route) == alone


def test_a_cascade_costs_the_sum_of_its_networks() -> None:
    model = make()
    costs = CostTable.of_model(model)
    numbers = [
        next(route.number for route in model.space if model.member_of(route) == member) for member in range(3)
    ]
    total = sum(dsnet.madds(model, number) for number in numbers)
    assert costs.of_several([(number,) for number in numbers]) == total
    for route in model.space:
        assert costs.of(route.choices) == dsnet.madds(model, route)


# --- logits ---------------------------------------------------------------------------------------------
@torch.no_grad()
def test_every_route_computes_what_its_network_does_on_resized_images() -> None:
    networks = three_networks()
    model = make(networks)
    raw = raw_images(3)
    for route in model.space:
        member = model.member_of(route)
        local = model.at(route)[1] if member == 1 else None
        expected = by_hand(networks[member], member, raw, local)
        assert_close(model(normalised(raw), route), expected, 1e-12)
        extracted = dsnet.extract(model, route)
        inputs = model.members[member].images(normalised(raw))
        assert_close(extracted(inputs), expected, 1e-9)


@torch.no_grad()
def test_without_normalisations_images_are_only_resized() -> None:
    networks = three_networks()
    model = make(networks, normalisations=None, interpolation="bilinear")
    x = random_images(2, max(SIZES))
    resized = F.interpolate(x, (SIZES[0], SIZES[0]), mode="bilinear", antialias=True)
    number = next(route.number for route in model.space if model.member_of(route) == 0)
    assert_close(model(x, number), networks[0](resized), 1e-12)


@torch.no_grad()
def test_the_cascade_policy_equals_a_loop_by_hand() -> None:
    networks = three_networks()
    model = make(networks)
    raw = raw_images(32)
    routes = (0, len(model.space) // 2, len(model.space) - 1)
    logits = []
    for number in routes:
        member = model.member_of(number)
        logits.append(by_hand(networks[member], member, raw, model.at(number)[1] if member == 1 else None))
    thresholds = tuple(float(margin(z).median()) + 1e-6 for z in logits[:2])
    costs = CostTable.of_model(model)
    policy = CascadePolicy(costs=costs, routes=routes, thresholds=thresholds)
    output = policy(model, normalised(raw))
    for image in range(len(raw)):
        step = 0
        while step < 2 and margin(logits[step])[image] < thresholds[step]:
            step += 1
        assert output.routes[image] == routes[step]
        torch.testing.assert_close(output.logits[image], logits[step][image], rtol=1e-10, atol=1e-10)
        path = [dsnet.madds(model, number) for number in routes[: step + 1]]
        if len({model.member_of(number) for number in routes[: step + 1]}) == step + 1:
            assert policy.cost(model.space, routes[step]) == sum(path)
    assert len(set(output.routes.tolist())) == 3


@torch.no_grad()
def test_a_cascade_is_calibrated_and_routed_within_a_budget() -> None:
    model = make()
    x = normalised(raw_images(64))
    labels = model(x, model.space.largest).argmax(1)
    outputs = collect(model, [(x[:40], labels[:40]), (x[40:], labels[40:])], list(model.space))
    calibration = calibrate(outputs, CostTable.of_model(model), gate=False)
    router = calibration.router("cascade")
    low, high = (point.cost / router.costs.largest for point in (router.curve[0], router.curve[-1]))
    routed = Routed(model, router, f"{50 * (low + high):.3f}%")
    output = routed.run(x)
    simulation = simulate(routed.policy, outputs)
    assert [outputs.routes[c].number for c in simulation.columns.tolist()] == output.routes.tolist()
    costs = [routed.cost(number) for number in output.routes.tolist()]
    assert simulation.costs.tolist() == costs
    assert sum(costs) / len(costs) <= float(routed.budget) * (1 + 1e-9)  # type: ignore[arg-type]
    session = Session(routed)
    torch.testing.assert_close(session(x).logits, output.logits)
    assert session.mean_cost == pytest.approx(simulation.cost)
    plan = runtime.compile(routed, backend="eager", batch_buckets=(16,))
    planned = plan.run(x)
    assert planned.routes.tolist() == output.routes.tolist()
    assert_close(planned.logits, output.logits, 1e-9)
    other = make(sizes=(24, 32, 32))
    assert "router is one of" in error_of(lambda: Routed(other, router, "60%"))


# --- one module -----------------------------------------------------------------------------------------
@torch.no_grad()
def test_weights_are_saved_loaded_and_copied() -> None:
    model = make()
    x = normalised(raw_images(2))
    other = make([SMALL_NETWORKS["plain"].full(7), supernet(8), SMALL_NETWORKS["residual"].full(9)])
    expected = [model(x, route) for route in model.space]
    assert not torch.equal(other(x, 0), expected[0])
    other.load_state_dict(model.state_dict())
    duplicate = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    for result in (other, duplicate):
        for route, logits in zip(result.space, expected, strict=True):
            torch.testing.assert_close(result(x, route), logits, rtol=0, atol=0)


def test_the_plain_networks_and_sizes_of_supernets_are_not_changed() -> None:
    networks = three_networks()
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    model = make(networks)
    assert networks[1].input_spec == supernet().input_spec  # type: ignore[union-attr]
    model.float()
    for network, state in zip(networks[::2], before[::2], strict=True):
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, state[name])
            assert tensor.dtype == state[name].dtype


def test_modes_and_precisions_reach_all_members() -> None:
    model = make()
    for training in (True, False):
        model.train(training)
        assert all(m.network.training is training for m in model.members)
        assert all(module.training is training for module in model.modules())
    model.float()
    x = normalised(raw_images(2)).float()
    assert all(model(x, route).dtype == torch.float32 for route in model.space)


def test_without_a_route_there_is_no_decision() -> None:
    model = make()
    assert "no gate" in error_of(lambda: model(normalised(raw_images(1))))


# --- bad input ------------------------------------------------------------------------------------------
def plain(classes: int = CLASSES) -> nn.Module:
    network = SMALL_NETWORKS["plain"].full()
    if classes != CLASSES:
        network.add_module(str(len(list(network.children())) - 1), nn.Linear(16, classes).double().eval())
    return network


class Split(nn.Module):
    """A network that decides by the values of its images."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3))
        return self.fc(pooled) if bool(pooled.sum() > 0) else self.fc(-pooled)


@pytest.mark.parametrize(
    ("networks", "options", "parts"),
    [
        (lambda: plain(), {}, ["list of networks"]),
        (lambda: [plain()], {"sizes": (16,)}, ["2 to 16 networks", "not 1"]),
        (lambda: [plain(), "resnet"], {}, ["network 1", "str"]),
        (lambda: [plain(), plain()], {"sizes": (16,)}, ["2 sizes", "got 1"]),
        (lambda: [plain(), plain()], {"sizes": "16"}, ["one for each network", "'16'"]),
        (lambda: [plain(), plain()], {"sizes": ("16", "32")}, ["one for each network", "'16'"]),
        (lambda: [plain(), plain()], {"sizes": (16, -1)}, ["one for each network", "-1"]),
        (lambda: [plain(), plain()], {"sizes": (16, True)}, ["one for each network", "True"]),
        (lambda: [plain(), supernet()], {"sizes": (16, 33)}, ["network 1 (ds_mbnet_tiny)", "33", "32"]),
        (lambda: [TinyViT().double().eval(), plain()], {"sizes": (20, 32)}, ["network 0 (TinyViT)", "20"]),
        (lambda: [plain(), Split().double().eval()], {}, ["network 1 (Split)", "cannot be converted"]),
        (lambda: [nn.Flatten().eval(), plain()], {}, ["network 0 (Flatten)", "no weights"]),
        (lambda: [plain(), supernet().train()], {}, ["network 1", "training mode", ".eval()"]),
        (lambda: [plain().train(), plain()], {}, ["network 0", "training mode", ".eval()"]),
        (lambda: [plain(), plain(7)], {}, ["same classes", "5", "7"]),
        (lambda: [plain(), plain().float()], {}, ["same precisions", "float64", "float32"]),
        (lambda: [supernet()] * 2, {}, ["already", "image_sizes"]),
        (lambda: [plain(), plain()], {"normalisations": [NORMALISATIONS[0]]}, ["2 pairs"]),
        (lambda: [plain(), plain()], {"normalisations": [0.5, 0.5]}, ["each of 3 channels"]),
        (lambda: [plain(), plain()], {"normalisations": [((0, 0, 0), (1, 0, 1))] * 2}, ["above 0"]),
        (lambda: [plain(), plain()], {"normalisations": [((0, 0), (1, 1))] * 2}, ["each of 3 channels"]),
        (lambda: [plain(), plain()], {"interpolation": "lanczos"}, ["lanczos", "bilinear, bicubic"]),
        (lambda: [plain(), plain()], {"name": 3}, ["name", "3"]),
    ],
)
def test_what_does_not_fit_is_named(networks: Any, options: dict[str, Any], parts: list[str]) -> None:  # noqa: ANN401
    message = error_of(lambda: dsnet.cascade(networks(), **{"sizes": (16, 32), **options}))
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


def test_a_network_of_several_image_sizes_is_no_member() -> None:
    sizes = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16), num_classes=CLASSES)
    message = error_of(lambda: dsnet.cascade([plain_cnn().eval(), sizes], sizes=(16, 16)))
    assert "several image sizes" in message
