"""Training as a person at the terminal sees it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dsnet.cli.progress import CLEARED, LOG_SECONDS, clock, progress
from dsnet.errors import printable
from dsnet.report.text import roughly
from dsnet.training.callbacks import Callback
from dsnet.training.evaluate import RouteResult

__all__ = ["CLEARED", "LiveWatch"]

TOLERANCE = 1.25  # an estimate that is off by less is not corrected


class LiveWatch(Callback):
    """A line that moves while training goes on, and one line an epoch that stays.

    Where stderr is no terminal all lines stay: one about every `LOG_SECONDS`, at least one. ``expected`` is
    how many seconds training was estimated to take: the first epoch corrects it.
    """

    says_epochs = False  # whether a subclass prints a line for every epoch itself

    def __init__(self, *, quiet: bool = False, expected: float | None = None) -> None:
        self.quiet = quiet
        self.live = sys.stderr.isatty() and not quiet
        self.expected = expected
        self.losses = ""
        self.rate = 0.0
        self.drawn = 0.0
        self.lines = 0  # that stay, since training began
        self.logged_at = 0.0  # when the last one was printed
        self.timed: tuple[int, float] | None = None  # the first step, which warms up, and when it ended

    def on_train_begin(self, step: int, steps: int) -> None:
        """Notes where training begins."""
        self.first, self.steps, self.begin = step, steps, time.monotonic()
        self.logged_at, self.timed, self.epoch = self.begin, None, -1
        self.lines = 0
        if step and not self.quiet:
            self._say(f"Going on after step {step} of {steps}")

    def on_step_end(self, step: int, epoch: int, images: int) -> None:
        """Redraws the line a few times a second; in a log, prints one now and then."""
        now = time.monotonic()
        if self.timed is None:
            self.timed, self.epoch = (step, now), epoch
        elif epoch > self.epoch >= 0:
            self._correct(step - 1)
        if self.quiet:
            return
        if self.live:
            if now - self.drawn >= 0.2 or step >= self.steps:
                self.drawn = now
                self._draw(self._line(step, epoch))
        elif now - self.logged_at >= LOG_SECONDS or (
            step == self.steps and not self.lines and not self.says_epochs
        ):
            self._say(self._line(step, epoch))

    def _line(self, step: int, epoch: int) -> str:
        done = round(20 * step / self.steps)
        bar = "█" * done + "░" * (20 - done) if self.live else "step"
        rate = f"{self.rate:,.0f} images/s" if self.rate else ""
        parts = (f"epoch {epoch + 1} {bar} {step}/{self.steps}", self.losses, rate, self._left(step))
        return " ".join(filter(None, parts))

    def _seconds(self, step: int) -> float | None:
        """Seconds that are left by the speed since the first step, as far as that is known."""
        if self.timed is None or step <= self.timed[0]:
            return None
        first, begun = self.timed
        return (time.monotonic() - begun) / (step - first) * (self.steps - step)

    def _left(self, step: int) -> str:
        seconds = self._seconds(step)
        return "" if seconds is None or step >= self.steps else f"{clock(seconds)} left"

    def _correct(self, step: int) -> None:
        """Replaces the estimate once, at the end of the first epoch, where it was wrong."""
        self.epoch = -1
        left = self._seconds(step)
        if self.quiet or self.expected is None or left is None or step >= self.steps:
            return
        share = (self.steps - step) / self.steps
        if not 1 / TOLERANCE < left / max(self.expected * share, 1e-9) < TOLERANCE:
            before = roughly(self.expected * share)
            self._say(
                f"Corrected estimate, by the speed of the first epoch: {roughly(left)} left (not {before})"
            )

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps what the line shows."""
        self.rate = values["images_per_s"]
        terms = {name: v for name, v in values.items() if "/" in name and not name.startswith("taken/")}
        parts = " ".join(f"{name} {value:.3f}" for name, value in terms.items())
        self.losses = f"loss {values['loss']:.3f} ({parts})"

    def on_validation_end(self, step: int, epoch: int, results: Sequence[RouteResult]) -> None:
        """A line that stays."""
        if self.quiet:
            return
        reached = ", ".join(f"route {r.route} {r.accuracy:.1%}" for r in results)
        left = self._left(step)
        self._say(
            f"epoch {epoch + 1}: held-out {reached}; {self.losses}; {self.rate:,.0f} images/s"
            + (f"; {left}" if left else "")
        )
        if self.epoch >= 0:
            self._correct(step)

    def on_message(self, message: str) -> None:
        """A line that stays, whatever."""
        self._say(f"warning: {message}")

    def progress(self, items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
        """Counts batches on the line; in a log, says what it did and how long that took."""
        if self.quiet or label == "validating":
            return iter(items)
        if self.live:
            self._draw("")
            return progress(items, total, label)
        return self._in_a_log(items, total, label)

    def _in_a_log(self, items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
        begun = time.monotonic()
        yield from progress(items, total, label)
        self._say(f"{label}: done after {clock(time.monotonic() - begun)}")

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be redrawn
        print(f"{CLEARED}{text[:width]}", end="", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        self.logged_at, self.lines = time.monotonic(), self.lines + 1
        text = printable(text, 4000)
        print(f"{CLEARED}{text}" if self.live else text, file=sys.stderr, flush=True)
