"""Metrics of a run as JSON lines and for TensorBoard, and a buffer of losses on the device."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet.core.files import cannot_write, open_for_appending, write_text
from dsnet.core.formats import METRICS
from dsnet.core.schema import check, parse_json
from dsnet.errors import DsnetError

__all__ = ["DivergedError", "LossBuffer", "MetricsFile", "read_metrics"]

MAX_SHOWN = 1e30  # numbers in charts


class DivergedError(DsnetError):
    """A loss is no longer a finite number."""


class LossBuffer:
    """Losses of the steps since they were last read, still on their device."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, tuple[str, ...], Tensor]] = []

    def add(self, step: int, terms: Mapping[str, Tensor]) -> None:
        """Add the loss terms of a step."""
        self._steps.append((step, tuple(terms), torch.stack([v.detach().float() for v in terms.values()])))

    def means(self) -> dict[str, float]:
        """Read and clear the buffer; return the mean of every term.

        Raises:
            DivergedError: If a loss is not finite; the message names step and term.
        """
        if not self._steps:
            return {}
        values = iter(torch.cat([terms for _, _, terms in self._steps]).tolist())  # one transfer
        steps, self._steps = self._steps, []
        by_name: dict[str, list[float]] = {}
        for step, names, _ in steps:
            for name in names:
                value = next(values)
                if not math.isfinite(value):
                    raise DivergedError(f"step {step}: the loss term {name} is {value}")
                by_name.setdefault(name, []).append(value)
        return {name: sum(each) / len(each) for name, each in by_name.items()}


class MetricsFile:
    """Writes ``metrics.jsonl`` of a run and, if tensorboard is installed, its event files.

    Args:
        folder: Folder of the run.
        after: Lines of later steps, which will be made again, are removed.
    """

    def __init__(self, folder: Path, *, after: int) -> None:
        inside_run = (folder.parent / "recipe.json").is_file()  # a run itself may be a link
        for path in (*([folder] if inside_run else []), folder / "tensorboard"):
            if path.is_symlink():
                raise DsnetError(f"{path} is a symbolic link inside a run, which is not followed; remove it")
        self.path = folder / "metrics.jsonl"
        kept = [line for line, values in _lines(self.path) if values["step"] <= after]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        write_text(self.path, "".join(kept))
        self._file = open_for_appending(self.path)
        self._board = _tensorboard(folder / "tensorboard", after)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a line, and its numbers to TensorBoard."""
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self._board.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the files."""
        with suppress(OSError):  # reported when it was written
            self._file.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return kind, step and all numbers of every line of a run's ``metrics.jsonl``.

    Damaged lines are left out, and so are values that a chart cannot show.
    """
    return [
        {key: value for key, value in values.items() if key == "kind" or _is_shown(value)}
        for _, values in _lines(path)
    ]


def _is_shown(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_SHOWN


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every complete line with its values."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with suppress(DsnetError):  # cut off when the process was killed
            values = parse_json(line.encode(), path)
            check(METRICS, values, path)
            if line.endswith("\n"):
                yield line, values


def _tensorboard(folder: Path, after: int) -> Any:  # noqa: ANN401  (a SummaryWriter or None)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=after + 1)
