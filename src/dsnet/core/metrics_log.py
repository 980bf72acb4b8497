"""What a run writes down, as JSON lines and for TensorBoard; losses are read from the device now and then."""

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

LARGEST = 1e30  # of a number that charts show


class DivergedError(DsnetError):
    """A loss is no longer a finite number."""


class LossBuffer:
    """Losses of the steps since the last look, still on their device."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, tuple[str, ...], Tensor]] = []

    def add(self, step: int, terms: Mapping[str, Tensor]) -> None:
        """Keeps the terms of a step."""
        self._steps.append((step, tuple(terms), torch.stack([v.detach().float() for v in terms.values()])))

    def means(self) -> dict[str, float]:
        """The mean of every term since the last look; raises where one is not finite, naming it."""
        if not self._steps:
            return {}
        values = torch.cat([v for _, _, v in self._steps]).tolist()
        sums: dict[str, list[float]] = {}
        position = 0
        taken, self._steps = self._steps, []
        for step, names, _ in taken:
            for name in names:
                value = values[position]
                position += 1
                if not math.isfinite(value):
                    raise DivergedError(f"step {step}: the loss term {name} is {value}")
                sums.setdefault(name, []).append(value)
        return {name: sum(each) / len(each) for name, each in sums.items()}


class MetricsFile:
    """``metrics.jsonl`` of a run and, where tensorboard is installed, its event file beside it."""

    def __init__(self, folder: Path, *, after: int) -> None:
        """Opens the file; lines of steps beyond ``after``, which will be made again, are removed."""
        own = [folder] if (folder.parent / "recipe.json").is_file() else []  # a run itself may be a link
        for inside in (*own, folder / "tensorboard"):
            if inside.is_symlink():
                raise DsnetError(
                    f"{inside} is a symbolic link inside a run, which is not followed; remove it"
                )
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
        """Adds a line, and the numbers in it to TensorBoard."""
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
        """Closes the files."""
        with suppress(OSError):  # what could not be written was told when it was
            self._file.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return kind, step and all numbers of every line of a run's ``metrics.jsonl``.

    Damaged lines are left out, and so are values that are no numbers that a chart can show.
    """
    return [
        {key: value for key, value in values.items() if key == "kind" or _is_shown(value)}
        for _, values in _lines(path)
    ]


def _is_shown(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every whole line, and what it says."""
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
