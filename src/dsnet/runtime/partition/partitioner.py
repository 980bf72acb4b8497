"""Partitioners: how a kind of model is split into the segments of a plan, registered by the model's type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.router import Routed
from dsnet.runtime.partition.segments import Segment, SegmentKey, SharedHead, pack, share

if TYPE_CHECKING:
    from dsnet.runtime.plan import Plan

__all__ = [
    "PartitionRequest",
    "Partitioner",
    "SupernetPartitioner",
    "partitioner_of",
    "register_partitioner",
    "segment_modules",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRequest:
    """What a plan asks a partitioner for.

    Attributes:
        options: The choices to compile, by gate.
        image_size: Height and width, or one number for both (None: the network's).
        precision: The precision of packed weights.
        device: The device of packed weights.
        shared_segments: Segments that serve others, see `find_shared_segments`.
        shared: Whether to run slices of the model's own weights instead of packed copies.
        grouped: Whether the segments will be captured as CUDA graphs for mixed batches.
        fused: Whether the backend may run the segments of all choices as one.
    """

    options: Sequence[Sequence[int]]
    image_size: int | tuple[int, int] | None
    precision: torch.dtype
    device: torch.device
    shared_segments: Mapping[SegmentKey, SegmentKey] = field(default_factory=dict)
    shared: bool = False
    grouped: bool = False
    fused: bool = False


class Partitioner(ABC):
    """Splits one kind of model. Register a subclass with `register_partitioner`.

    Attributes:
        has_shared_head: Whether `segments` may return a module that runs behind all segments.
    """

    has_shared_head = False

    @abstractmethod
    def network(self, model: Any) -> Supernet:  # noqa: ANN401  (the registered type)
        """Return the supernet whose gates decide for this model."""

    @abstractmethod
    def outputs(self, model: Any, image_size: int | tuple[int, int] | None) -> int:  # noqa: ANN401
        """Return how many numbers a segment that ends the model returns for an image."""

    @abstractmethod
    def segments(
        self,
        model: Any,  # noqa: ANN401
        request: PartitionRequest,
    ) -> tuple[dict[SegmentKey, Segment], SharedHead | None]:
        """Return the segments, and what runs behind all of them if that is one module for all choices."""

    def plan(self, model: Any, plan: Plan, image_size: int | tuple[int, int] | None) -> Any:  # noqa: ANN401
        """Return what `dsnet.runtime.compile` returns for this kind of model (default: the plan)."""
        return plan


class SupernetPartitioner(Partitioner):
    """Splits supernets, with or without a router."""

    def network(self, model: Supernet | Routed) -> Supernet:
        """Return the supernet."""
        network = model.model if isinstance(model, Routed) else model
        if not isinstance(network, Supernet):
            raise DsnetError(f"a Routed for a plan holds a supernet, not a {type(network).__name__}")
        return network

    def outputs(self, model: Supernet | Routed, image_size: int | tuple[int, int] | None) -> int:
        """Return the number of classes."""
        return self.network(model).head.classifier.out_features

    def segments(
        self, model: Supernet | Routed, request: PartitionRequest
    ) -> tuple[dict[SegmentKey, Segment], SharedHead | None]:
        """Return the prefix and one segment per choice."""
        network = self.network(model)
        if request.shared:
            return share(network, request.options, image_size=request.image_size), None
        packed = pack(
            network,
            request.options,
            shared_segments=request.shared_segments,
            image_size=request.image_size,
            precision=request.precision,
            device=request.device,
        )
        return packed, None


_PARTITIONERS: dict[type, Partitioner] = {}
P = TypeVar("P", bound=type)


def register_partitioner(kind: type) -> Callable[[P], P]:
    """Register a class of `Partitioner` for models of the type ``kind`` and its subclasses.

    Examples:
        >>> from torch import nn
        >>> class Segmenter(nn.Module): ...
        >>> @register_partitioner(Segmenter)
        ... class SegmenterPartitioner(SupernetPartitioner): ...
        >>> partitioner_of(Segmenter()).__class__.__name__
        'SegmenterPartitioner'
    """

    def register(cls: P) -> P:
        _PARTITIONERS[kind] = cls()
        return cls

    return register


register_partitioner(Supernet)(SupernetPartitioner)
register_partitioner(Routed)(SupernetPartitioner)


def partitioner_of(model: object) -> Partitioner:
    """Return the partitioner registered for the type of ``model``."""
    for kind in type(model).__mro__:
        if kind in _PARTITIONERS:
            return _PARTITIONERS[kind]
    raise DsnetError(
        f"a plan is made from one of {', '.join(sorted(k.__name__ for k in _PARTITIONERS))}, not from a "
        f"{type(model).__name__}; register_partitioner makes other types known"
    )


def segment_modules(parts: Mapping[SegmentKey, Segment]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the module of the prefix and those of the other segments, each as a list."""
    return [parts[()].module], [part.module for history, part in parts.items() if history]
