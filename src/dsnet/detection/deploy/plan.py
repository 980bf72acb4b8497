"""Plans for detectors: the executors of the runtime, with the decoding of boxes behind them."""

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
from dsnet.detection.deploy._partition import pack_detector, share_detector, split_detector
from dsnet.detection.eval.metrics import Detections
from dsnet.detection.model.fssd import Detector, DetectorOutput, RoutedDetectorOutput
from dsnet.detection.postprocess import (
    best_boxes,
    check_thresholds,
    decode_detections,
    has_static_shape,
    split_detections,
)
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routes import Route
from dsnet.runtime.executors.host import CompiledNetwork
from dsnet.runtime.partition.partitioner import Partitioner, PartitionRequest, register_partitioner
from dsnet.runtime.partition.segments import Segment, SegmentKey, SharedHead
from dsnet.runtime.plan import Plan

__all__ = ["DetectorPlan"]

MAX_GRAPHS = 32  # of box decoding that a plan keeps


@dataclass(frozen=True, slots=True, eq=False)
class DetectorPlan(InProcess):
    """A detector compiled for a device; `dsnet.runtime.compile` makes it. Call it like the detector."""

    plan: Plan
    priors: Tensor  # [p, 4]
    classes: int
    decoder: _GraphedDecoder | None = field(init=False, default=None)  # None: the plan has no CUDA graphs

    def __post_init__(self) -> None:
        executor = self.network.executor
        if executor.asynchronous:
            decoder = _GraphedDecoder(self.priors, self.classes, executor.max_batch)
            object.__setattr__(self, "decoder", decoder)

    @property
    def network(self) -> CompiledNetwork:
        """Return the executables of the plan."""
        assert isinstance(self.plan.network, CompiledNetwork)  # detectors have one image size
        return self.plan.network

    @property
    def batch_invariant(self) -> bool:
        """Return whether an image's route never depends on the other images of its batch."""
        return self.plan.batch_invariant

    def __call__(self, x: Tensor, route: Route | int | None = None) -> DetectorOutput:
        """Predict offsets and logits for images [B, C, H, W]; without a route, at each image's own."""
        return self.split(self.plan(x, route))

    def run(self, x: Tensor) -> RoutedDetectorOutput:
        """Predict offsets and logits for images [B, C, H, W], and return the routes that they took."""
        result = self.plan.run(x)
        return RoutedDetectorOutput(self.split(result.logits), result.routes)

    def route(self, x: Tensor) -> Tensor:
        """Return the number [B] of the route that each image takes."""
        return self.plan.route(x)

    def detect(
        self, x: Tensor, route: Route | int | None = None, *, score: float = 0.3, max_detections: int = 200
    ) -> list[Detections]:
        """Find boxes.

        Args:
            x: Images [B, C, H, W], see `SavedDetector.prepare`.
            route: The route of all images; without one, each image takes its own.
            score: Boxes with at most this probability are dropped.
            max_detections: The number of boxes that an image has at most.

        Returns:
            The detections of each image, as shares of the image, by descending score.
        """
        return self.boxes(self.plan(x, route), score=score, max_detections=max_detections)

    @torch.inference_mode()
    def boxes(
        self, row: Tensor, *, score: float = 0.3, overlap: float = 0.45, max_detections: int = 200
    ) -> list[Detections]:
        """Decode what ``plan`` returns [B, values] into detections; on a GPU as one CUDA graph."""
        values = _values(len(self.priors), self.classes)
        check_thresholds(score, overlap, max_detections)
        if not isinstance(row, Tensor):
            raise DsnetError(
                f"expected a tensor [B, {values}], as this plan returns, got {type(row).__name__}"
            )
        if row.shape[1:] != (values,):
            raise DsnetError(f"expected [B, {values}], as this plan returns, got {list(row.shape)}")
        fixed = has_static_shape(self.priors.device, len(self.priors), self.classes, max_detections)
        if self.decoder is not None and fixed:
            return self.decoder(row, score, overlap, max_detections)
        output = self.split(row)
        return decode_detections(
            *output, self.priors, score=score, overlap=overlap, max_detections=max_detections
        )

    def split(self, row: Tensor) -> DetectorOutput:
        """Split what ``plan`` returns [B, values] into offsets and logits."""
        return _split_row(row, len(self.priors), self.classes)

    def __repr__(self) -> str:
        return f"Detector{self.plan!r}"


