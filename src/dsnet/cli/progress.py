"""Progress on stderr: a line that is redrawn on a terminal, a new line now and then in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dsnet.errors import printable
from dsnet.report.text import roughly
from dsnet.training.callbacks import Callback

if TYPE_CHECKING:
    from dsnet.training.evaluation import RouteResult

__all__ = ["CLEAR", "StatusLine", "TrainingProgress", "clock", "progress"]

CLEAR = "\r\033[2K"  # erases the line that is redrawn
REDRAW_SECONDS = 0.2
LOG_SECONDS = 15.0  # between lines where stderr is no terminal
TOLERANCE = 1.25  # an estimate that is off by less is not corrected
FORECAST_SECONDS, FORECAST_STEPS = 3.0, 30  # of training, after which its duration is printed

T = TypeVar("T")


class StatusLine:
    """Writes lines to stderr, and a status that is redrawn on a terminal and repeated in a log."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.live = sys.stderr.isatty() and not quiet
        self.start()

    def start(self) -> None:
        """Count lines and seconds from now."""
        self.lines = 0
        self.updated = 0.0 if self.live else time.monotonic()

    def write(self, text: str) -> None:
        """Print a line that stays."""
        self.updated, self.lines = time.monotonic(), self.lines + 1
        text = printable(text, 4000)
        print(f"{CLEAR}{text}" if self.live else text, file=sys.stderr, flush=True)

    def draw(self, text: str) -> None:
        """Redraw the status, cut to the width of the terminal: a line that wraps cannot be erased."""
        self.updated = time.monotonic()
        width = shutil.get_terminal_size().columns - 1
        print(f"{CLEAR}{text[:width]}", end="", file=sys.stderr, flush=True)

    def update(self, text: str, *, last: bool = False) -> None:
        """Show the status if enough time has passed; on a terminal also the ``last`` one."""
        seconds = time.monotonic() - self.updated
        if self.live and (last or seconds > REDRAW_SECONDS):
            self.draw(text)
        elif not self.live and not self.quiet and not last and seconds >= LOG_SECONDS:
            self.write(text)


def progress(items: Iterable[T], total: int, label: str, *, stages: bool = False) -> Iterator[T]:
    """Pass on items and show how many have been processed.

    Args:
        items: The items.
        total: Their number; 0: unknown.
        label: What they are, for example ``batch``.
        stages: Print a line when the items begin and one when they are done, even if that takes no time.
    """
    line, begin, of = StatusLine(), time.monotonic(), f"/{total}" if total else ""
    if stages:
        line.write(f"{label}: {total or 'some'} to do")
    for done, item in enumerate(items, 1):
        yield item
        seconds = (time.monotonic() - begin) / done * (total - done)
        left = f", {clock(seconds)} left" if total and not line.live else ""
        line.update(f"{label} {done}{of}{left}", last=done == total)
    if stages:
        line.write(f"{label}: done after {clock(time.monotonic() - begin)}")
    elif line.live:
        print(file=sys.stderr)


