"""What a step of a detector's training runs: one route after the other, each from forward to backward.

What stands in front of the gate runs forward once; its end collects the routes' gradients, and it runs
backward once, after the last of them. So a step needs the memory of one route, and on a GPU every pass is a
CUDA graph that is captured when it is first needed: the GPU does not wait for the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.core.cuda_graphs import CapturedPass, TrainingGraphs
from dsnet.detection.model.fssd import Detector
from dsnet.detection.train.loss import PriorTargets, multibox_loss
from dsnet.models.features import PrefixFeatures
from dsnet.routes import Route

__all__ = ["GraphedRoutePasses", "RoutePasses", "RouteLoss"]


class RouteLoss(NamedTuple):
    """What a route pays, by the number of matched priors."""

    offsets: Tensor
    classes: Tensor


class RoutePasses:
    """The passes of a step, which add to the gradients of a detector in training mode."""

    def __init__(self, detector: Detector, precision: torch.dtype | None = None) -> None:
        self.detector, self.precision = detector, precision

    def step(self, x: Tensor, targets: PriorTargets, routes: Sequence[Route]) -> list[RouteLoss]:
        """The mean loss of the routes, backward; what each of them pays."""
        self.enter(x)
        paid = [self.route(route, targets, 1 / len(routes)) for route in routes]
        self.leave()
        return paid

    def enter(self, x: Tensor) -> None:
        """Up to the gate."""
        with self._autocast(x):
            self._end = self.detector.enter(x)
        leaves = [tensor.detach().requires_grad_() for tensor in self._end.tensors()]
        self._start = self._end.with_tensors(leaves)

    def route(self, route: Route, targets: PriorTargets, share: float) -> RouteLoss:
        """From there to the loss and back."""
        with self._autocast(self._start.x):
            answers = self.detector.output_from(self._start, route)
        loss = multibox_loss(*answers, targets)
        matched = loss.matched.sum().clamp(min=1)
        offsets, classes = loss.offsets.sum() / matched, loss.classes.sum() / matched
        (share * (offsets + classes)).backward()  # type: ignore[no-untyped-call]
        return RouteLoss(offsets.detach(), classes.detach())

    def leave(self) -> None:
        """From the gate back."""
        pairs = [
            (end, start.grad)
            for end, start in zip(self._end.tensors(), self._start.tensors(), strict=True)
            if start.grad is not None
        ]
        torch.autograd.backward([end for end, _ in pairs], [gradient for _, gradient in pairs])

    def _autocast(self, at: Tensor) -> torch.autocast:
        on = self.precision is not None
        return torch.autocast(at.device.type, self.precision, enabled=on, cache_enabled=False)


class _Prefix(NamedTuple):
    start: PrefixFeatures
    forward: CapturedPass
    backward: CapturedPass


class GraphedRoutePasses(RoutePasses):
    """The same from CUDA graphs. The first batch says which sizes they are made for; all others are alike."""

    def __init__(self, detector: Detector, precision: torch.dtype | None = None) -> None:
        super().__init__(detector, precision)
        device = detector.norm.weight.device
        self._graphs = TrainingGraphs([detector], device)
        # What the prefix keeps for its way back must outlive the routes in between: memory of its own.
        self._pool, self._prefix_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self._routes: dict[Hashable, CapturedPass] = {}
        self._prefix: _Prefix | None = None

    def step(self, x: Tensor, targets: PriorTargets, routes: Sequence[Route]) -> list[RouteLoss]:
        """Replays the passes."""
        if self._prefix is None:
            self._x, self._targets = x.clone(), PriorTargets(*(tensor.clone() for tensor in targets))
        self._x.copy_(x)
        for buffer, new in zip(self._targets, targets, strict=True):
            buffer.copy_(new)
        if self._prefix is None:
            self._prefix = self._record_prefix()
        self._graphs.replay(self._prefix.forward)
        share, paid = 1 / len(routes), []
        for route in routes:
            if (route, share) not in self._routes:
                self._routes[route, share] = self._record_route(route, share)
            recorded = self._routes[route, share]
            self._graphs.replay(recorded)
            paid.append(RouteLoss(*(loss.clone() for loss in recorded.outputs)))
        self._graphs.replay(self._prefix.backward)
        return paid

    def _record_route(self, route: Route, share: float) -> CapturedPass:
        assert self._prefix is not None
        start = self._prefix.start

        def body() -> tuple[Tensor, ...]:
            self._start = start
            return RoutePasses.route(self, route, self._targets, share)

        (recorded,) = self._graphs.capture(self._pool, body)
        return recorded

    def _record_prefix(self) -> _Prefix:
        held: list[PrefixFeatures] = []

        def forward() -> tuple[Tensor, ...]:
            RoutePasses.enter(self, self._x)
            if not held:
                held.append(self._end.with_tensors([_leaf(tensor) for tensor in self._end.tensors()]))
            with torch.no_grad():
                for leaf, end in zip(held[0].tensors(), self._end.tensors(), strict=True):
                    leaf.copy_(end)
                    assert leaf.grad is not None
                    leaf.grad.zero_()
            return ()

        def backward() -> tuple[Tensor, ...]:
            self._start = held[0]
            RoutePasses.leave(self)
            return ()

        there, back = self._graphs.capture(self._prefix_pool, forward, backward)
        del self._end  # autograd's side of it: a replay needs none
        for leaf in held[0].tensors():
            self._graphs.track(leaf)
        return _Prefix(held[0], there, back)


def _leaf(like: Tensor) -> Tensor:
    leaf = torch.empty_like(like).requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    return leaf
