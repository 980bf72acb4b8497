"""Latency tables: how long every segment of a network takes on a device, measured once and kept in a file.

A route's time is that of the prefix plus that of each segment, as in a `CostTable`. Times are those of whole
batches at one route, without deciding and regrouping. A segment of a plan ends with the scores of a gate; a
segment of the network itself does not include them.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    prefixes: tuple[Time, ...] = ()  # of each member, where the network has several

    def __post_init__(self) -> None:
        for gate, (rows, previous) in enumerate(zip(self.segments, (1, *self.choices), strict=False)):
            if [len(row) for row in rows] != [self.choices[gate]] * previous:
                raise DsnetError(
                    f"batch {self.batch}, gate {gate}: {previous} × {self.choices[gate]} times are needed, "
                    f"there are {[len(row) for row in rows]}"
                )
        for p50, p95 in (
            self.prefix,
            *self.prefixes,
            *(time for gate in self.segments for row in gate for time in row),
        ):
            if not p50 <= p95:
                raise DsnetError(
                    f"batch {self.batch} has a time of p50 {p50} ms, p95 {p95} ms; they must be in this order"
                )

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of choices of every gate."""
        return tuple(len(gate[0]) for gate in self.segments)

    def of(self, choices: tuple[int, ...]) -> Time:
        """Return the time of a route that the gates choose: sums over segments, which overestimate p95."""
        before = (0, *choices)
        parts = [self.prefix, *(self.segments[g][before[g]][c] for g, c in enumerate(choices))]
        return Time(sum(part.p50 for part in parts), sum(part.p95 for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Times of all segments of a network at some batch sizes, and what they were measured on."""

    model: ModelSpec
    image_size: tuple[int, int]  # height, width
    kind: DeviceKind
    device: str  # name of the processor or GPU
    backend: str  # what ran the segments, as `dsnet.runtime.compile` names it
    backend_version: str
    memory: Weights  # shared: the network itself, which slices its weights; packed: a plan of it
    dtype: str
    threads: int  # on the host
    torch_version: str
    date: str
    entries: tuple[BatchTimes, ...]  # by batch size, smallest first
    members: tuple[int, ...] = ()  # that each route belongs to, where the network has several

    def __post_init__(self) -> None:
        if not self.entries or list(self.batches) != sorted(set(self.batches)):
            raise DsnetError(f"a latency table needs batch sizes, smallest first, not {list(self.batches)}")
        if len({entry.choices for entry in self.entries}) > 1:
            raise DsnetError(
                "the batch sizes of a latency table must be of one network; their choices differ"
            )

    @property
    def batches(self) -> tuple[int, ...]:
        """The measured batch sizes."""
        return tuple(entry.batch for entry in self.entries)

    @property
    def ran(self) -> str:
        """Describes what was timed."""
        network = "the network itself" if self.memory == "shared" else "a plan"
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        backend = f"{self.backend} {self.backend_version}, {self.dtype}"
        return f"{network}, {backend}, on {self.kind} ({self.device}), {threads}"

    def at(self, batch: int | None = None) -> BatchTimes:
        """Return the times at a batch size (default: the smallest)."""
        for entry in self.entries:
            if batch is None or entry.batch == batch:
                return entry
        measured = ", ".join(map(str, self.batches))
        raise DsnetError(f"this latency table has no batch size {batch}; it has {measured}")

    def costs(self, batch: int | None = None) -> CostTable:
        """Return median milliseconds an image at a batch size (default: the smallest), as measured."""
        times = self.at(batch)
        return CostTable(
            unit="ms",
            prefix=times.prefix.p50 / times.batch,
            segments=tuple(
                tuple(tuple(t.p50 / times.batch for t in row) for row in gate) for gate in times.segments
            ),
            network=self.model.name,
            members=self.members,
            prefixes=tuple(time.p50 / times.batch for time in times.prefixes),
        )

    def route_time(self, choices: tuple[int, ...], batch: int | None = None) -> Time:
        """Return the time of a batch that runs one route alone."""
        entry = self.at(batch)
        if self.members and self.members[choices[0]] != 0:
            return entry.segments[0][0][choices[0]]
        return entry.of(choices)

    def check(self, model: Supernet, device: torch.device, image_size: int | None = None) -> None:
        """Check that the table is for this network, device and size of images.

        A plan may run in another precision than the network; the network itself may not.

        Raises:
            DsnetError: If it is not; the message has the command that measures the right table.
        """
        again = f"measure this one: `dsnet profile RUN --device {device.type}"
        if self.memory == "packed" and self.kind == device.type:
            again += f" --backend {self.backend} --precision {self.dtype}"
        again += "`"
        if self.kind != device.type:
            again += f"; or use it with --device {self.kind}"
        choices = tuple(len(row) for row in model.slice_table)
        pairs = [
            (_described(self.model), _described(model.spec)),
            (f"gates with {self.entries[0].choices} choices", f"gates with {choices} choices"),
            (f"{self.kind} ({self.device})", f"{device.type} ({device_name(device)})"),
        ]
        if self.memory == "shared":
            pairs.append((self.dtype, str(model.head.classifier.weight.dtype).removeprefix("torch.")))
        if image_size is not None:
            height, width = self.image_size
            pairs.append((f"{height} × {width} pixels", f"{image_size} × {image_size} pixels"))
        for measured, given in pairs:
            if measured != given:
                raise DsnetError(f"this latency table is of {measured}, not {given}; {again}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types)."""
        return {
            "format": FORMAT,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "members"},
            "model": {"name": self.model.name, "options": dict(self.model.options)},
            "image_size": list(self.image_size),
            "entries": [
                {
                    "batch": entry.batch,
                    "prefix": entry.prefix._asdict(),
                    "segments": [[[t._asdict() for t in row] for row in gate] for gate in entry.segments],
                    **({"prefixes": [t._asdict() for t in entry.prefixes]} if entry.prefixes else {}),
                }
                for entry in self.entries
            ],
            **({"members": list(self.members)} if self.members else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str | Path = "the latency table") -> LatencyTable:
        """Return the table that `to_dict` wrote; errors name the file ``where`` it was read."""
        if isinstance(data, Mapping) and data.get("format") == 1:  # only networks themselves were timed
            version = data.get("torch_version")
            data = {**data, "backend_version": version, "memory": "shared", "format": 2}
        if isinstance(data, Mapping) and data.get("format", FORMAT) != FORMAT:
            given = shorten(data["format"])
            raise DsnetError(
                f"{where}: a latency table of format {given} cannot be read; only up to {FORMAT}"
            )
        check(LATENCY, data, where)
        plain = {key: value for key, value in data.items() if key != "format"}
        model, (height, width) = data["model"], data["image_size"]
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in model["options"].items()}
        try:
            plain |= {
                "model": ModelSpec(name=model["name"], options=tuple(sorted(options.items()))),
                "image_size": (height, width),
                "entries": tuple(map(_entry, data["entries"])),
                "members": tuple(data.get("members", ())),
            }
            return cls(**plain)
        except DsnetError as error:
            raise DsnetError(f"{where}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        write_output(Path(path), json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LatencyTable:
        """Return the table in a file that `save` wrote."""
        path = Path(path)
        missing = f"{path} cannot be read: there is no such file; `dsnet profile RUN --out {path}` makes it"
        return cls.from_dict(read_json(path, missing=missing), path)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the host's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no such device here"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _described(spec: ModelSpec) -> str:
    return f"{spec.name}({', '.join(f'{key}={value!r}' for key, value in spec.options)})"


def _entry(data: Mapping[str, Any]) -> BatchTimes:
    def time(plain: Mapping[str, float]) -> Time:
        return Time(p50=float(plain["p50"]), p95=float(plain["p95"]))

    segments = tuple(tuple(tuple(map(time, row)) for row in gate) for gate in data["segments"])
    prefixes = tuple(map(time, data.get("prefixes", ())))
    return BatchTimes(batch=data["batch"], prefix=time(data["prefix"]), segments=segments, prefixes=prefixes)
