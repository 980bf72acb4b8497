"""Plans for detectors: the same machinery, for a network whose answer is boxes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsnet.core.cuda_graphs import stream_pool
from dsnet.core.process_bound import InProcess
from dsnet.detection.deploy.partition import pack_detector, split_detector
from dsnet.detection.eval.metrics import Detections
from dsnet.detection.model.fssd import Answers, Detector, RoutedAnswers
from dsnet.detection.postprocess import best_boxes, check_wanted, detections_in, detections_of, unaided
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routes import Route
from dsnet.runtime.executors.host import CompiledNetwork
from dsnet.runtime.partition.partitioner import PartitionRequest, register_partitioner
from dsnet.runtime.partition.segments import Segment, SegmentKey, SharedHead
from dsnet.runtime.plan import Plan

__all__ = ["DetectorPlan", "answers_of"]

PROGRAMS = 32  # for boxes that a plan keeps at a time


@dataclass(frozen=True, slots=True, eq=False)
class DetectorPlan(InProcess):
    """A detector made ready for a device, called like the detector."""

    plan: Plan
    priors: Tensor  # [p, 4]
    classes: int
    recorded: _Boxes | None = field(init=False, default=None)  # where answers are programs, too

    def __post_init__(self) -> None:
        executor = self.network.executor
        if executor.asynchronous:
            recorded = _Boxes(self.priors, self.classes, executor.max_batch)
            object.__setattr__(self, "recorded", recorded)

    @classmethod
    def of(cls, plan: Plan, detector: Detector, image_size: int | tuple[int, int] | None) -> DetectorPlan:
        """A plan of the parts of `pack_detector`."""
        return cls(plan, detector.priors(image_size).to(plan.network.device), detector.classes)

    @property
    def network(self) -> CompiledNetwork:
        """Its executables."""
        return self.plan.network

    @property
    def batch_invariant(self) -> bool:
        """Whether an image's route never depends on the others of its batch."""
        return self.plan.batch_invariant

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
        return self.boxes(self.plan(x, route), score=score, most=most)

    @torch.inference_mode()
    def boxes(
        self, row: Tensor, *, score: float = 0.3, overlap: float = 0.45, most: int = 200
    ) -> list[Detections]:
        """Boxes of the answers [B, numbers] that ``plan`` gives; on a GPU one program finds them."""
        numbers = _numbers(len(self.priors), self.classes)
        check_wanted(score, overlap, most)
        if not isinstance(row, Tensor):
            raise DsnetError(f"this plan answers with a tensor [B, {numbers}], not with {type(row).__name__}")
        if row.shape[1:] != (numbers,):
            raise DsnetError(f"this plan answers with [B, {numbers}], not with {list(row.shape)}")
        if self.recorded is not None and unaided(self.priors.device, len(self.priors), self.classes, most):
            return self.recorded(row, score, overlap, most)
        answers = self._answers(row)
        return detections_of(*answers, self.priors, score=score, overlap=overlap, most=most)

    def _answers(self, row: Tensor) -> Answers:
        return _parted(row, len(self.priors), self.classes)

    def __repr__(self) -> str:
        return f"Detector{self.plan!r}"


class _Program(NamedTuple):
    run: Callable[[], None]
    found: NDArray[np.float32]  # [size, n, 6], which the device writes to


class _Boxes:
    """From answers to boxes in memory of the host by one launch. Threads take turns.

    It has streams of its own: programs of the plan may run beside it.
    """

    def __init__(self, priors: Tensor, classes: int, most: int) -> None:
        self.priors, self.classes, self.most = priors, classes, most
        self.streams, self.lock = stream_pool(priors.device, 1), threading.Lock()
        self.rows: dict[torch.dtype, Tensor] = {}  # [most, numbers], which programs read
        self.programs: dict[tuple[int, torch.dtype, float, float, int], _Program] = {}

    def __call__(self, row: Tensor, score: float, overlap: float, most: int) -> list[Detections]:
        """As many images at a time as there is room for."""
        found: list[Detections] = []
        with self.lock, self.streams.on_device():
            for start in range(0, len(row), self.most):
                found += self._run(row[start : start + self.most], score, overlap, most)
        return found

    def _run(self, row: Tensor, score: float, overlap: float, most: int) -> list[Detections]:
        images = len(row)
        size = min(1 << (images - 1).bit_length(), self.most)
        key = size, row.dtype, score, overlap, most
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= PROGRAMS:
                del self.programs[next(iter(self.programs))]  # the oldest
            program = self.programs[key] = self._record(*key)
        self.rows[row.dtype][:images].copy_(row)
        program.run()
        self.streams.synchronize()
        return detections_in(program.found[:images])

    def _record(self, size: int, dtype: torch.dtype, score: float, overlap: float, most: int) -> _Program:
        if dtype not in self.rows:
            numbers = _numbers(len(self.priors), self.classes)
            self.rows[dtype] = self.priors.new_zeros(self.most, numbers, dtype=dtype)
        offsets, logits = _parted(self.rows[dtype][:size], len(self.priors), self.classes)

        def boxes() -> Tensor:
            return best_boxes(offsets, logits, self.priors, score=score, overlap=overlap, most=most)

        first = boxes()
        found = torch.empty(first.shape, dtype=first.dtype, pin_memory=first.device.type == "cuda")

        def body() -> None:
            found.copy_(boxes(), non_blocking=True)

        return _Program(self.streams.capture(body, 0), found.numpy())


def _parted(row: Tensor, priors: int, classes: int) -> Answers:
    return Answers(
        row[:, : 4 * priors].view(len(row), priors, 4),
        row[:, 4 * priors :].view(len(row), priors, 1 + classes),
    )


def _numbers(priors: int, classes: int) -> int:
    """Of an image."""
    return priors * (4 + 1 + classes)


def answers_of(detector: Detector, image_size: int | tuple[int, int] | None) -> int:
    """How many numbers a detector answers with for an image."""
    return _numbers(len(detector.priors(image_size)), detector.classes)


@register_partitioner(Detector)
class DetectorPartitioner:
    """Splits detectors: every segment ends with rows of offsets and logits."""

    def network(self, model: Detector) -> Supernet:
        """Return the supernet under the detector."""
        return model.network

    def outputs(self, model: Detector, image_size: int | tuple[int, int] | None) -> int:
        """Return how many numbers the detector answers with for an image."""
        return answers_of(model, image_size)

    def segments(
        self, model: Detector, request: PartitionRequest
    ) -> tuple[dict[SegmentKey, Segment], SharedHead | None]:
        """Return the prefix, a segment for every choice, and the pyramid where it runs behind all of them."""
        if request.shared:
            raise DsnetError("memory='shared' is for networks alone; a detector's parts are packed")
        choices = request.options[0]
        size, precision, device = request.image_size, request.precision, request.device
        if not request.grouped:
            packed = pack_detector(model, choices, image_size=size, precision=precision, device=device)
            return packed, None
        return split_detector(
            model, choices, fused=request.fused, image_size=size, precision=precision, device=device
        )

    def has_shared_head(self, model: Detector) -> bool:
        """Return True: the pyramid is one module for all choices."""
        return True

    def plan(self, model: Detector, plan: Plan, image_size: int | tuple[int, int] | None) -> DetectorPlan:
        """Return the plan with the decoding of boxes behind it."""
        return DetectorPlan.of(plan, model, image_size)