class _DecodingGraph(NamedTuple):
    replay: Callable[[], None]
    rows: NDArray[np.float32]  # [size, n, 6], in host memory


class _GraphedDecoder:
    """Decodes boxes into host memory, each batch by one CUDA graph. Threads take turns.

    It has streams of its own, so the plan's graphs may run at the same time.
    """

    def __init__(self, priors: Tensor, classes: int, max_batch: int) -> None:
        self.priors, self.classes, self.max_batch = priors, classes, max_batch
        self.streams, self.lock = stream_pool(priors.device, 1), threading.Lock()
        self.inputs: dict[torch.dtype, Tensor] = {}  # [max_batch, values]
        self.graphs: dict[tuple[int, torch.dtype, float, float, int], _DecodingGraph] = {}

    def __call__(self, row: Tensor, score: float, overlap: float, max_detections: int) -> list[Detections]:
        """Decode predictions [B, values] in chunks of at most ``max_batch``."""
        detections: list[Detections] = []
        with self.lock, self.streams.on_device():
            for start in range(0, len(row), self.max_batch):
                detections += self._run(row[start : start + self.max_batch], score, overlap, max_detections)
        return detections

    def _run(self, row: Tensor, score: float, overlap: float, max_detections: int) -> list[Detections]:
        size = min(1 << (len(row) - 1).bit_length(), self.max_batch)
        key = size, row.dtype, score, overlap, max_detections
        graph = self.graphs.get(key)
        if graph is None:
            if len(self.graphs) >= MAX_GRAPHS:
                del self.graphs[next(iter(self.graphs))]  # the oldest
            graph = self.graphs[key] = self._capture(*key)
        self.inputs[row.dtype][: len(row)].copy_(row)
        graph.replay()
        self.streams.synchronize()
        return split_detections(graph.rows[: len(row)])

    def _capture(
        self, size: int, dtype: torch.dtype, score: float, overlap: float, max_detections: int
    ) -> _DecodingGraph:
        if dtype not in self.inputs:
            values = _values(len(self.priors), self.classes)
            self.inputs[dtype] = self.priors.new_zeros(self.max_batch, values, dtype=dtype)
        output = _split_row(self.inputs[dtype][:size], len(self.priors), self.classes)

        def decode() -> Tensor:
            return best_boxes(
                *output, self.priors, score=score, overlap=overlap, max_detections=max_detections
            )

        first = decode()
        rows = torch.empty(first.shape, dtype=first.dtype, pin_memory=first.device.type == "cuda")

        def body() -> None:
            rows.copy_(decode(), non_blocking=True)

        return _DecodingGraph(self.streams.capture(body, 0), rows.numpy())


def _split_row(row: Tensor, priors: int, classes: int) -> DetectorOutput:
    return DetectorOutput(
        row[:, : 4 * priors].view(len(row), priors, 4),
        row[:, 4 * priors :].view(len(row), priors, 1 + classes),
    )


def _values(priors: int, classes: int) -> int:
    """Count the predicted values of an image."""
    return priors * (4 + 1 + classes)


@register_partitioner(Detector)
class DetectorPartitioner(Partitioner):
    """Splits detectors: every segment ends with rows of offsets and logits."""

    has_shared_head = True  # the pyramid is one module for all choices

    def network(self, model: Detector) -> Supernet:
        """Return the supernet under the detector."""
        return model.network

    def outputs(self, model: Detector, image_size: int | tuple[int, int] | None) -> int:
        """Return the number of values that the detector predicts for an image."""
        return _values(len(model.priors(image_size)), model.classes)

    def segments(
        self, model: Detector, request: PartitionRequest
    ) -> tuple[dict[SegmentKey, Segment], SharedHead | None]:
        """Return the prefix, a segment for every choice, and the pyramid where it runs behind all of them."""
        choices = request.options[0]
        size, precision, device = request.image_size, request.precision, request.device
        if request.shared:
            return share_detector(model, choices, image_size=size), None
        if not request.grouped:
            packed = pack_detector(model, choices, image_size=size, precision=precision, device=device)
            return packed, None
        return split_detector(
            model, choices, fused=request.fused, image_size=size, precision=precision, device=device
        )

    def plan(self, model: Detector, plan: Plan, image_size: int | tuple[int, int] | None) -> DetectorPlan:
        """Return the plan with the decoding of boxes behind it."""
        return DetectorPlan(plan, model.priors(image_size).to(plan.network.device), model.classes)
