"""Fine-tuning of pretrained networks: a fitted classifier, and statistics that are kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dsnet
from dsnet.models.convert import ConvertedNetwork, load_pretrained, register_network
from dsnet.models.registry import unregister
from dsnet.slicing import KeyState, Mode, SplitBatchNorm2d, batch_statistics
from dsnet.training import recalibrate, train
from dsnet.training._linear_probe import fit_classifier
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from tests.support import error_of, randomise


def small_network(num_classes: int = 10) -> nn.Module:
    """Three convolutions with batch norms."""
    layers: list[nn.Module] = []
    for width_in, width in ((3, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(width_in, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))


@pytest.fixture
def name() -> Iterator[str]:
    register_network(small_network)
    yield "small_network"
    unregister("small_network")


def convert() -> ConvertedNetwork:
    torch.manual_seed(0)
    network = randomise(small_network(4).double(), seed=1).eval()
    return dsnet.convert(network, torch.zeros(1, 3, 16, 16).double(), widths=(0.5, 1.0))


def two_classes(count: int = 96) -> tuple[Tensor, Tensor]:
    """Images whose label is the sign of their mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (count,), generator=generator)
    return x + (2 * labels - 1)[:, None, None, None], labels


def test_a_fitted_classifier_solves_the_logistic_regression() -> None:
    """Its gradient is zero at the solution, found by autograd through the whole network."""
    model = convert()
    x, labels = two_classes()
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    reached = fit_classifier(model, [(x[:48], labels[:48]), (x[48:], labels[48:])], keep_calibrated=True)
    logits = model(x, model.space.largest)
    assert reached == float((logits.argmax(1) == labels).double().mean()) > 0.9
    changed = {n for n, v in model.state_dict().items() if n in before and not torch.equal(v, before[n])}
    assert changed == {"head.classifier.weight", "head.classifier.bias"}
    (gradient,) = torch.autograd.grad(
        nn.functional.cross_entropy(model(x, model.space.largest), labels), [model.head.classifier.bias]
    )
    assert gradient.abs().max() < 1e-3  # the bias has no penalty


def test_fitting_by_batch_statistics_differs_and_one_route_can_be_fitted() -> None:
    model = convert()
    x, labels = two_classes()
    for route in model.space:
        other = copy.deepcopy(model)
        fit_classifier(other, [(x, labels)], route)
        logits = other(x, route, mode=Mode(statistics=batch_statistics))
        assert float((logits.argmax(1) == labels).double().mean()) > 0.9
    assert "no images" in error_of(lambda: fit_classifier(model, []))


def test_a_mode_keeps_calibrated_statistics_in_training_and_updates_the_others() -> None:
    norm = SplitBatchNorm2d(4, keys=2).double()
    norm.set_statistics(0, torch.arange(4.0), torch.full((4,), 2.0), 10)
    x = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm.train()
    mode = Mode(keep_calibrated=True)
    expected = (x - torch.arange(4)[:, None, None]) / (2 + norm.eps) ** 0.5
    assert torch.allclose(norm(x, 0, mode), expected)
    assert torch.allclose(norm(x, 0, Mode(statistics=batch_statistics, keep_calibrated=True)), expected)
    batch = nn.functional.batch_norm(x, None, None, training=True)
    assert torch.allclose(norm(x, 1, mode), batch)
    assert norm.states == [KeyState.CALIBRATED, KeyState.RUNNING]
    assert torch.equal(norm.mean[0], torch.arange(4.0).double())
    assert not torch.equal(norm.mean[1], torch.zeros(4).double())
    norm(x, 0)  # without the mode training goes on as ever
    assert norm.states[0] is KeyState.RUNNING


def test_recalibration_can_keep_what_is_calibrated() -> None:
    model = convert()
    x, _ = two_classes(128)
    before = {n: v.clone() for n, v in model.named_buffers()}
    recalibrate(model, [x], keep_calibrated=True)
    largest = len(model.space) - 1
    for name, module in model.named_modules():
        if isinstance(module, SplitBatchNorm2d):
            assert torch.equal(module.mean[-1], before[f"{name}.mean"][-1])
            assert set(module.states) == {KeyState.CALIBRATED}
            assert module.keys == 1 or not torch.equal(module.mean[0], before[f"{name}.mean"][0])
    assert largest == 1


@pytest.mark.parametrize("route", [None, 0])
def test_a_run_keeps_the_statistics_of_the_largest_route(
    name: str, tmp_path: Path, route: int | None
) -> None:
    network = randomise(small_network(7), seed=2)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    config = TrainConfig(
        model=name,
        options={"widths": (0.5, 1.0), "image_size": 16},
        weights=str(tmp_path / "weights.pth"),
        fit_classifier=True,
        data=DataConfig(name="digits"),
        scheme=SchemeConfig(
            name="id" if route is None else "label", random=0, keep_statistics=True, route=route
        ),
        optim=OptimConfig(lr=1e-9, epochs=1, batch=128),
        run=RunConfig(device="cpu"),
    )
    outcome = train(config, tmp_path / "run")
    trained = dsnet.load(tmp_path / "run").model
    start = load_pretrained(name, tmp_path / "weights.pth", widths=(0.5, 1.0), image_size=16, num_classes=10)
    assert isinstance(start, ConvertedNetwork)
    assert start.new_classifier
    statistics = [
        (m.mean[-1].sort().values, m.keys) for m in start.modules() if isinstance(m, SplitBatchNorm2d)
    ]
    for (mean, keys), module in zip(
        statistics, (m for m in trained.modules() if isinstance(m, SplitBatchNorm2d)), strict=True
    ):
        kept = route is None or keys == 1
        assert (
            torch.equal(module.mean[-1].sort().values, mean) or not kept
        )  # sorted otherwise: by activations
    guess = 0.1
    assert outcome.test[-1].accuracy > 3 * guess  # by the fitted classifier alone


def test_a_classifier_can_be_fitted_to_pretrained_features_only() -> None:
    assert "fit_classifier" in error_of(lambda: TrainConfig(fit_classifier=True))
