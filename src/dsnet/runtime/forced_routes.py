"""Batches whose images take given routes, for timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsnet.errors import DsnetError, shorten
from dsnet.routes import Route
from dsnet.routing.policies import RoutedOutput, margin, unsure
from dsnet.runtime.executors.composite import AnyCompiled

__all__ = ["assigned_call", "normalized_shares", "sample_routes", "thresholds_for"]


def assigned_call(network: AnyCompiled, routes: Sequence[Route]) -> Callable[[Tensor], RoutedOutput]:
    """Return a function that runs a batch with one image for each of these routes."""
    for route in routes:
        if not network.holds(route):
            raise DsnetError(f"this plan does not hold route {route.number}")
    executor = network.executor
    choices = torch.tensor([route.choices for route in routes], device=network.device)
    within_gates = all(
        choice in gate.choices
        for route in routes
        for choice, gate in zip(route.choices, network.gates, strict=True)
    )
    return lambda x: executor.run_assigned(x, choices, within_gates=within_gates)


def thresholds_for(
    compiled: AnyCompiled, x: Tensor, routes: Sequence[int], counts: Sequence[int]
) -> list[float]:
    """Return the thresholds with which ``counts`` images go on from each route of a cascade but the last."""
    thresholds: list[float] = []
    left = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for number, count in zip(routes[:-1], counts, strict=True):
        margins = margin(compiled.executor.run_route(x, compiled.space.resolve(number))).double()
        ordered = [-1.0, *margins[left].sort()[0].tolist(), 2.0]  # margins are between 0 and 1
        thresholds.append((ordered[count] + ordered[count + 1]) / 2)
        left &= unsure(margins, thresholds[-1])
    return thresholds


def normalized_shares(shares: Mapping[int, float]) -> dict[int, float]:
    """Scale the shares of routes so that their sum is 1, and leave out those of 0."""
    if not isinstance(shares, Mapping):
        raise DsnetError(f"a mix is shares by route, as {{0: 0.7, 13: 0.3}}, not {shorten(shares)}")
    for number, share in shares.items():
        if not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise DsnetError(
                f"the share of route {number} must be a number of at least 0, not {shorten(share)}"
            )
    total = sum(shares.values())
    if not 0 < total < math.inf:
        raise DsnetError("a mix needs a route with a share above 0, and a finite sum")
    return {number: share / total for number, share in sorted(shares.items()) if share}


def sample_routes(shares: Mapping[int, float], images: int, seed: int = 0) -> list[int]:
    """Return a route for each image, in random order; counts are as near to the shares as possible."""
    exact = {number: share * images for number, share in shares.items()}
    counts = {number: int(count) for number, count in exact.items()}
    by_rest = sorted(exact, key=lambda number: counts[number] - exact[number])
    for number in by_rest[: images - sum(counts.values())]:
        counts[number] += 1
    routes = [number for number, count in counts.items() for _ in range(count)]
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed)).tolist()
    return [routes[i] for i in order]
