"""From image files to boxes: every image at its route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet.data.dataset import chunks
from dsnet.data.decode import THREADS, DecodeError
from dsnet.detection.data.dataset import stretched
from dsnet.detection.data.prepare import inputs_of
from dsnet.detection.eval.evaluate import answered
from dsnet.detection.eval.metrics import Detections
from dsnet.detection.io import SavedDetector
from dsnet.detection.postprocess import detections_of
from dsnet.errors import DsnetError
from dsnet.routes import Route

__all__ = ["Found", "Missed", "find_boxes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """What an image shows, at which route, and what that cost."""

    path: str
    width: int
    height: int
    detections: Detections  # boxes as shares of the image
    route: int
    madds: int

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        """Plain data (JSON types); boxes in pixels: left, top, right, bottom."""
        sides = (self.width, self.height, self.width, self.height)
        own = self.detections
        boxes = [
            {
                "class": classes[kind],
                "score": round(score, 4),
                "box": [round(share * side, 1) for share, side in zip(box, sides, strict=True)],
            }
            for box, score, kind in zip(
                own.boxes.tolist(), own.scores.tolist(), own.classes.tolist(), strict=True
            )
        ]
        return {"path": self.path, "route": self.route, "madds": self.madds, "boxes": boxes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """An image that cannot be read or that the detector fails on, and why."""

    path: str
    error: str


@torch.no_grad()
def find_boxes(
    saved: SavedDetector,
    paths: Sequence[str | Path],
    *,
    route: int | None = None,
    score: float = 0.3,
    batch: int = 16,
) -> Iterator[Found | Missed]:
    """In the order of the paths; without a route every image at the one that the gate takes."""
    if not 0 <= score < 1:
        raise DsnetError(f"score must be at least 0 and below 1, not {score}")
    only = None if route is None else saved.detector.network.space.resolve(route)
    with ThreadPoolExecutor(THREADS) as pool:
        for at in chunks(torch.arange(len(paths)), batch):
            names = [str(paths[i]) for i in at.tolist()]
            read = list(pool.map(lambda name: _read(name, saved.prepared.size), names))
            good = {name: image for name, image in zip(names, read, strict=True) if isinstance(image, _Image)}
            found = dict(zip(good, _find(saved, list(good.values()), only, score), strict=True))
            for name, image in zip(names, read, strict=True):
                answer = found[name] if isinstance(image, _Image) else image
                if isinstance(image, _Image) and not isinstance(answer, str):
                    yield Found(
                        path=name,
                        width=image.width,
                        height=image.height,
                        detections=answer.detections,
                        route=answer.route,
                        madds=answer.madds,
                    )
                else:
                    yield Missed(path=name, error=str(answer))


class _Image(NamedTuple):
    pixels: Tensor
    width: int
    height: int


class _Answer(NamedTuple):
    detections: Detections
    route: int
    madds: int


def _read(name: str, side: int) -> _Image | str:
    try:
        pixels, (width, height) = stretched(name, side)
    except DecodeError as error:
        return str(error)
    return _Image(pixels, width, height)


def _find(
    saved: SavedDetector, images: Sequence[_Image], only: Route | None, score: float
) -> list[_Answer | str]:
    """What every image shows, or why that is not known."""
    if not images:
        return []
    detector, prepared = saved.detector, saved.prepared
    device = detector.norm.weight.device
    pixels = torch.stack([image.pixels for image in images]).to(device)
    answers, taken = answered(detector, inputs_of(pixels, prepared), only)
    # Boxes of numbers that are not finite would be NaN, or missing without a word.
    finite = torch.stack([torch.isfinite(part).all((1, 2)) for part in answers]).all(0).tolist()
    boxes = detections_of(answers.offsets, answers.logits, detector.priors(prepared.size), score=score)
    madds = {number: detector.cost(number, prepared.size).madds() for number in set(taken)}
    return [
        _Answer(own, number, madds[number])
        if good
        else f"the detector's answers at route {number} are not finite: its weights, or the mean and "
        "deviation that images are normalised by, are damaged"
        for own, number, good in zip(boxes, taken, finite, strict=True)
    ]
