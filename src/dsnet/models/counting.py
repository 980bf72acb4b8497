"""Costs of the segments and routes of a supernet, by arithmetic on block sizes; nothing runs."""

from __future__ import annotations

from dsnet.counts import Cost, Shape
from dsnet.models.blocks import count_steps
from dsnet.models.supernet import Supernet

__all__ = ["prefix_cost", "route_cost", "segment_costs"]


def prefix_cost(model: Supernet, image: Shape, *, routing: bool = True) -> tuple[Cost, Shape]:
    """Count the prefix and the first gate; return the cost and the shape of the features at the gate.

    Args:
        model: The network.
        image: Shape of an image.
        routing: Count routing heads; without them, gates only scale channels.
    """
    cost, shape = count_steps(model.chain(()), image)
    return cost + model.gate(0).cost(shape, routing=routing), shape


def _segment_cost(
    model: Supernet, choices: tuple[int, ...], shape: Shape, *, routing: bool
) -> tuple[Cost, Shape]:
    """Count the segment after these choices, with the next gate or the head; return cost and output shape."""
    cost, after = count_steps(model.chain(choices), shape)
    if len(choices) < len(model.gates):
        return cost + model.gate(len(choices)).cost(after, routing=routing), after
    head, after = count_steps([model.head_step(choices)], after)
    return cost + head, after


def segment_costs(model: Supernet, image: Shape, *, routing: bool = True) -> dict[tuple[int, ...], Cost]:
    """Count the prefix (no choices) and all segments, each with the gate or the head after it.

    A route costs the sum of the prefix and its segments. Routes with a common beginning share its cost. For
    ``routing`` see `prefix_cost`.
    """
    cost, shape = prefix_cost(model, image, routing=routing)
    costs: dict[tuple[int, ...], Cost] = {(): cost}
    shapes: dict[tuple[int, ...], Shape] = {(): shape}
    for choices in model.segments:
        costs[choices], shapes[choices] = _segment_cost(model, choices, shapes[choices[:-1]], routing=routing)
    return costs


def route_cost(model: Supernet, choices: tuple[int, ...], image: Shape, *, routing: bool = True) -> Cost:
    """Count a whole route on an image of this shape; for ``routing`` see `prefix_cost`."""
    total, shape = prefix_cost(model, image, routing=routing)
    for stage in range(len(choices)):
        cost, shape = _segment_cost(model, choices[: stage + 1], shape, routing=routing)
        total += cost
    return total
