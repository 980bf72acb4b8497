"""Errors of models say what was given and what is possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dsnet
from dsnet.gate import Gate
from dsnet.models.group_by_route import Decide, run_gated
from dsnet.routes import Route
from tests.support import SUPERNETS, error_of, images, random_model


def test_a_route_of_another_model_is_an_error() -> None:
    model, other = random_model("ds_mbnet_tiny"), random_model("ds_mbnet_plus_tiny")
    for call in (
        lambda: model(images(model, 1), other.space[0]),
        lambda: dsnet.madds(model, other.space[0]),
        lambda: dsnet.extract(model, other.space[0]),
        lambda: model.bind(other.space[0]),
    ):
        assert "ds_mbnet_plus_tiny" in error_of(call)
        assert "ds_mbnet_tiny" in error_of(call)


def test_a_width_that_is_not_a_multiple_of_the_group_is_an_error() -> None:
    model = random_model("ds_mbnet_tiny")
    data = model.space[1].to_dict()
    data["stages"][0]["width"] = 25
    message = error_of(lambda: model(images(model, 1), Route.from_dict(data)))
    assert "width=25" in message
    assert "width=24" in message


@pytest.mark.parametrize("route", [-1, 4, True, 1.0, "largest"])
def test_an_invalid_route_is_an_error(route: object) -> None:
    model = random_model("ds_mbnet_tiny")
    message = error_of(lambda: model(images(model, 1), route))
    assert "0 to 3" in message or "not" in message


def test_wrong_channels_and_ranks_are_errors() -> None:
    model = random_model("ds_mbnet_tiny")
    assert "[2, 1, 16, 16]" in error_of(lambda: model(torch.zeros(2, 1, 16, 16), 0))
    assert "[batch, 3, height, width]" in error_of(lambda: model(torch.zeros(3, 16, 16), 0))


@pytest.mark.parametrize(
    ("name", "size", "nearest"),
    [
        ("ds_mbnet", (225, 224), "224 × 224"),
        ("ds_mbnet", (40, 250), "32 × 256"),
        ("ds_mbnet_plus", (32, 32), "64 × 64"),
        ("ds_mbnet_plus_cifar", (8, 32), "16 × 32"),
        ("ds_vit_plus", (231, 224), "224 × 224"),
        ("ds_resnet_tiny", (15, 1), "16 × 2"),
        ("ds_mbnet", (1, 1), "32 × 32"),
    ],
)
def test_an_invalid_image_size_names_the_nearest_valid_one(
    name: str, size: tuple[int, int], nearest: str
) -> None:
    model = dsnet.create_model(name, device="meta")
    for call in (
        lambda: model(torch.empty(1, 3, *size, device="meta"), 0),
        lambda: dsnet.madds(model, 0, size),
    ):
        message = error_of(call)
        assert f"{size[0]} × {size[1]}" in message
        assert nearest in message


@pytest.mark.parametrize("name", SUPERNETS)
def test_the_smallest_image_runs_at_the_smallest_and_largest_route(name: str) -> None:
    model = dsnet.create_model(name, device="meta")
    least = max(model.input_spec.smallest, model.input_spec.stride)
    for route in (model.space.smallest, model.space.largest):
        x = torch.empty(1, 3, least, 2 * least, device="meta")
        assert model(x, route).shape[0] == 1
        assert dsnet.madds(model, route, (least, 2 * least)) > 0


def test_a_gated_pass_in_training_mode_is_an_error() -> None:
    model = dsnet.create_model("ds_mbnet_tiny").train()
    assert "eval" in error_of(lambda: model(images(model, 2)))


def test_unknown_models_and_options_are_errors() -> None:
    assert "did you mean ds_mbnet" in error_of(lambda: dsnet.create_model("ds_mbnett"))
    assert "ds_resnet_plus" in error_of(lambda: dsnet.create_model("zzz"))
    assert "num_classes" in error_of(lambda: dsnet.create_model("ds_mbnet_tiny", classes=3))
    assert "batch, group" in error_of(lambda: dsnet.create_model("ds_mbnet_tiny", norm="layer"))
    assert "silu, relu, hard_swish" in error_of(
        lambda: dsnet.create_model("ds_mbnet_tiny", activation="tanh")
    )
    assert "stage, prefix" in error_of(lambda: dsnet.create_model("ds_resnet_tiny", bn_key="all"))
    assert "onehot, scalar" in error_of(lambda: dsnet.create_model("ds_vit_plus_tiny", gate_head="x"))
    assert "positive" in error_of(lambda: dsnet.create_model("ds_vit_plus_tiny", num_classes=0))
    assert "has no option norm" in error_of(lambda: dsnet.create_model("ds_vit_plus_tiny", norm="group"))
    assert "above 0" in error_of(lambda: dsnet.create_model("resnet50", width=0))


def test_unknown_narrowings_are_errors() -> None:
    assert "no named spaces" in error_of(lambda: random_model("ds_mbnet_tiny").space.narrow("S"))
    space = dsnet.create_model("ds_vit_plus", device="meta").space
    assert "Ti, S, M, L" in error_of(lambda: space.narrow("XL"))
    space = random_model("ds_resnet_tiny").space
    assert "every combination" in error_of(lambda: space.narrow([0, 1, 2]))


@pytest.mark.parametrize(
    ("decide", "words"),
    [
        (lambda scores, stage, previous: torch.zeros(1, dtype=torch.long), ["each of 4 images", "[1]"]),
        (lambda scores, stage, previous: torch.ones(4, dtype=torch.bool), ["each of 4 images", "bool"]),
        (lambda scores, stage, previous: 1, ["each of 4 images", "int"]),
        (lambda scores, stage, previous: torch.full((4,), 9), ["position 9", "0 to 3"]),
        (lambda scores, stage, previous: torch.full((4,), -1), ["position -1", "0 to 3"]),
        (lambda scores, stage, previous: scores, ["each of 4 images", "[4, 4]"]),
        (lambda scores, stage, previous: scores[:, 0], ["each of 4 images", "float"]),
    ],
)
def test_invalid_decisions_are_errors(decide: Decide, words: list[str]) -> None:
    model = random_model("ds_mbnet_tiny")
    message = error_of(lambda: run_gated(model, images(model, 4), decide))
    for word in words:
        assert word in message


def test_invalid_choices_and_sizes_are_errors() -> None:
    model = random_model("ds_resnet_tiny")
    state = model.run_prefix(images(model, 2))
    for choices in ((0, 4), (-1, 0), [0, 0], 0, None):
        assert "0 to 3 × 0 to 3" in error_of(lambda c=choices: model.run_last_segment(state, c))
    assert "expected 1 choice at gate 0, got" in error_of(lambda: model.run_last_segment(state, (0, 0)))
    assert "expected 1 choice at gate 0, got" in error_of(lambda: model.run_last_segment(state, ()))
    assert "use run_segment" in error_of(lambda: model.run_last_segment(state, (0,)))
    further = model.run_segment(state, (0,))
    assert "use run_last_segment" in error_of(lambda: model.run_segment(further, (0, 0)))
    for size in ((16, 16, 16), (16.0, 16), "16", 16.0, torch.zeros(2)):
        assert "(height, width)" in error_of(lambda s=size: dsnet.madds(model, 0, s))
    assert dsnet.madds(model, 0, np.int64(16)) == dsnet.madds(model, 0, 16)
    assert type(dsnet.madds(model, 0, (np.int64(16), 16))) is int


def test_images_that_do_not_fit_the_network_are_errors() -> None:
    model = random_model("ds_mbnet_tiny")
    x = images(model, 2)
    assert x.dtype is torch.float64
    for call in (lambda y: model(y, 0), model, model.route, model.run_prefix, lambda y: run_gated(model, y)):
        assert "torch.float32" in error_of(lambda c=call: c(x.float()))
        assert "torch.uint8" in error_of(lambda c=call: c(x.to(torch.uint8)))
        assert "meta" in error_of(lambda c=call: c(x.to("meta")))
        assert "ndarray" in error_of(lambda c=call: c(x.numpy()))
        assert "15 × 15" in error_of(lambda c=call: c(torch.zeros(1, 3, 15, 15, dtype=x.dtype)))
        assert "[2, 1, 16, 16]" in error_of(lambda c=call: c(x[:, :1]))
    on_meta = dsnet.create_model("ds_mbnet_tiny", device="meta")
    assert "give a route" in error_of(lambda: on_meta(torch.empty(2, 3, 16, 16, device="meta")))


def test_integers_of_numpy_and_torch_are_accepted() -> None:
    model = random_model("ds_mbnet_tiny")
    x = images(model, 2)
    expected = model(x, 1)
    for one in (np.int64(1), torch.tensor(1), np.uint8(1)):
        assert torch.equal(model(x, one), expected)
    assert model.space.of_choices(torch.tensor([2])) is model.space[2]
    for none in ([0.7], ["1"], [True], 0, None, [[0]]):
        assert "no route for the choices" in error_of(lambda n=none: model.space.of_choices(n))


def test_gates_with_choices_outside_of_the_network_are_errors() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    x = images(model, 2)
    with pytest.raises(AttributeError):
        model.space = model.space.narrow([0, 1])
    model.gates[0] = Gate(12, choices=(7, 9))
    assert "does not have: [7, 9]" in error_of(lambda: model(x))
    model.gates[0] = Gate(12)
    assert "no routing head" in error_of(lambda: model(x))
    for choices in ((), (0, -1), (True,), ("a",)):
        assert "numbers of its choices" in error_of(lambda c=choices: Gate(12, choices=c))


def test_options_of_reference_networks_are_checked() -> None:
    for name, options in (
        ("mobilenet_v1", {"num_classes": 0}),
        ("mobilenet_v1", {"num_classes": "abc"}),
        ("mobilenet_v1", {"width": "abc"}),
        ("mobilenet_v1", {"width": True}),
        ("deit", {"heads": 0}),
        ("deit", {"depth": -3}),
        ("deit", {"mlp_ratio": -1}),
        ("ds_mbnet_tiny", {"num_classes": True}),
        ("ds_mbnet_tiny", {"in_channels": 10**30}),
    ):
        (key, value), *_ = options.items()
        message = error_of(lambda n=name, o=options: dsnet.create_model(n, **o))
        assert key in message
        assert repr(value) in message
    assert "torch.dtype" in error_of(lambda: dsnet.create_model("ds_mbnet_tiny", dtype="float32"))
    assert "torch.dtype" in error_of(lambda: dsnet.create_model("ds_mbnet_tiny", dtype=torch.int32))
    assert "Generator" in error_of(lambda: dsnet.create_model("ds_mbnet_tiny", generator=3))
    assert "supernet, twin" in error_of(lambda: dsnet.list_models("supernets"))
    assert "32 × 32" in error_of(lambda: dsnet.madds(dsnet.create_model("deit", device="meta"), None, 32))
    assert dsnet.madds(dsnet.create_model("resnet50", width=0.005, device="meta")) > 0
