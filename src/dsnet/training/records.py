"""What a run writes down, as JSON lines and for TensorBoard; losses are read from the device now and then."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = ["DivergedError", "LossBuffer", "MetricsFile"]


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
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = _lines_up_to(self.path, after)
        self.path.write_text("".join(kept), encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", after)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Adds a line, and the numbers in it to TensorBoard."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # cut off when the process was killed
            continue
    return kept


def _tensorboard(folder: Path, after: int) -> Any:  # noqa: ANN401  (a SummaryWriter or None)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=after + 1)
