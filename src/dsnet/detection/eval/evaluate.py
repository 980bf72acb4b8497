"""How well a detector finds boxes: every route, or each image at the route that the gate takes for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dsnet.data.dataset import chunks
from dsnet.detection.data.augment import whole
from dsnet.detection.data.dataset import Pictures, Progress
from dsnet.detection.data.prepare import Prepared, prepare
from dsnet.detection.eval.metrics import Detections, Rule, mean_precision
from dsnet.detection.model.fssd import Answers, Detector
from dsnet.detection.postprocess import detections_of
from dsnet.routes import Route

__all__ = ["DetectionResult", "answered", "evaluate_detector"]

RULES: tuple[Rule, ...] = ("voc2007", "voc2010", "coco")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionResult:
    """What a route, or the gate, reached."""

    route: int | None  # none: every image at its own
    madds: float  # of the whole detector, mean over images
    mean: dict[str, float]  # mean average precision, by rule
    classes: dict[str, float]  # average precision by VOC's rule of 2007
    images: int
    taken: dict[int, int]  # how many images ran at which route

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        return {
            "route": self.route,
            "madds": self.madds,
            "map": self.mean,
            "classes": self.classes,
            "images": self.images,
            "taken": {str(route): count for route, count in self.taken.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave."""
        return cls(
            route=plain["route"],
            madds=plain["madds"],
            mean=dict(plain["map"]),
            classes=dict(plain["classes"]),
            images=plain["images"],
            taken={int(route): count for route, count in plain["taken"].items()},
        )


@torch.no_grad()
def evaluate_detector(
    detector: Detector,
    pictures: Pictures,
    prepared: Prepared,
    routes: Iterable[Route | int | None],
    *,
    batch: int = 32,
    precision: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Iterator[DetectionResult]:
    """One result a route; for `None` every image at the route that the gate takes."""
    space = detector.network.space
    costs = {route.number: detector.cost(route, prepared.size).madds() for route in space}
    device = detector.norm.weight.device
    priors = detector.priors(prepared.size)
    for wanted in routes:
        route = None if wanted is None else space.resolve(wanted)
        found: list[Detections] = []
        taken: Counter[int] = Counter()
        parts: Iterable[Tensor] = chunks(torch.arange(len(pictures)), batch)
        if progress is not None:
            label = "gate" if route is None else f"route {route.number}"
            parts = progress(parts, -(-len(pictures) // batch), f"{label}: batch")
        for at in parts:
            where = at.to(pictures.images.device)
            some = pictures.boxes.take(where).to(device)
            x, _ = whole(pictures.images[where].to(device), some, prepared.size, prepared.mean)
            x = prepare(x, prepared)
            with torch.autocast(device.type, precision, enabled=precision is not None):
                answers, own = answered(detector, x, route)
            taken.update(own)
            found += detections_of(answers.offsets, answers.logits, priors)
        yield _result(pictures, found, route, taken, costs)


def answered(detector: Detector, x: Tensor, route: Route | None) -> tuple[Answers, list[int]]:
    """Answers at one route or, without one, gated; and the routes that gave them."""
    if route is not None:
        return detector(x, route), [route.number] * len(x)
    found = detector.run(x)
    return found.answers, found.routes.tolist()


def _result(
    pictures: Pictures,
    found: Sequence[Detections],
    route: Route | None,
    taken: Counter[int],
    costs: dict[int, int],
) -> DetectionResult:
    by_rule = {rule: mean_precision(found, pictures.truths, rule) for rule in RULES}
    return DetectionResult(
        route=None if route is None else route.number,
        madds=sum(costs[number] * count for number, count in taken.items()) / sum(taken.values()),
        mean={rule: result.mean for rule, result in by_rule.items()},
        classes={pictures.classes[number]: ap for number, ap in by_rule["voc2007"].classes.items()},
        images=len(pictures),
        taken=dict(sorted(taken.items())),
    )
