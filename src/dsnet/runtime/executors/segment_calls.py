"""The calls by which a profile times the prefix and the segments of a network."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dsnet.models.group_by_route import Routable
from dsnet.runtime.partition.segments import SegmentKey

__all__ = ["SegmentCalls", "calls_of_members", "calls_of_network", "segment_paths"]


class SegmentCalls(NamedTuple):
    """A function for the prefix, ``()``, and one for every path of choices."""

    calls: Mapping[SegmentKey, Callable[[], object]]
    cumulative: bool  # whether a call runs all of its path, or only the last segment
    restarts: frozenset[SegmentKey] = frozenset()  # paths that do not go through the prefix
    prefixes: Sequence[Callable[[], object]] = ()  # of each member, where a network has several


def segment_paths(choices: Sequence[int], gate: int) -> list[SegmentKey]:
    """Return a path for every pair of a gate's choice and the one before it; earlier choices are 0.

    >>> segment_paths((2, 2), 1)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    pairs = (range(1 if earlier < gate - 1 else size) for earlier, size in enumerate(choices[: gate + 1]))
    return list(itertools.product(*pairs))


def calls_of_network(network: Routable[Any], x: Tensor) -> SegmentCalls:
    """Return calls that run one segment each, on the features that the path before it gives."""
    calls: dict[SegmentKey, Callable[[], object]] = {(): functools.partial(network.run_prefix, x)}
    states: dict[SegmentKey, Any] = {(): network.run_prefix(x)}
    for gate in range(len(network.choices)):
        run = network.run_segment if gate + 1 < len(network.choices) else network.run_last_segment
        for path in segment_paths(network.choices, gate):
            before = states[path[:-1]]
            calls[path] = functools.partial(run, before, path)
            if gate + 1 < len(network.choices) and not any(path[:-1]):  # later paths go through it
                states[path] = network.run_segment(before, path)
    return SegmentCalls(calls, cumulative=False)


def calls_of_members(
    routes: Mapping[SegmentKey, Callable[[], object]],
    prefixes: Sequence[Callable[[], object]],
    members: Sequence[int],
    has_gate: bool,
) -> SegmentCalls:
    """Return the calls of a network with several members.

    Args:
        routes: A function for each route, in their order, that runs it alone.
        prefixes: A function for each member that runs its prefix; the gate is at that of member 0.
        members: The member of each route.
        has_gate: Whether there is a gate; without one, nothing precedes the routes.
    """
    restarts = {path for path, member in zip(routes, members, strict=True) if member != 0 or not has_gate}
    first = prefixes[0] if has_gate else _nothing
    return SegmentCalls({(): first, **routes}, True, frozenset(restarts), prefixes)


def _nothing() -> None:
    pass
