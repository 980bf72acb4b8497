"""Evaluate a detector: at single routes, and with each image at the route that the gate chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from dsnet.core.timer import Progress, silent
from dsnet.data.dataset import chunks
from dsnet.detection.data.dataset import DetectionDataset
from dsnet.detection.data.transforms import Preprocessing
from dsnet.detection.eval.metrics import Detections, Rule, mean_average_precision
from dsnet.detection.model.fssd import Detector
from dsnet.detection.postprocess import decode_detections
from dsnet.routes import Route

__all__ = ["DetectionResult", "evaluate_detector"]

RULES: tuple[Rule, ...] = ("voc2007", "voc2010", "coco")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionResult:
    """The precision and the cost of a route, or of gated inference."""

    route: int | None  # None: each image at its gate's choice
    madds: float  # of the whole detector, mean over images
    mean: dict[str, float]  # mean average precision by rule
    classes: dict[str, float]  # average precision by the rule voc2007
    images: int
    route_counts: dict[int, int]  # images by route

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data (JSON types)."""
        return {
            "route": self.route,
            "madds": self.madds,
            "map": self.mean,
            "classes": self.classes,
            "images": self.images,
            "taken": {str(route): count for route, count in self.route_counts.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Convert from what `to_dict` returns."""
        return cls(
            route=plain["route"],
            madds=plain["madds"],
            mean=dict(plain["map"]),
            classes=dict(plain["classes"]),
            images=plain["images"],
            route_counts={int(route): count for route, count in plain["taken"].items()},
        )


@torch.no_grad()
def evaluate_detector(
    detector: Detector,
    dataset: DetectionDataset,
    preprocessing: Preprocessing,
    routes: Iterable[Route | int | None],
    *,
    batch: int = 32,
    progress: Progress = silent,
) -> Iterator[DetectionResult]:
    """Evaluate routes one by one.

    Args:
        detector: In eval mode.
        dataset: Test images and their boxes.
        preprocessing: The detector's.
        routes: Route numbers; None runs each image at the route that the gate chooses.
        batch: Images at a time.
        progress: Wraps the iterator over batches; it is called with their number and a label.

    Yields:
        The result of each route.
    """
    space = detector.network.space
    costs = {route.number: detector.cost(route, preprocessing.size).madds() for route in space}
    device = detector.norm.weight.device
    priors = detector.priors(preprocessing.size)
    for number in routes:
        route = None if number is None else space.resolve(number)
        detections: list[Detections] = []
        route_counts: Counter[int] = Counter()
        batches = chunks(torch.arange(len(dataset)), batch)
        label = "gate" if route is None else f"route {route.number}"
        for index in progress(batches, len(batches), f"{label}: batch"):
            x = preprocessing(dataset.images[index.to(dataset.images.device)].to(device))
            if route is None:
                output, numbers = detector.run(x)
                route_counts.update(numbers.tolist())
            else:
                output = detector(x, route)
                route_counts[route.number] += len(x)
            detections += decode_detections(*output, priors)
        by_rule = {rule: mean_average_precision(detections, dataset.truths, rule) for rule in RULES}
        total = sum(costs[key] * count for key, count in route_counts.items())
        yield DetectionResult(
            route=None if route is None else route.number,
            madds=total / len(dataset),
            mean={rule: result.mean for rule, result in by_rule.items()},
            classes={dataset.classes[index]: ap for index, ap in by_rule["voc2007"].classes.items()},
            images=len(dataset),
            route_counts=dict(sorted(route_counts.items())),
        )
