"""Exact norm statistics of a detector at every route, from one pass over images."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch import Tensor

from dsnet.detection.model.fssd import Detector
from dsnet.slicing import Mode
from dsnet.training.bn_calibration import set_statistics

__all__ = ["calibrate_detector_bn"]


def calibrate_detector_bn(detector: Detector, batches: Iterable[Tensor]) -> int:
    """Set the statistics of all routes, of the network and the detector alike, and count the images."""

    def run(images: Tensor, mode: Mode) -> None:
        deque(detector.outputs(images, detector.network.space, mode), maxlen=0)

    return set_statistics(detector, batches, run)
