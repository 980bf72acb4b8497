"""Callbacks: observers of a training run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands show progress without importing torch
    from dsnet.training.evaluation import RouteResult

__all__ = ["Callback"]


class Callback:
    """Base class of training callbacks; every method does nothing and may be overridden."""

    def on_train_begin(self, step: int, steps: int) -> None:
        """Training starts, or resumes after ``step`` of ``steps`` optimizer steps."""

    def on_step_end(self, step: int, epoch: int, images: int) -> None:
        """Optimizer step ``step`` (from 1), on ``images`` images of all ranks together, is done."""

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Mean losses since the last call, with the learning rate ``lr`` and ``images_per_s``."""

    def on_validation_end(self, step: int, epoch: int, results: Sequence[RouteResult]) -> None:
        """The held-out images were evaluated."""

    def on_message(self, message: str) -> None:
        """A warning or notice for the user."""

    def progress(self, items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
        """Pass on the items of a long operation; a `dsnet.core.timer.Progress`."""
        return iter(items)
