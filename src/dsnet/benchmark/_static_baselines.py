"""Static networks to compare a routed one with, each on the backend that runs it fastest."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet.benchmark.results import Baseline
from dsnet.core.timer import Progress, TimeUpError, silent, time_interleaved
from dsnet.cost import madds
from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.runtime.backends.base import get_backend, list_backends
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork
from dsnet.runtime.partition.builders import bucketed_programs
from dsnet.runtime.partition.segments import Segment

__all__ = ["StaticNetwork", "compile_static", "static_networks"]

ROUNDS = 3  # of timing, for each backend and batch size


class StaticNetwork(NamedTuple):
    """A registered static network with options. ``candidate`` is the key of its times."""

    candidate: str
    model: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The model, with its width unless that is the full one."""
        return self.model + "".join(f" × {value:g}" for value in self.options.values())


STATIC_NETWORKS = {  # by family of supernets
    "ds_mbnet": (
        StaticNetwork("twin", "mobilenet_v1", {}),
        StaticNetwork("half", "mobilenet_v1", {"width": 0.5}),  # the paper's reference, 149.5M MAdds
    ),
    "ds_resnet": (StaticNetwork("twin", "resnet50", {}),),
    "ds_vit": (StaticNetwork("twin", "deit", {}),),
}


def static_networks(model: Supernet) -> tuple[StaticNetwork, ...]:
    """Return the static networks of the same family; none for small images, which they do not take."""
    if model.input_spec.image_size != 224:
        return ()
    return next((nets for family, nets in STATIC_NETWORKS.items() if model.name.startswith(family)), ())


def compile_static(
    network: StaticNetwork,
    compiled: CompiledNetwork,
    batches: Sequence[int],
    *,
    any_backend: bool,
    buckets: Sequence[int] | None = None,
    progress: Progress = silent,
) -> tuple[Baseline, BucketedProgram]:
    """Compile a static network for the device and precision of a plan.

    Args:
        network: The static network.
        compiled: The plan's network.
        batches: Batch sizes to compare backends at.
        any_backend: Take the backend with the least time per image. Otherwise the plan's backend is taken,
            unless it cannot run this network.
        buckets: Batch sizes to compile for (default: those of the backend).
        progress: Progress callback.
    """
    device, precision = compiled.device, compiled.precision
    module = create_model(network.model, **network.options).eval().requires_grad_(False)
    cost = madds(module, image_size=compiled.image_size)
    segment = Segment(module.to(device, precision), Shape(*compiled.image_shape))
    inputs = {batch: torch.zeros(batch, *segment.shape, device=device, dtype=precision) for batch in batches}
    programs: dict[str, tuple[float, BucketedProgram]] = {}  # by backend, with milliseconds per image

    def compile_by(backends: Sequence[str]) -> None:
        for name in progress(backends, len(backends), "static network on backend"):
            backend = get_backend(name)
            sizes = sorted({1, *(buckets or backend.buckets)})
            try:
                program = bucketed_programs(
                    {(): segment}, backend, sizes, device=device, precision=precision, progress=progress
                )[()]
            except TimeUpError:
                raise
            except Exception as error:
                if name == compiled.backend and not isinstance(error, DsnetError):
                    raise
                continue  # another backend may run it
            programs[name] = (_milliseconds_per_image(program, inputs, device), program)

    usable = [name for name in list_backends() if get_backend(name).unavailable(device, precision) is None]
    compile_by(usable if any_backend else [compiled.backend])
    if not programs:
        compile_by(usable)
    best = min(programs, key=lambda backend: programs[backend][0])
    return Baseline(network.candidate, network.name, best, cost), programs[best][1]


def _milliseconds_per_image(
    program: BucketedProgram, inputs: Mapping[int, Tensor], device: torch.device
) -> float:
    """Return the mean over batch sizes."""
    calls = {batch: functools.partial(program, x) for batch, x in inputs.items()}
    samples = time_interleaved(calls, device, rounds=ROUNDS, warm_up=1)
    return statistics.mean(statistics.median(times) / batch for batch, times in samples.items())
