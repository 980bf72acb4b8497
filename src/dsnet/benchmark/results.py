"""The results of a benchmark, and their form in JSON files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsnet.benchmark._conditions import Conditions
from dsnet.benchmark.workloads import Mix

__all__ = ["Baseline", "BatchResult", "BenchResult", "Spread"]

RATIOS = ("ratio", "ratio_stream", "ratio_cascade", "speedup", "speedup_gate")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of the milliseconds per batch."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarise samples; the quartiles of a single one are that sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A static network that was timed. ``candidate`` is its key in `BatchResult.times`."""

    candidate: str
    name: str
    backend: str
    madds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The times at one batch size, in milliseconds per batch.

    Attributes:
        batch: Images per batch.
        rounds: How many rounds were measured.
        times: The spread of each candidate.
        ideal: The ideal time of the gated mix.
        ideal_cascade: The ideal time of the cascade.
    """

    batch: int
    rounds: int
    times: Mapping[str, Spread]
    ideal: float
    ideal_cascade: float

    @property
    def ratio(self) -> float:
        """Ideal time / time of the gated plan; 1 is ideal."""
        return self.ideal / self.times["gated"].median

    @property
    def ratio_stream(self) -> float:
        """Ideal time / time of the plan on a stream of batches."""
        return self.ideal / self.times["stream"].median

    @property
    def ratio_cascade(self) -> float:
        """Ideal time of the cascade / time of the plan's cascade."""
        return self.ideal_cascade / self.times["cascade"].median

    @property
    def speedup(self) -> float:
        """Time of the plan with all images at the largest route / time of the gated plan."""
        return self.times["full"].median / self.times["gated"].median

    @property
    def speedup_gate(self) -> float:
        """Like `speedup`, for the largest route that the gates decide for."""
        return self.times.get("gate largest", self.times["full"]).median / self.times["gated"].median


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A benchmark of one network on one device.

    Attributes:
        theory: Multiply-adds of the largest route / mean multiply-adds of the mix.
        resident: Bytes of weights.
        programs: How many programs the plan has.
        repeats: How many rounds were asked for.
        madds: Multiply-adds of the routes of the mix and of the two largest routes below.
        largest: The network's largest route.
        gate_largest: The largest route that the gates decide for.
        baselines: The static networks.
        missing: What was not measured within the time limit.
    """

    network: str
    device: str
    backend: str
    memory: str
    precision: str
    conditions: Conditions
    torch: str
    image_size: tuple[int, int]
    mix: Mix
    theory: float
    resident: int
    programs: int
    repeats: int
    results: tuple[BatchResult, ...]
    madds: Mapping[int, int]
    largest: int
    gate_largest: int
    baselines: tuple[Baseline, ...]
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        plain = asdict(self)
        plain |= plain.pop("conditions")
        plain |= {"mix": self.mix.source, "cascade": asdict(self.mix.cascade)}
        plain["shares"] = {str(route): share for route, share in self.mix.shares.items()}
        plain["madds"] = {str(route): cost for route, cost in sorted(self.madds.items())}
        plain["baselines"] = [
            {"way": b.candidate, "name": b.name, "backend": b.backend, "madds": b.madds}
            for b in self.baselines
        ]
        twins = [b for b in self.baselines if b.candidate == "twin"]
        plain["twin"] = twins[0].name if twins else None
        plain["twin_backend"] = twins[0].backend if twins else None
        plain["results"] = [
            asdict(result) | {ratio: getattr(result, ratio) for ratio in RATIOS} for result in self.results
        ]
        return plain
