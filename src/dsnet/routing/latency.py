"""What every part of a route takes on a device: measured once, kept in a file, used as a table of costs.

A route's time is that of the prefix plus that of each segment, as in a `CostTable`. Times are of whole
batches at one route; regrouping of a mixed batch is not in them. With a plan, the time of a segment includes
the scores of the gate behind it; with the network itself, it does not.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from dsnet.core.files import write_output
from dsnet.core.formats import LATENCY
from dsnet.core.schema import check, read_json
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.models.supernet import ModelSpec
from dsnet.routing.cost_table import CostTable

__all__ = ["BatchTimes", "DeviceKind", "LatencyTable", "Time", "Weights", "device_name"]

FORMAT = 2

DeviceKind = Literal["cpu", "cuda"]
Weights = Literal["shared", "packed"]


class Time(NamedTuple):
    """Milliseconds for a whole batch."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    """Times at a batch size: ``segments[gate][previous choice][choice]``; at the first gate previous is 0."""

    batch: int
    prefix: Time
    segments: tuple[tuple[tuple[Time, ...], ...], ...]

    def __post_init__(self) -> None:
        if type(self.batch) is not int or self.batch < 1:
            raise DsnetError(f"a batch size is a positive integer, not {self.batch!r}")
        if not self.segments or not all(gate and gate[0] for gate in self.segments):
            raise DsnetError(f"batch {self.batch} lacks the times of its segments")
        for gate, (rows, previous) in enumerate(zip(self.segments, (1, *self.choices), strict=False)):
            if [len(row) for row in rows] != [self.choices[gate]] * previous:
                raise DsnetError(
                    f"batch {self.batch}, gate {gate}: {previous} × {self.choices[gate]} times are needed, "
                    f"there are {[len(row) for row in rows]}"
                )
        for p50, p95 in (self.prefix, *(t for gate in self.segments for row in gate for t in row)):
            if not (math.isfinite(p50) and math.isfinite(p95) and 0 <= p50 <= p95):
                raise DsnetError(
                    f"batch {self.batch} has a time of p50 {p50} ms, p95 {p95} ms; "
                    "both must be finite, at least 0 and in this order"
                )

    @property
    def choices(self) -> tuple[int, ...]:
        """How many choices every gate has."""
        return tuple(len(gate[0]) for gate in self.segments)

    def of(self, choices: tuple[int, ...]) -> Time:
        """A whole route: the sums of its parts. That of p95 is on the high side: parts seldom lag at once."""
        before = (0, *choices)
        parts = [self.prefix, *(self.segments[g][before[g]][c] for g, c in enumerate(choices))]
        return Time(sum(part.p50 for part in parts), sum(part.p95 for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Times of all parts of a network at some batch sizes, and what they were measured on."""

    model: ModelSpec
    image_size: tuple[int, int]  # height, width
    kind: DeviceKind
    device: str  # the processor's or GPU's name
    backend: str  # what ran the parts, as `dsnet.runtime.compile` names it
    backend_version: str
    memory: Weights  # shared: the network itself, which slices its weights; packed: a plan of it
    dtype: str
    threads: int  # on the host
    torch_version: str
    date: str
    entries: tuple[BatchTimes, ...]  # by batch size, smallest first

    def __post_init__(self) -> None:
        if self.kind not in get_args(DeviceKind):
            raise DsnetError(
                f"unknown kind of device {self.kind!r}; possible: {', '.join(get_args(DeviceKind))}"
            )
        if self.memory not in get_args(Weights):
            raise DsnetError(f"unknown memory {self.memory!r}; possible: {', '.join(get_args(Weights))}")
        if not self.entries or list(self.batches) != sorted(set(self.batches)):
            raise DsnetError(f"a latency table needs batch sizes, smallest first, not {list(self.batches)}")
        if len({entry.choices for entry in self.entries}) > 1:
            raise DsnetError(
                "the batch sizes of a latency table must be of one network; their choices differ"
            )

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that were measured."""
        return tuple(entry.batch for entry in self.entries)

    def at(self, batch: int | None = None) -> BatchTimes:
        """The times at a batch size; by default the smallest."""
        for entry in self.entries:
            if batch is None or entry.batch == batch:
                return entry
        raise DsnetError(
            f"this latency table has no batch size {batch}; it has {', '.join(map(str, self.batches))}"
        )

    def costs(self, batch: int | None = None) -> CostTable:
        """Milliseconds an image (medians over the batch size), as measured: noise is left in."""
        times = self.at(batch)
        return CostTable(
            unit="ms",
            prefix=times.prefix.p50 / times.batch,
            segments=tuple(
                tuple(tuple(t.p50 / times.batch for t in row) for row in gate) for gate in times.segments
            ),
            network=self.model.name,
        )

    def check(self, model: Supernet, device: torch.device, image_size: int | None = None) -> None:
        """Raises where it was made for another network, device or size of images than these.

        A plan may run in another precision than the network that is given here; the network itself may not.
        """
        command = f"`dsnet profile RUN --device {device.type}{self._how(device)}`"
        if self.model != model.spec:
            raise DsnetError(
                f"this latency table is of {_written(self.model)}, not of {_written(model.spec)}; "
                f"measure that one: {command}"
            )
        choices = tuple(len(row) for row in model.slice_table)
        if self.entries[0].choices != choices:
            raise DsnetError(
                f"this latency table is of a {self.model.name} whose gates have {self.entries[0].choices} "
                f"choices, not {choices}; measure this one: {command}"
            )
        if (self.kind, self.device) != (device.type, device_name(device)):
            instead = "" if self.kind == device.type else f"; or use it with --device {self.kind}"
            raise DsnetError(
                f"this latency table was measured on {self.kind} ({self.device}), not on {device.type} "
                f"({device_name(device)}); measure the network there: {command}{instead}"
            )
        dtype = str(model.head.classifier.weight.dtype).removeprefix("torch.")
        if self.memory == "shared" and self.dtype != dtype:
            raise DsnetError(f"this latency table is of {self.dtype}, the network is {dtype}: {command}")
        if image_size is not None and self.image_size != (image_size, image_size):
            height, width = self.image_size
            raise DsnetError(
                f"this latency table is of images of {height} × {width} pixels, these have {image_size} × "
                f"{image_size}; measure those: {command}"
            )

    @property
    def ran(self) -> str:
        """What was timed, in words."""
        what = "the network itself" if self.memory == "shared" else "a plan"
        return (
            f"{what}, {self.backend} {self.backend_version}, {self.dtype}, on {self.kind} ({self.device}), "
            f"{'one thread' if self.threads == 1 else f'{self.threads} threads'}"
        )

    def _how(self, device: torch.device) -> str:
        """What else to tell `dsnet profile`, to be timed as this was."""
        if self.memory == "shared" or self.kind != device.type:
            return ""
        return f" --backend {self.backend} --precision {self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON types)."""
        return {
            "format": FORMAT,
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "model": {"name": self.model.name, "options": dict(self.model.options)},
            "image_size": list(self.image_size),
            "entries": [
                {
                    "batch": entry.batch,
                    "prefix": entry.prefix._asdict(),
                    "segments": [[[t._asdict() for t in row] for row in gate] for gate in entry.segments],
                }
                for entry in self.entries
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str | Path = "the latency table") -> LatencyTable:
        """The table that `to_dict` wrote; ``where`` it was read, for errors."""
        if isinstance(data, Mapping) and data.get("format") == 1:
            data = _from_format_1(data)
        if isinstance(data, Mapping) and data.get("format", FORMAT) != FORMAT:
            given = shorten(data["format"])
            raise DsnetError(
                f"{where}: a latency table of format {given} cannot be read; only up to {FORMAT}"
            )
        check(LATENCY, data, where)
        plain = {
            name: data[name] for name in {f.name for f in fields(cls)} - {"model", "image_size", "entries"}
        }
        height, width = data["image_size"]
        try:
            return cls(
                **plain,
                model=ModelSpec(
                    name=data["model"]["name"], options=tuple(sorted(data["model"]["options"].items()))
                ),
                image_size=(height, width),
                entries=tuple(map(_entry, data["entries"])),
            )
        except DsnetError as error:
            raise DsnetError(f"{where}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        write_output(Path(path), json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LatencyTable:
        """The table in a file that `save` wrote."""
        path = Path(path)
        missing = f"{path} cannot be read: there is no such file; `dsnet profile RUN --out {path}` makes it"
        return cls.from_dict(read_json(path, missing=missing), path)


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the host's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no such device here"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _written(spec: ModelSpec) -> str:
    return f"{spec.name}({', '.join(f'{key}={value!r}' for key, value in spec.options)})"


def _from_format_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Format 2 of a table from when only the network itself was timed."""
    how = {"backend_version": data.get("torch_version"), "memory": "shared"}
    return {**data, **how, "format": 2}


def _entry(data: Mapping[str, Any]) -> BatchTimes:
    return BatchTimes(
        batch=data["batch"],
        prefix=_time(data["prefix"]),
        segments=tuple(tuple(tuple(map(_time, row)) for row in gate) for gate in data["segments"]),
    )


def _time(data: Mapping[str, float]) -> Time:
    return Time(p50=float(data["p50"]), p95=float(data["p95"]))
