"""Detect objects in image files, each image at its own route, on a plan of the runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet import runtime
from dsnet.data.decode import DecodeError, decode_ahead
from dsnet.detection.data.dataset import open_square
from dsnet.detection.deploy.plan import DetectorPlan
from dsnet.detection.eval.metrics import Detections
from dsnet.detection.io import SavedDetector
from dsnet.errors import DsnetError
from dsnet.inference.classify import FailedImage, compile_settings

__all__ = ["ImageDetections", "detect_files"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageDetections:
    """The boxes in an image file, the route that found them and its cost."""

    path: str
    width: int
    height: int
    detections: Detections  # boxes as shares of the image
    route: int
    madds: int

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        """Convert to plain data (JSON types), boxes in pixels: left, top, right, bottom."""
        sides = (self.width, self.height, self.width, self.height)
        d = self.detections
        rows = zip(d.boxes.tolist(), d.scores.tolist(), d.classes.tolist(), strict=True)
        boxes = [
            {
                "class": classes[label],
                "score": round(score, 4),
                "box": [round(share * side, 1) for share, side in zip(box, sides, strict=True)],
            }
            for box, score, label in rows
        ]
        return {"path": self.path, "route": self.route, "madds": self.madds, "boxes": boxes}


def detect_files(
    saved: SavedDetector,
    paths: Sequence[str | Path],
    *,
    route: int | None = None,
    score: float = 0.3,
    batch: int = 16,
    backend: str = "eager",
) -> Iterator[ImageDetections | FailedImage]:
    """Detect objects in image files.

    Args:
        saved: What `load_detector` returns.
        paths: Image files.
        route: The route of all images; by default each image takes its gate's choice.
        score: Boxes with at most this probability are dropped.
        batch: Images at a time.
        backend: The runtime backend, see `dsnet.runtime.compile`.

    Yields:
        A result for each image, in the order of ``paths``.

    Raises:
        DsnetError: The score is not in [0, 1), or the detector has no such route.
    """
    if not 0 <= score < 1:
        raise DsnetError(f"score must be at least 0 and below 1, not {score}")
    size = saved.preprocessing.size
    plan = runtime.compile(
        saved.detector,
        image_size=size,
        routes=None if route is None else [route],
        **compile_settings(backend),
    )
    names = [os.fspath(path) for path in paths]
    following = decode_ahead(lambda name: open_square(name, size), names, ahead=batch)
    for start in range(0, len(names), batch):
        group = names[start : start + batch]
        decoded = list(zip(group, following, strict=False))
        images = [image for _, image in decoded if not isinstance(image, DecodeError)]
        results = iter(_detect(saved, plan, images, route, score) if images else ())
        for name, image in decoded:
            if isinstance(image, DecodeError):
                yield FailedImage(name, str(image), readable=False)
                continue
            _, (width, height) = image
            detections, number, valid = next(results)
            if valid:
                yield ImageDetections(
                    path=name,
                    width=width,
                    height=height,
                    detections=detections,
                    route=number,
                    madds=saved.detector.cost(number, size).madds(),
                )
                continue
            error = (
                f"the detector's predictions at route {number} are not finite: its weights, or the mean and "
                "deviation that images are normalised by, are damaged"
            )
            yield FailedImage(name, error, readable=True)


@torch.inference_mode()
def _predict(plan: DetectorPlan, x: Tensor, route: int | None) -> tuple[Tensor, list[int]]:
    """Return the predictions [B, values] of a plan, and the routes of the images."""
    if route is not None:
        return plan.plan(x, route), [route] * len(x)
    result = plan.plan.run(x)
    return result.logits, result.routes.tolist()


def _detect(
    saved: SavedDetector,
    plan: DetectorPlan,
    images: Sequence[tuple[Tensor, tuple[int, int]]],
    route: int | None,
    score: float,
) -> Iterator[tuple[Detections, int, bool]]:
    """Return the detections of each image, its route, and whether its predictions are finite."""
    pixels = torch.stack([image for image, _ in images]).to(plan.network.device)
    row, routes = _predict(plan, saved.preprocessing(pixels), route)
    finite = row.isfinite().all(1).tolist()  # other boxes would be NaN, or silently missing
    return zip(plan.boxes(row, score=score), routes, finite, strict=True)
