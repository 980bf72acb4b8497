"""A network whose passes torch.compile has turned into programs, one a route, for the training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from dsnet.models import Supernet
from dsnet.routes import Route
from dsnet.slicing import Mode

__all__ = ["CompiledNetwork", "enough_programs"]


class CompiledNetwork:
    """Stands in for a network in `Stage1.step`; the weights stay where they are, evaluation is untouched."""

    def __init__(self, model: Supernet) -> None:
        self._model = model
        self.run_prefix = _compiled(model.run_prefix)
        self.run_segment = _compiled(model.run_segment)
        self.run_last_segment = _compiled(model.run_last_segment)
        self.run_stages = _compiled(model.run_stages)

    def __call__(self, x: Tensor, route: Route, *, mode: Mode | None = None) -> Tensor:
        """Images [B, C, H, W] → logits [B, classes], at one route."""
        state = self.run_prefix(x, mode)
        for gates in range(1, len(route.choices)):
            state = self.run_segment(state, route.choices[:gates], mode)
        return cast(Tensor, self.run_last_segment(state, route.choices, mode))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the network has)
        return getattr(self._model, name)


def _compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(method, dynamic=False)


@contextmanager
def enough_programs(model: Supernet) -> Iterator[None]:
    """While inside, torch.compile keeps a program for every route, where it would stop at a few."""
    programs = 4 * (len(model.space) + sum(len(choices) for choices in model.space.choices)) + 16
    with torch._dynamo.config.patch(recompile_limit=programs, accumulated_recompile_limit=8 * programs):
        yield
