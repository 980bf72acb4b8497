"""A detector's training as a person sees it, at a terminal or in a file."""

from __future__ import annotations

import time

from dsnet.cli.train_progress import LiveWatch
from dsnet.report.text import roughly

__all__ = ["BoxWatch"]

ENOUGH = 3.0  # seconds of training, after the first step, from which on its end can be told
MANY = 30  # steps after which it is told anyhow


class BoxWatch(LiveWatch):
    """A line when the duration is known, one an epoch, and what the run says of itself."""

    says_epochs = True

    def __init__(self, epochs: int, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.epochs = epochs
        self.foretold = False

    def said(self, message: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self._say(message)

    def on_step_end(self, step: int, epoch: int, images: int) -> None:
        """Tells the duration as soon as it is known, and how far the run is at the end of every epoch."""
        super().on_step_end(step, epoch, images)
        now = time.monotonic()
        first, begun = self.timed or (step, now)
        whole = step % (self.steps // self.epochs) == 0
        left = None
        if step > first:
            left = (now - begun) / (step - first) * (self.steps - step)
            known = whole or now - begun > ENOUGH or step - first >= MANY
            if known and not self.foretold and step < self.steps:
                self.foretold = True
                self.said(f"Training takes {roughly(left)} from here; figures and the gate come on top")
        if whole:
            rate = f"{self.rate:,.{0 if self.rate >= 10 else 1}f} images/s"
            losses = f": {self.losses}; {rate}" if self.losses else ""
            rest = f"; {roughly(left)} left" if left else ""
            self.said(f"epoch {epoch + 1} of {self.epochs}{losses}{rest}")
