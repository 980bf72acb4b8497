"""The static network that a user would take instead of a routed one, on the backend that runs it best."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dsnet.core.time_limit import TimeUpError
from dsnet.core.timer import Progress, silent, timed
from dsnet.cost import madds
from dsnet.counts import Shape
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.models.static_network import ReferenceNetwork
from dsnet.runtime.backends.base import get_backend, list_backends
from dsnet.runtime.executors.host import BucketedProgram, CompiledNetwork
from dsnet.runtime.partition.builders import bucketed_programs
from dsnet.runtime.partition.segments import Segment

__all__ = ["Baseline", "Static", "baselines", "static_network", "twin_name"]

HALVES = {"ds_mbnet": ("mobilenet_v1", {"width": 0.5})}  # the paper's own reference, of 149.5M MAdds
TWINS = {"ds_mbnet": "mobilenet_v1", "ds_resnet": "resnet50", "ds_vit": "deit"}
CALLS = 3  # timed by backend and batch size


class Static(NamedTuple):
    """A static network made ready, and by which backend."""

    name: str
    backend: str
    run: BucketedProgram
    madds: int


class Baseline(NamedTuple):
    """A static network to compare with."""

    model: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """With its width, if that is another than usual."""
        return self.model + "".join(f" × {value:g}" for value in self.options.values())


def twin_name(model: Supernet) -> str | None:
    """The static network of the same family; none for small images."""
    return next((b.name for b in baselines(model) if not b.options), None)


def baselines(model: Supernet) -> list[Baseline]:
    """The static network of the same family and, for MobileNets, the same at half width."""
    if model.input_spec.image_size != 224:  # they are made for larger images
        return []
    full = [Baseline(twin, {}) for family, twin in TWINS.items() if model.name.startswith(family)]
    return full + [Baseline(*half) for family, half in HALVES.items() if model.name.startswith(family)]


def static_network(
    name: str,
    compiled: CompiledNetwork,
    batches: Sequence[int],
    *,
    any_backend: bool,
    buckets: Sequence[int] | None = None,
    progress: Progress = silent,
    options: Mapping[str, Any] | None = None,
) -> Static:
    """A static network for the device of ``compiled``, in the batches that it runs best.

    On the same backend or, with ``any_backend`` and where that has no kernels for it, on the one that takes
    the least time an image at these batch sizes.
    """
    module = create_model(name, **(options or {})).eval().requires_grad_(False)
    cost = madds(module, image_size=compiled.image_size) if isinstance(module, ReferenceNetwork) else 0
    module = module.to(compiled.device, compiled.precision)
    part = Segment(module, Shape(compiled.input_spec.channels, *compiled.image_size))
    others = [
        n for n in list_backends() if get_backend(n).unavailable(compiled.device, compiled.precision) is None
    ]
    found = _timed(part, others if any_backend else [compiled.backend], batches, compiled, buckets, progress)
    if not found:
        found = _timed(part, others, batches, compiled, buckets, progress)
    best = min(found, key=lambda candidate: found[candidate][0])
    return Static(Baseline(name, options or {}).name, best, found[best][1], cost)


def _timed(
    part: Segment,
    candidates: Sequence[str],
    batches: Sequence[int],
    compiled: CompiledNetwork,
    buckets: Sequence[int] | None,
    progress: Progress,
) -> dict[str, tuple[float, BucketedProgram]]:
    """By backend: milliseconds an image, and the network; without those that it has no kernels for."""
    found: dict[str, tuple[float, BucketedProgram]] = {}
    for candidate in progress(candidates, len(candidates), "static network on backend"):
        backend = get_backend(candidate)
        sizes = sorted({1, *(buckets or backend.buckets)})
        try:
            made = bucketed_programs(
                {(): part},
                backend,
                sizes,
                device=compiled.device,
                precision=compiled.precision,
                progress=progress,
            )
        except TimeUpError:
            raise
        except DsnetError:
            continue
        except Exception:
            if candidate == compiled.backend:
                raise
            continue  # one that does not work here is not the best
        found[candidate] = (_an_image(made[()], part, batches, compiled), made[()])
    return found


@torch.no_grad()
def _an_image(
    run: BucketedProgram, part: Segment, batches: Sequence[int], compiled: CompiledNetwork
) -> float:
    """Milliseconds an image, mean over the batch sizes."""
    taken = []
    for batch in batches:
        x = torch.zeros(batch, *part.shape, device=compiled.device, dtype=compiled.precision)
        _, *samples = [timed(functools.partial(run, x), compiled.device) for _ in range(1 + CALLS)]
        taken.append(statistics.median(samples) / batch)
    return statistics.mean(taken)
