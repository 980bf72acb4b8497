"""Training as a person at the terminal sees it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from dsnet.cli.progress import progress
from dsnet.training.evaluate import RouteResult
from dsnet.training.loop import Watch

__all__ = ["CLEARED", "LiveWatch"]

CLEARED = "\r\033[2K"  # takes away the line that moves


class LiveWatch(Watch):
    """A line that moves while training goes on, and one line an epoch that stays."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.live = sys.stderr.isatty() and not quiet
        self.losses = ""
        self.rate = 0.0
        self.drawn = 0.0

    def started(self, step: int, steps: int) -> None:
        """Notes where training begins."""
        self.first, self.steps, self.begin = step, steps, time.monotonic()
        if step and not self.quiet:
            self._say(f"Going on after step {step} of {steps}")

    def stepped(self, step: int, epoch: int, images: int) -> None:
        """Redraws the line, a few times a second."""
        now = time.monotonic()
        if not self.live or (now - self.drawn < 0.2 and step < self.steps):
            return
        self.drawn = now
        left = (now - self.begin) / max(step - self.first, 1) * (self.steps - step)
        done = round(20 * step / self.steps)
        bar = "█" * done + "░" * (20 - done)
        rate = f"{self.rate:,.0f} images/s" if self.rate else ""
        self._draw(f"epoch {epoch + 1} {bar} {step}/{self.steps} {self.losses} {rate} {_clock(left)} left")

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps what the line shows."""
        self.rate = values["images_per_s"]
        terms = {name: v for name, v in values.items() if "/" in name and not name.startswith("taken/")}
        parts = " ".join(f"{name} {value:.3f}" for name, value in terms.items())
        self.losses = f"loss {values['loss']:.3f} ({parts})"

    def validated(self, step: int, epoch: int, results: list[RouteResult]) -> None:
        """A line that stays."""
        if self.quiet:
            return
        reached = ", ".join(f"route {r.route} {r.accuracy:.1%}" for r in results)
        self._say(f"epoch {epoch + 1}: held-out {reached}; {self.losses}; {self.rate:,.0f} images/s")

    def told(self, message: str) -> None:
        """A line that stays, whatever."""
        self._say(f"warning: {message}")

    def progress(self, what: str, batches: Iterator[Any], total: int) -> Iterator[Any]:
        """Counts batches on the line."""
        if self.live and what != "validating":
            self._draw("")
            return progress(batches, total, what)
        return batches

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be redrawn
        print(f"{CLEARED}{text[:width]}", end="", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        print(f"{CLEARED}{text}" if self.live else text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
