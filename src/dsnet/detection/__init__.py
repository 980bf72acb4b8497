"""Detection: boxes, and how well they are found."""

from __future__ import annotations

from dsnet.detection.boxes import area, decode, encode, iou, match, nms
from dsnet.detection.metrics import Detections, MeanPrecision, Truth, mean_precision

__all__ = [
    "Detections",
    "MeanPrecision",
    "Truth",
    "area",
    "decode",
    "encode",
    "iou",
    "match",
    "mean_precision",
    "nms",
]