def clock(seconds: float) -> str:
    """Format a duration as 0:05, 12:30 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TrainingProgress(Callback):
    """Shows the progress of training: a status, a line per validation, and corrected estimates.

    Args:
        quiet: Print warnings only.
        expected: Seconds that training was estimated to take; corrected after the first epoch if far off.
        epochs: The number of epochs: a line is printed at the end of each, and the duration once it is known.
            None: runs that validate, or that were estimated before.
    """

    def __init__(
        self, *, quiet: bool = False, expected: float | None = None, epochs: int | None = None
    ) -> None:
        self.quiet, self.expected, self.epochs = quiet, expected, epochs
        self.line = StatusLine(quiet=quiet)
        self.losses, self.rate, self.forecast_made = "", 0.0, False

    def notice(self, message: str) -> None:
        """Print a line unless ``quiet``."""
        if not self.quiet:
            self.line.write(message)

    def on_message(self, message: str) -> None:
        """Print a warning."""
        self.line.write(f"warning: {message}")

    def on_train_begin(self, step: int, steps: int) -> None:
        """Note where training begins."""
        self.steps = steps
        self.first: tuple[int, int, float] | None = None  # step (which warms up), epoch, time of its end
        self.line.start()
        if step:
            self.notice(f"Going on after step {step} of {steps}")
            self.line.lines = 0

    def on_step_end(self, step: int, epoch: int, images: int) -> None:
        """Update the status."""
        if self.first is None:
            self.first = (step, epoch, time.monotonic())
        elif epoch > self.first[1]:
            self._correct_estimate(step - 1)
        if self.quiet:
            return
        last = step >= self.steps
        self.line.update(self._status(step, epoch), last=last)
        if self.epochs is not None:
            self._report_epoch(step, epoch, self.steps // self.epochs)
        elif last and not self.line.live and not self.line.lines:
            self.line.write(self._status(step, epoch))

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep losses and rate for the status."""
        self.rate = values["images_per_s"]
        terms = {name: v for name, v in values.items() if "/" in name and not name.startswith("taken/")}
        parts = " ".join(f"{name} {value:.3f}" for name, value in terms.items())
        self.losses = f"loss {values['loss']:.3f}" + (f" ({parts})" if parts else "")

    def on_validation_end(self, step: int, epoch: int, results: Sequence[RouteResult]) -> None:
        """Print the accuracies."""
        reached = ", ".join(f"route {r.route} {r.accuracy:.1%}" for r in results)
        parts = (f"epoch {epoch + 1}: held-out {reached}", self.losses, self._rate(), self._left(step))
        self.notice("; ".join(filter(None, parts)))
        self._correct_estimate(step)

    def progress(self, items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
        """Show the progress of what is not a step; validation is fast and reports by itself."""
        if self.quiet or label == "validating":
            return iter(items)
        if self.line.live:
            self.line.draw("")
        return progress(items, total, label, stages=not self.line.live)

    def _status(self, step: int, epoch: int) -> str:
        done = round(20 * step / self.steps)
        bar = "█" * done + "░" * (20 - done) if self.line.live else "step"
        parts = (f"epoch {epoch + 1} {bar} {step}/{self.steps}", self.losses, self._rate(), self._left(step))
        return " ".join(filter(None, parts))

    def _rate(self) -> str:
        return f"{self.rate:,.{0 if self.rate >= 10 else 1}f} images/s" if self.rate else ""

    def _left(self, step: int) -> str:
        seconds = self._seconds_left(step)
        return f"{clock(seconds)} left" if seconds else ""

    def _seconds_left(self, step: int) -> float | None:
        """Seconds left at the speed since the first step; None until a second step is done."""
        if self.first is None or step <= self.first[0]:
            return None
        first, _, begin = self.first
        return (time.monotonic() - begin) / (step - first) * (self.steps - step)

    def _correct_estimate(self, step: int) -> None:
        """Print a corrected estimate once, after the first epoch, if the expected one is far off."""
        expected, self.expected, left = self.expected, None, self._seconds_left(step)
        if expected is None or not left:
            return
        expected *= (self.steps - step) / self.steps
        if not 1 / TOLERANCE < left / max(expected, 1e-9) < TOLERANCE:
            self.notice(
                f"Corrected estimate, by the speed of the first epoch: {roughly(left)} left "
                f"(not {roughly(expected)})"
            )

    def _report_epoch(self, step: int, epoch: int, epoch_steps: int) -> None:
        """Print the duration as soon as it is known, and a line at the end of an epoch."""
        ends, left = step % epoch_steps == 0, self._seconds_left(step)
        if self.first is not None and left and not self.forecast_made:
            first, _, begin = self.first
            enough = time.monotonic() - begin > FORECAST_SECONDS or step - first >= FORECAST_STEPS
            self.forecast_made = ends or enough
            if self.forecast_made:
                self.notice(f"Training takes {roughly(left)} from here; figures and the gate come on top")
        if ends:
            losses = f": {self.losses}; {self._rate()}" if self.losses else ""
            rest = f"; {roughly(left)} left" if left else ""
            self.notice(f"epoch {epoch + 1} of {self.epochs}{losses}{rest}")
