"""Accuracies against brute force, and the accuracy of training on digits."""

from __future__ import annotations

import pytest
import torch

import dsnet
from dsnet.data import load_dataset
from dsnet.data.transforms.augment import normalise
from dsnet.training import Average, Scheme, Stage1, recalibrate
from dsnet.training.evaluation import evaluate, evaluate_gated
from dsnet.training.optim import cosine, make_optimizer, parameter_groups, set_learning_rate
from tests.support import TINY, error_of, images, randomise


@pytest.mark.parametrize("name", TINY)
def test_accuracies_equal_brute_force(name: str) -> None:
    model = randomise(dsnet.create_model(name)).requires_grad_(False)
    views = [images(model, n, seed=n) for n in (40, 25)]
    model.head.classifier.bias -= model(torch.cat(views), 1).mean(0)  # no class is the favourite of all
    batches = [(x, model(x, 1).argmax(1)) for x in views]  # route 1 is always right
    results = evaluate(model, batches)
    assert [r.route for r in results] == [route.number for route in model.space]
    for result, route in zip(results, model.space, strict=True):
        right = sum(int((model(x, route).argmax(1) == y).sum()) for x, y in batches)
        assert (result.correct, result.images) == (right, 65)
        assert result.accuracy == right / 65
        assert result.madds == dsnet.madds(model, route)
        assert result.statistics == "calibrated"
    assert results[1].accuracy == 1
    assert len({r.correct for r in results}) > 1, "all routes alike: nothing was compared"
    assert [r.route for r in evaluate(model, batches, [2, 0])] == [2, 0]
    assert "no batch" in error_of(lambda: evaluate(model, []))


def test_logits_that_are_not_finite_are_never_right() -> None:
    model = randomise(dsnet.create_model("ds_mbnet_tiny")).requires_grad_(False)
    x = images(model, 8)
    labels = model(x, 3).argmax(1)
    x[:3] = float("nan")
    (result,) = evaluate(model, [(x, torch.where(torch.arange(8) < 3, 0, labels))], [3])
    assert (result.correct, result.images) == (5, 8)  # the best of NaN is class 0
    gated = evaluate_gated(model, [(torch.full_like(x, float("nan")), torch.zeros_like(labels))])
    assert gated.correct == 0


def test_a_loop_of_the_public_parts_trains_digits() -> None:
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    mean, std = train.statistics()
    generator = torch.Generator().manual_seed(0)
    model = dsnet.create_model("ds_mbnet_tiny", generator=generator).train()
    scheme, average = Scheme.parse("e-ib"), Average(model, 0.97, warmup=True)
    stage = Stage1(scheme=scheme, average=average)
    optimizer = make_optimizer("sgd", parameter_groups([model], 1e-4), lr=0.2)
    epochs, per_epoch = 8, len(train) // 64
    for step in range(epochs * per_epoch):
        if step % per_epoch == 0:
            batches = train.epoch(64, generator)
        x, y = next(batches)
        set_learning_rate(optimizer, 0.2 * cosine(step, steps=epochs * per_epoch, warmup=per_epoch))
        optimizer.zero_grad()
        stage.step(model, scheme.draw(model.space, 2, generator), [normalise(x, mean, std)], y)
        optimizer.step()
        average.update(model)
    recalibrate(model, (normalise(x, mean, std) for x, _ in train.epoch(256)), generator=generator)
    held = [(normalise(x, mean, std), y) for x, y in test.epoch(256)]
    low, high = evaluate(model, held, [model.space.smallest, model.space.largest])
    assert low.accuracy >= 0.93
    assert high.accuracy >= 0.96
