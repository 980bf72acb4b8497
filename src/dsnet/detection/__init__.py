"""Detection: FSSD on a supernet, its data, training, evaluation and plans.

Importing this package registers the detector's partitioner, so that `dsnet.runtime.compile` takes detectors.
"""

from __future__ import annotations

from dsnet.detection.boxes import area, decode, encode, iou, match, nms
from dsnet.detection.deploy.plan import DetectorPlan
from dsnet.detection.eval.metrics import Detections, GroundTruth, MeanAveragePrecision, mean_average_precision
from dsnet.detection.io import SavedDetector
from dsnet.detection.model.fssd import Detector

__all__ = [
    "Detector",
    "DetectorPlan",
    "Detections",
    "MeanAveragePrecision",
    "GroundTruth",
    "SavedDetector",
    "area",
    "decode",
    "encode",
    "iou",
    "match",
    "mean_average_precision",
    "nms",
]
