"""Plans for detectors: the same machinery, for a network whose answer is boxes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsnet.detection.found import detections_of
from dsnet.detection.fssd import Answers, Detector, RoutedAnswers
from dsnet.detection.metrics import Detections
from dsnet.routes import Route
from dsnet.runtime.engine import Engine
from dsnet.runtime.plan import Plan

__all__ = ["DetectorPlan", "answers_of"]


@dataclass(frozen=True, slots=True, eq=False)
class DetectorPlan:
    """A detector made ready for a device, called like the detector."""

    plan: Plan
    priors: Tensor  # [p, 4]
    classes: int

    @classmethod
    def of(cls, plan: Plan, detector: Detector, image_size: int | tuple[int, int] | None) -> DetectorPlan:
        """A plan of the parts of `pack_detector`."""
        return cls(plan, detector.priors(image_size).to(plan.engine.device), detector.classes)

    @property
    def engine(self) -> Engine:
        """Its executables."""
        return self.plan.engine

    def __call__(self, x: Tensor, route: Route | int | None = None) -> Answers:
        """Images [B, C, H, W] → answers for every prior, at one route or, without one, routed."""
        return self._answers(self.plan(x, route))

    def run(self, x: Tensor) -> RoutedAnswers:
        """Answers, and the routes that gave them."""
        found = self.plan.run(x)
        return RoutedAnswers(self._answers(found.logits), found.routes)

    def route(self, x: Tensor) -> Tensor:
        """The number [B] of the route that answers each image."""
        return self.plan.route(x)

    def detect(
        self, x: Tensor, route: Route | int | None = None, *, score: float = 0.3, most: int = 200
    ) -> list[Detections]:
        """Boxes of every image as shares of it, best first."""
        answers = self(x, route)
        return detections_of(answers.offsets, answers.logits, self.priors, score=score, most=most)

    def _answers(self, row: Tensor) -> Answers:
        count = len(self.priors)
        return Answers(
            row[:, : 4 * count].view(len(row), count, 4),
            row[:, 4 * count :].view(len(row), count, 1 + self.classes),
        )

    def __repr__(self) -> str:
        return f"Detector{self.plan!r}"


def answers_of(detector: Detector, image_size: int | tuple[int, int] | None) -> int:
    """How many numbers a detector answers with for an image."""
    return len(detector.priors(image_size)) * (4 + 1 + detector.classes)
