"""Re-calibrated statistics are those of all inputs of each norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.slicing import KeyState, SplitBatchNorm2d
from dsnet.training import recalibrate
from tests.support import TINY, assert_close, error_of, images, randomise
from tests.support.image_sizes import ByHand, shrink
from tests.support.networks import three_gates


def watch(model: dsnet.Supernet) -> dict[tuple[SplitBatchNorm2d, int], list[Tensor]]:
    """Record the inputs of norms by key."""
    inputs: dict[tuple[SplitBatchNorm2d, int], list[Tensor]] = {}
    for module in model.modules():
        if isinstance(module, SplitBatchNorm2d):

            def note(norm: SplitBatchNorm2d, args: tuple) -> None:
                inputs.setdefault((norm, args[1]), []).append(args[0].clone())

            module.register_forward_pre_hook(note)
    return inputs


@pytest.mark.parametrize("options", [{}, {"bn_key": "stage"}])
@pytest.mark.parametrize("name", TINY)
def test_statistics_are_exact(name: str, options: dict[str, str]) -> None:
    if "vit" in name and options:
        options = {}
    check_statistics(randomise(dsnet.create_model(name, dtype=torch.float64, **options)))


def check_statistics(model: dsnet.Supernet) -> None:
    inputs = watch(model)
    batches = [images(model, count, seed=count) for count in (7, 5, 6)]
    assert recalibrate(model, batches, generator=torch.Generator().manual_seed(0)) == 18
    norms = [m for m in model.modules() if isinstance(m, SplitBatchNorm2d)]
    used = {(norm, key) for route in model.space for norm, key in model.norms(route.choices)}
    assert set(inputs) == used
    assert {norm for norm, _ in used} == set(norms)
    for (norm, key), seen in inputs.items():
        everything = torch.cat([x.transpose(0, 1).flatten(1) for x in seen], 1)
        channels = everything.shape[0]
        assert_close(norm.mean[key, :channels], everything.mean(1), 1e-9)
        assert_close(norm.var[key, :channels], everything.var(1, correction=0), 1e-9)
        assert norm.count[key] == everything.shape[1]
        assert norm.states[key] is KeyState.CALIBRATED


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("ds_mbnet_tiny", (8, 16), {}),
        ("ds_resnet_tiny", (8, 16), {}),
        ("ds_resnet_tiny", (8, 16), {"bn_key": "stage"}),
        ("ds_resnet_plus_tiny", (8, 12, 16), {}),
        ("ds_vit_plus_tiny", (8, 16), {}),
    ],
)
def test_statistics_of_every_image_size_are_exact(
    name: str, sizes: tuple[int, ...], options: dict[str, str]
) -> None:
    model = randomise(dsnet.create_model(name, dtype=torch.float64, image_sizes=sizes, **options))
    before = [m.mean.clone() for m in model.modules() if isinstance(m, SplitBatchNorm2d)]
    check_statistics(model)
    for norm, old in zip(
        (m for m in model.modules() if isinstance(m, SplitBatchNorm2d)), before, strict=True
    ):
        assert (norm.mean != old).any()
    for member in model.members:  # what each norm sees is an image of this size
        stem, key = next(iter(member.network.norms(())))
        side = member.image_size
        assert stem.count[key] == 18 * side**2


def test_the_statistics_of_a_size_are_those_of_a_network_of_this_size() -> None:
    model = randomise(dsnet.create_model("ds_resnet_plus_tiny", dtype=torch.float64, image_sizes=(8, 16)))
    x, by_hand = images(model, 9), ByHand(model.eval())
    recalibrate(model, [x])
    for size in (8, 16):
        recalibrate(by_hand.network, [shrink(x, size)])
        for route in model.space:
            if route.image_size == size:
                assert_close(model(x, route), by_hand.run_stages(x, route)[0], 1e-10)


def test_only_given_routes_of_a_size_get_statistics() -> None:
    model = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16))
    kept = [route for route in model.space if route.image_size == 8][:2]
    recalibrate(model, [images(model, 8)], kept)
    stem = model.networks[0].stem.norm
    assert stem.states == [KeyState.CALIBRATED, KeyState.FRESH]
    for route in model.space:
        assert (model.key_states(route) == {KeyState.CALIBRATED}) == (route in kept)
    assert "takes 16 × 16 only" in error_of(lambda: recalibrate(model, [torch.zeros(8, 3, 8, 8)]))


@pytest.mark.parametrize("bn_key", ["prefix", "stage"])
def test_statistics_behind_three_gates_are_exact(bn_key: str) -> None:
    check_statistics(three_gates(torch.float64, bn_key))


def test_a_shared_key_sees_each_previous_choice_once_a_batch() -> None:
    model = three_gates(torch.float32, "stage")
    recalibrate(model, [images(model, 8)], generator=torch.Generator().manual_seed(0))
    for choice in range(4):
        *_, (norm, key) = model.norms((0, 0, choice))  # of the last stage, on maps of 8 × 8
        assert norm.count[key] == 4 * 8 * 8 * 8


def test_the_prefix_is_counted_once_for_all_routes() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    recalibrate(model, [images(model, 8)])
    assert model.stem.norm.count.tolist() == [8 * 16 * 16]


def test_old_statistics_do_not_matter() -> None:
    results = []
    for seed in (1, 2):
        model = randomise(dsnet.create_model("ds_resnet_plus_tiny", dtype=torch.float64), seed=0)
        for norm in model.modules():
            if isinstance(norm, SplitBatchNorm2d):
                norm.mean.normal_(generator=torch.Generator().manual_seed(seed))
        recalibrate(model, [images(model, 8)])
        results.append(model(images(model, 2), 1))
    assert_close(results[0], results[1], 1e-12)


def test_only_the_given_routes_get_statistics() -> None:
    model = dsnet.create_model("ds_mbnet_tiny").train()
    recalibrate(model, [images(model, 8)], [0, 3])
    assert model.training
    model.eval()
    assert model.key_states(0) == model.key_states(3) == {KeyState.CALIBRATED}
    assert "dsnet recalibrate" in error_of(lambda: model(images(model, 2), 1))
    assert "no batch" in error_of(lambda: recalibrate(model, []))
