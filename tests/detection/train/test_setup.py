"""The datasets of a detector's training run."""

from __future__ import annotations

from pathlib import Path

import torch

from dsnet.detection.data.dataset import read_splits
from dsnet.detection.data.summary import count_split, describe_run
from dsnet.detection.train.config import DetectionConfig, DetectionDataConfig, DetectionOptimConfig
from dsnet.detection.train.setup import open_datasets
from dsnet.training.callbacks import Callback
from tests.support import error_of
from tests.support.boxes import SIZE


def test_a_batch_may_have_all_training_images(voc: Path) -> None:
    train, test = (count_split(read_splits(voc, split)) for split in ("trainval", "test"))
    assert train.images == 18
    full, over = (
        DetectionConfig(
            data=DetectionDataConfig(root=str(voc), size=SIZE),
            optim=DetectionOptimConfig(epochs=2, batch=batch),
        )
        for batch in (18, 19)
    )
    assert "2 epochs of 1 step with 18 images" in describe_run(full, train, test, routes=1)
    assert len(open_datasets(full, torch.device("cpu"), Callback())[0]) == 18
    message = error_of(lambda: open_datasets(over, torch.device("cpu"), Callback()))
    assert message == "18 training images do not fill a batch of 19: lower optim.batch"
    assert message in describe_run(over, train, test, routes=1)
