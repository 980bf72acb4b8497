"""Exact norm statistics of a detector at every route, from one pass over images."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dsnet.detection.model.fssd import Detector
from dsnet.errors import DsnetError
from dsnet.routes import Route
from dsnet.slicing import Mode
from dsnet.training.bn_calibration import Sums

__all__ = ["calibrate_detector_bn"]


@torch.no_grad()
def calibrate_detector_bn(
    detector: Detector, batches: Iterable[Tensor], routes: Iterable[Route | int] | None = None
) -> int:
    """Sets the statistics that routes use (all by default), network and detector alike; counts the images."""
    space = detector.network.space
    wanted = list(space) if routes is None else [space.resolve(route) for route in routes]
    training, sums, seen = detector.training, Sums(), 0
    detector.eval()
    try:
        for images in batches:
            for _ in detector.outputs(images, wanted, Mode(statistics=sums)):
                pass
            seen += len(images)
    finally:
        detector.train(training)
    if not seen:
        raise DsnetError("no images to re-calibrate with: the data gave no batch")
    sums.apply(lambda added: added)
    return seen
