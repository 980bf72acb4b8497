"""Batches of training images, with CUDA graphs and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsnet.core.seeding import seeded
from dsnet.detection.boxes import prior_boxes
from dsnet.detection.data.dataset import load_detection_dataset, read_splits
from dsnet.detection.data.transforms import Preprocessing
from dsnet.detection.train import _batches
from dsnet.detection.train._batches import DetectionBatches
from dsnet.detection.train.config import DetectionConfig, DetectionDataConfig, DetectionOptimConfig
from tests.support import assert_close
from tests.support.boxes import SIZE, reference_targets

PRIORS = prior_boxes([(8, 8), (4, 4)], [(2.0,), (2.0,)])


def batches(voc: Path, *, augment: bool, graphs: bool) -> DetectionBatches:
    """Batches of 6 of the 18 training images, which are not normalised."""
    pictures, _ = load_detection_dataset(read_splits(voc, "trainval"), SIZE)
    config = DetectionConfig(
        data=DetectionDataConfig(size=SIZE, augment=augment), optim=DetectionOptimConfig(batch=6)
    )
    return DetectionBatches(
        config, pictures, Preprocessing(SIZE, (0.0,) * 3, (1.0,) * 3), PRIORS, graphs=graphs
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_batches_that_are_not_augmented(voc: Path, graphs: bool) -> None:
    data = batches(voc, augment=False, graphs=graphs)
    order = torch.randperm(18, generator=seeded(0, "order", 1)).split(6)
    truths = data.dataset.truths
    for chosen, (x, targets) in zip(order, data.epoch(1, 0, 3), strict=True):
        assert_close(x, data.dataset.images[chosen] / 255, 1e-4)
        boxes = [torch.from_numpy(truths[i].boxes).float() for i in chosen.tolist()]
        classes = [torch.from_numpy(truths[i].classes) for i in chosen.tolist()]
        expected = reference_targets(PRIORS, boxes, classes)
        assert torch.equal(targets.classes, expected.classes)
        assert_close(targets.offsets, expected.offsets, 1e-5)


@pytest.mark.parametrize(
    ("augment", "graphs", "calls"),
    [(True, True, 3), (True, False, 0), (False, True, 0), (False, False, 0)],
)
def test_only_augmented_batches_run_as_graphs(
    voc: Path, monkeypatch: pytest.MonkeyPatch, augment: bool, graphs: bool, calls: int
) -> None:
    captured: list[int] = []

    def graphed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:  # noqa: ANN401
            captured.append(given[1].classes.shape[1])
            return function(*given)

        return run

    expected = list(batches(voc, augment=augment, graphs=False).epoch(0, 0, 3))
    monkeypatch.setattr(_batches, "GraphedFunction", graphed)
    found = list(batches(voc, augment=augment, graphs=graphs).epoch(0, 0, 3))
    assert captured == [8] * calls  # one or two boxes an image, padded so that one graph serves all batches
    for (x, targets), (plain, reference) in zip(found, expected, strict=True):
        assert torch.equal(x, plain)
        assert torch.equal(targets.classes, reference.classes)
        assert torch.equal(targets.offsets, reference.offsets)
