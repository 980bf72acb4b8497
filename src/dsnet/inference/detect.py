"""Detect objects in image files, each image at its own route, on a plan of the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet import runtime
from dsnet.data.dataset import chunks
from dsnet.data.decode import THREADS, DecodeError
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
        found = self.detections
        rows = zip(found.boxes.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True)
        boxes = [
            {
                "class": classes[label],
                "score": round(score, 4),
                "box": [round(share * side, 1) for share, side in zip(box, sides, strict=True)],
            }
            for box, score, label in rows
        ]
        return {"path": self.path, "route": self.route, "madds": self.madds, "boxes": boxes}


class _Image(NamedTuple):
    path: str
    pixels: Tensor  # [3, size, size]
    width: int
    height: int


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
    with ThreadPoolExecutor(THREADS) as pool:
        for index in chunks(torch.arange(len(paths)), batch):
            names = [str(paths[i]) for i in index.tolist()]
            opened = list(pool.map(lambda name: _open(name, size), names))
            images = [image for image in opened if isinstance(image, _Image)]
            results = _detect(saved, plan, images, route, score) if images else iter(())
            yield from (next(results) if isinstance(image, _Image) else image for image in opened)


def _open(path: str, side: int) -> _Image | FailedImage:
    try:
        pixels, (width, height) = open_square(path, side)
    except DecodeError as error:
        return FailedImage(path, str(error), readable=False)
    return _Image(path, pixels, width, height)


@torch.inference_mode()
def _predict(plan: DetectorPlan, x: Tensor, route: int | None) -> tuple[Tensor, list[int]]:
    """Return the predictions [B, values] of a plan, and the routes of the images."""
    if route is not None:
        return plan.plan(x, route), [route] * len(x)
    result = plan.plan.run(x)
    return result.logits, result.routes.tolist()


def _detect(
    saved: SavedDetector, plan: DetectorPlan, images: Sequence[_Image], route: int | None, score: float
) -> Iterator[ImageDetections | FailedImage]:
    pixels = torch.stack([image.pixels for image in images]).to(plan.network.device)
    row, routes = _predict(plan, saved.preprocessing(pixels), route)
    finite = torch.isfinite(row).all(1).tolist()  # boxes of other values would be NaN, or silently missing
    detections = plan.boxes(row, score=score)
    madds = {number: saved.detector.cost(number, saved.preprocessing.size).madds() for number in set(routes)}
    for image, found, number, valid in zip(images, detections, routes, finite, strict=True):
        if not valid:
            reason = (
                f"the detector's predictions at route {number} are not finite: its weights, or the mean and "
                "deviation that images are normalised by, are damaged"
            )
            yield FailedImage(image.path, reason, readable=True)
            continue
        yield ImageDetections(
            path=image.path,
            width=image.width,
            height=image.height,
            detections=found,
            route=number,
            madds=madds[number],
        )
