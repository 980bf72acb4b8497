"""Networks whose passes torch.compile compiles, one program for each route, for the training step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dsnet.models import Supernet
from dsnet.models.composite import CompositeNetwork

__all__ = ["compiled", "enough_programs"]


def compiled(model: Supernet) -> Supernet:
    """Return a network with compiled passes that shares all weights with ``model``, which is unchanged."""
    shared = copy.copy(model)
    passes = ["run_prefix", "run_segment", "run_last_segment", "run_stages"]
    if isinstance(model, CompositeNetwork):  # no two networks of a step share a prefix
        passes = ["run_route", "run_stages"]
    for name in passes:
        setattr(shared, name, torch.compile(getattr(model, name), dynamic=False))
    return shared


@contextmanager
def enough_programs(model: Supernet) -> Iterator[None]:
    """Make torch.compile keep a program for each route inside this context; by default it stops at a few."""
    programs = 4 * (len(model.space) + sum(len(choices) for choices in model.space.choices)) + 16
    with torch._dynamo.config.patch(recompile_limit=programs, accumulated_recompile_limit=8 * programs):
        yield
