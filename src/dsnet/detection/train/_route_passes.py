"""The passes of a training step of a detector: one route after the other, each from forward to backward.

The prefix runs forward once. Its outputs collect the gradients of all routes, and it runs backward once after
the last of them. So a step needs the memory of one route. On a GPU every pass is a CUDA graph, captured when
it is first needed, so that the GPU does not wait for the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.core.cuda_graphs import CapturedPass, TrainingGraphs
from dsnet.detection.model.fssd import Detector
from dsnet.detection.train._loss import PriorTargets, multibox_loss
from dsnet.models.features import PrefixFeatures
from dsnet.routes import Route

__all__ = ["GraphedRoutePasses", "RoutePasses", "RouteLoss"]


class RouteLoss(NamedTuple):
    """The losses of a route, divided by the number of matched priors."""

    offsets: Tensor
    classes: Tensor


class RoutePasses:
    """The passes of a step, which add to the gradients of a detector in training mode."""

    def __init__(self, detector: Detector, precision: torch.dtype | None = None) -> None:
        self.detector, self.precision = detector, precision

    def step(self, x: Tensor, targets: PriorTargets, routes: Sequence[Route]) -> list[RouteLoss]:
        """Run forward and backward of the mean loss of all routes, and return the losses of each."""
        self._forward_prefix(x)
        losses = [self._run_route(route, targets, 1 / len(routes)) for route in routes]
        self._backward_prefix()
        return losses

    def _forward_prefix(self, x: Tensor) -> None:
        with self._autocast(x):
            self._output = self.detector.enter(x)
        self._detached = self._output.with_tensors(
            [tensor.detach().requires_grad_() for tensor in self._output.tensors()]
        )

    def _run_route(self, route: Route, targets: PriorTargets, share: float) -> RouteLoss:
        """Run a route forward and backward, down to the detached outputs of the prefix."""
        with self._autocast(self._detached.x):
            output = self.detector.output_from(self._detached, route)
        loss = multibox_loss(*output, targets)
        matched = loss.matched.sum().clamp(min=1)
        offsets, classes = loss.offsets.sum() / matched, loss.classes.sum() / matched
        (share * (offsets + classes)).backward()  # type: ignore[no-untyped-call]
        return RouteLoss(offsets.detach(), classes.detach())

    def _backward_prefix(self) -> None:
        pairs = zip(self._output.tensors(), self._detached.tensors(), strict=True)
        used = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
        torch.autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used])

    def _autocast(self, x: Tensor) -> torch.autocast:
        enabled = self.precision is not None
        return torch.autocast(x.device.type, self.precision, enabled=enabled, cache_enabled=False)


class _Prefix(NamedTuple):
    detached: PrefixFeatures
    forward: CapturedPass
    backward: CapturedPass


class GraphedRoutePasses(RoutePasses):
    """The same passes as CUDA graphs, for batches of the shapes of the first one."""

    def __init__(self, detector: Detector, precision: torch.dtype | None = None) -> None:
        super().__init__(detector, precision)
        self._graphs = TrainingGraphs([detector], detector.norm.weight.device)
        # What the prefix keeps for its backward pass must outlive the routes in between: a pool of its own.
        self._pool, self._prefix_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self._routes: dict[Hashable, CapturedPass] = {}
        self._prefix: _Prefix | None = None

    def step(self, x: Tensor, targets: PriorTargets, routes: Sequence[Route]) -> list[RouteLoss]:
        """Copy the batch to where the graphs read it, and replay the passes."""
        if self._prefix is None:
            self._x, self._targets = x.clone(), PriorTargets(*(tensor.clone() for tensor in targets))
            self._prefix = self._capture_prefix()
        self._x.copy_(x)
        for buffer, values in zip(self._targets, targets, strict=True):
            buffer.copy_(values)
        return super().step(self._x, self._targets, routes)

    def _forward_prefix(self, x: Tensor) -> None:
        assert self._prefix is not None
        self._graphs.replay(self._prefix.forward)

    def _run_route(self, route: Route, targets: PriorTargets, share: float) -> RouteLoss:
        if (route, share) not in self._routes:
            self._routes[route, share] = self._capture_route(route, share)
        losses = self._graphs.replay(self._routes[route, share])
        return RouteLoss(*(loss.clone() for loss in losses))

    def _backward_prefix(self) -> None:
        assert self._prefix is not None
        self._graphs.replay(self._prefix.backward)

    def _capture_route(self, route: Route, share: float) -> CapturedPass:
        assert self._prefix is not None
        detached = self._prefix.detached

        def run() -> tuple[Tensor, ...]:
            self._detached = detached
            return RoutePasses._run_route(self, route, self._targets, share)

        (captured,) = self._graphs.capture(self._pool, run)
        return captured

    def _capture_prefix(self) -> _Prefix:
        leaves: list[Tensor] = []  # made by the first run, written by all

        def forward() -> tuple[Tensor, ...]:
            RoutePasses._forward_prefix(self, self._x)
            if not leaves:
                leaves.extend(_leaf(tensor) for tensor in self._output.tensors())
            with torch.no_grad():
                for leaf, tensor in zip(leaves, self._output.tensors(), strict=True):
                    leaf.copy_(tensor)
                    assert leaf.grad is not None
                    leaf.grad.zero_()
            return ()

        def backward() -> tuple[Tensor, ...]:
            self._detached = self._output.with_tensors(leaves)
            RoutePasses._backward_prefix(self)
            return ()

        passes = self._graphs.capture(self._prefix_pool, forward, backward)
        prefix = _Prefix(self._output.with_tensors(leaves), *passes)
        del self._output  # a replay does not need its autograd graph
        for leaf in leaves:
            self._graphs.track(leaf)
        return prefix


def _leaf(like: Tensor) -> Tensor:
    leaf = torch.empty_like(like).requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    return leaf
